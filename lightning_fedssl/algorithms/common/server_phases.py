"""Methods whose server trains after the clients, before them, or in parallel with them, and may
have momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm, require
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import WeightedSum, momentum_step
from lightning_fedssl.local_work import LocalWork, labeled_work

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.round import Federation


class ServerPhases(FederatedAlgorithm):
    """Federated averaging with a choice of the server's phase, and momentum of its step towards the
    mean.

    Args:
        server_phase: When the server trains: ``after`` the aggregation, ``before`` the clients (and
            once more after the last round), or in ``parallel``: from the same model as the clients,
            then averaged with their mean. If a run with ``before`` is continued with more rounds,
            the phase after its former last round is not undone; it used the batches of the next
            round's first phase.
        server_weight: With ``parallel``, the server's share in the average.
        server_momentum: beta_g, momentum of the server's step in the direction of the mean update;
            0 gives the plain mean. With ``parallel`` the step starts from the weights that the
            server has trained, as in the code of SemiFL's authors (``update_parallel``).
        server_view: The view of the labelled images that the server trains on.
        server_steps: Steps of the server in its phase; if left out, ``server_epochs``.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(
        self,
        server_phase: Literal["after", "before", "parallel"] = "after",
        server_weight: float = 0.5,
        server_momentum: float = 0.0,
        server_view: Literal["weak", "strong"] = "weak",
        server_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        valid_steps = server_steps is None or server_steps >= 1
        require(valid_steps, "server_steps", server_steps, "give 1 or more")
        require(
            0 <= server_weight <= 1, "server_weight", server_weight, "give a share between 0 and 1"
        )
        require(
            0 <= server_momentum < 1,
            "server_momentum",
            server_momentum,
            "give a number from 0 to below 1",
        )
        self.server_phase = server_phase
        self.server_weight = server_weight
        self.server_momentum = server_momentum
        self.server_view: Literal["weak", "strong"] = server_view
        self.server_steps = server_steps

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse a parallel phase of a server that does not train: the mean would be averaged with
        the last weights.
        """
        trains = data.label_location == "server" and (self.server_epochs or self.server_steps)
        fits = self.server_phase != "parallel" or bool(trains)
        require(
            fits,
            "server_phase",
            self.server_phase,
            "the server has no labels or epochs; leave the key out",
        )

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Epochs, or steps, over the server's labelled images.

        None where the clients have the labels.
        """
        return labeled_work(data, self.server_epochs, self.server_steps, view=self.server_view)

    def aggregate(self, sums: dict[str, WeightedSum]) -> None:
        """Compute the new global model. Without an update,
        weights and momentum stay as they are.
        """
        mean = sums["model"].mean()
        if mean is None:
            return
        if self.server_phase == "parallel":
            own = self.server.model()
            mean = {name: torch.lerp(t, own[name], self.server_weight) for name, t in mean.items()}
        weights = {name: mean.pop(name) for name in self.server.parameters if name in mean}
        new, self.server.momentum = momentum_step(
            self.server.parameters, weights, self.server.momentum, self.server_momentum
        )
        self.server.update(new, buffers=mean)

    def round(self, federation: Federation) -> None:
        """One round: the clients train from the global model, the server averages, and trains in
        its phase.
        """
        last = self.current_round.index == self.current_round.max_rounds
        if self.server_phase == "before":
            federation.train_server()
        sums = self.accumulate(federation.train_clients())
        if self.server_phase == "parallel":
            federation.train_server()
        self.aggregate(sums)
        if self.server_phase == "after" or (self.server_phase == "before" and last):
            federation.train_server()
