"""Supervised training at the server alone: the bounds that semi-supervised methods are compared
with.

With ``data.num_labels`` set to the method's label count it is the partially supervised bound, with
``all`` the fully supervised one. No client takes part.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork, labeled_work
from lightning_fedssl.models import MLP
from lightning_fedssl.models.head import trains_head_alone
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.storage.hyperparameters import hyperparameters
from lightning_fedssl.storage.named_value import target_of

if TYPE_CHECKING:
    from lightning_fedssl.round import Federation


@hyperparameters
class Supervised(FederatedAlgorithm):
    """Centralised training on the server's labelled images.

    A round is ``server_epochs``, or ``server_steps``.

    Args:
        server_epochs: Epochs in a round.
        server_steps: Steps in a round, instead of ``server_epochs``.
        keep_server_optimizer: The server's momentum persists between rounds.
        server_view: The view of the labelled images. ``strong`` is the augmentation that
            semi-supervised methods use on their unlabelled images.

    Example:
        >>> from lightning_fedssl import CNN
        >>> Supervised(network=CNN, server_steps=50).trains_clients
        False
    """

    not_deployable = no_personal = "trains at the server alone, without clients"

    needs = "loss"
    labels_at = "server"
    statistics_of = "server"
    trains_clients = False

    server_epochs: float = 1
    server_steps: int | None = None
    keep_server_optimizer: bool = True
    server_view: Literal["weak", "strong"] = "weak"

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 1, "server_steps")

    @classmethod
    def bound_of(cls, method: FederatedAlgorithm, server_steps: int) -> Supervised:
        """The bound of a method: the same network, initial weights, server's optimizer, schedule
        and view.

        Args:
            method: The method.
            server_steps: Steps in a round.
        """
        view = getattr(method, "server_view", "weak")
        return cls.like(method, server_steps=server_steps, server_view=view)

    @classmethod
    def linear(cls, method: FederatedAlgorithm) -> Supervised:
        """The best linear answer, without a step of training: on what the classifier of a method
        receives, if that starts from this answer and trains no other layer; else on the samples.

        Args:
            method: The method of a run.
        """
        if method.init_head == "labels" and trains_head_alone(method.network):
            answer = cls.bound_of(method, 1)
            answer.server_steps, answer.server_epochs = None, 0
            return answer
        return cls(network=partial(MLP, hidden=()), init_head="labels", server_epochs=0)

    @classmethod
    def in_place_of(cls, method: FederatedAlgorithm, path: Path | None) -> FederatedAlgorithm:
        """The method of a run's ``chosen.ckpt``: the run's, or that of its labels alone.

        Args:
            method: The method of the run.
            path: A checkpoint; any other leaves the method as it is.
        """
        is_chosen = path is not None and path.name == checkpoint_file.CHOSEN and path.is_file()
        if path is None or not is_chosen or isinstance(method, cls):
            return method
        if checkpoint_file.load(path)["algorithm"] != cls.__name__:
            return method
        module = getattr(target_of(method.network_factory), "__module__", "")
        return cls.load_from_checkpoint(path, map_location="cpu", trust=[module])

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Epochs on the labelled images, in the chosen view."""
        return labeled_work(data, self.server_epochs, self.server_steps, view=self.server_view)

    def round(self, federation: Federation) -> None:
        """The server trains; no client does."""
        federation.train_server()
