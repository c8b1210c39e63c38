"""FedAvg and FedProx: federated averaging with labels at the clients.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, arXiv 1602.05629. T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
"Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127.

A round:

1. the server sends the global weights w to the drawn clients;
2. each takes local steps on its labelled images, FedProx with ``mu/2 ||w_k - w||^2`` added to the loss;
3. the server averages the trained weights, weighted by the number of images.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.losses import proximal_term
from lightning_fedssl.state import Batch


class FedAvg(ServerPhases):
    """Federated averaging on labelled clients; FedProx with ``prox_mu`` above 0.

    Args:
        prox_mu: mu, the weight of the proximal term (FedProx Eq. 2); 0 is FedAvg.
        kwargs: The arguments of :class:`~lightning_fedssl.algorithms.common.server_phases.ServerPhases`.
    """

    def __init__(self, prox_mu: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        checks.require(prox_mu >= 0, "prox_mu", prox_mu, "give 0 (FedAvg) or more (FedProx)")
        self.prox_mu = prox_mu

    def check_data(self, data: FederatedDataModule) -> None:
        """Clients need labels of their own."""
        checks.labels_at(data, "clients", "FedAvg")
        super().check_data(data)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Cross-entropy, with FedProx's proximal term."""
        loss = super().training_step(batch, batch_idx)
        return loss if loss is None else self.with_proximal_term(loss)

    def with_proximal_term(self, loss: Tensor) -> Tensor:
        """Add ``mu/2 ||w_k - w||^2`` to the loss, with w the global weights.

        Args:
            loss: A scalar.
        """
        if self.prox_mu == 0:
            return loss
        sent = self.server.parameters
        pairs = [(w, sent[f"network.{n}"]) for n, w in self.network.named_parameters() if f"network.{n}" in sent]
        return loss + self.prox_mu * proximal_term(*zip(*pairs, strict=True))
