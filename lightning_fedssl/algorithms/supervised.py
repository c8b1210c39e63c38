"""Supervised training at the server alone: the bounds that semi-supervised methods are compared with.

With ``data.num_labels`` set to the method's label count it is the partially supervised bound, with ``all`` the fully
supervised one. No client takes part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch.callbacks import Callback

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.local_work import LocalWork, labeled_work

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.trainer.federation import Federation


class Supervised(FederatedAlgorithm):
    """Centralised training on the server's labelled images; a round is ``server_epochs`` epochs.

    Args:
        server_epochs: Epochs in a round.
        keep_server_optimizer: The server's momentum persists between rounds.
        server_view: The view of the labelled images. ``strong`` is the augmentation that semi-supervised methods use on
            their unlabelled images.
        kwargs: The arguments every algorithm takes; those of clients have no effect.
    """

    trains_clients: ClassVar[bool] = False

    def __init__(
        self,
        server_epochs: float = 1,
        keep_server_optimizer: bool = True,
        server_view: Literal["weak", "strong"] = "weak",
        **kwargs: Any,
    ) -> None:
        super().__init__(server_epochs=server_epochs, keep_server_optimizer=keep_server_optimizer, **kwargs)
        self.server_view: Literal["weak", "strong"] = server_view

    def check_data(self, data: FederatedDataModule) -> None:
        """The server needs labels."""
        checks.labels_at(data, "server", "Supervised")

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Epochs on the labelled images, in the chosen view."""
        return labeled_work(data, self.server_epochs, view=self.server_view)

    def configure_callbacks(self) -> list[Callback]:
        """Static batch-norm statistics of the server's own data, for networks that use them."""
        from lightning_fedssl.callbacks import StaticBatchNorm

        return [StaticBatchNorm(source="server")] if has_static_batch_norm(self) else []

    def round(self, federation: Federation) -> None:
        """The server trains; no client does."""
        federation.train_server()
