"""What only a simulation can do."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import Callback

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.algorithms.cbafed import CBAFed
from lightning_fedssl.algorithms.common.cohort_slots import SlotAlgorithm
from lightning_fedssl.algorithms.data_sharing import DataSharing
from lightning_fedssl.algorithms.feddb import FedDB
from lightning_fedssl.algorithms.fedmatch import FedMatch
from lightning_fedssl.algorithms.proxyfl import ProxyFL
from lightning_fedssl.algorithms.rscfed import RSCFed
from lightning_fedssl.algorithms.supervised import Supervised
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm

_OBSTACLES: dict[type[FederatedAlgorithm], str] = {
    JointAlgorithm: "exchanges features and gradients with every client at every step",
    FedMatch: "sends clients the models of other clients",
    DataSharing: "gives clients images of the server",
    SlotAlgorithm: "keeps the momentum of its clients at the server, by their places in the cohort",
    FedDB: "needs the mean prediction of every client, which a node does not send",
    CBAFed: "needs the numbers of labels of every client, which a node does not send",
    ProxyFL: "needs the numbers of labels of every client, which a node does not send",
    RSCFed: "needs to know which clients have labels, which a node does not send",
    Supervised: "trains at the server alone, without clients",
}


def refuse_undeployable(algorithm: FederatedAlgorithm) -> None:
    """Refuse a method whose clients cannot train on separate machines.

    Raises:
        ValueError: With the reason.
    """
    for method, reason in _OBSTACLES.items():
        if isinstance(algorithm, method):
            raise ValueError(
                f"{type(algorithm).__name__} {reason}, so it cannot be deployed: simulate it with "
                "lightning-fedssl fit"
            )


def refuse_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that a deployment cannot have with the values of their keys.

    Raises:
        ValueError: With the reason and the remedy.
    """
    for callback in callbacks:
        if isinstance(callback, StaticBatchNorm) and callback.source == "pooled":
            raise ValueError(
                "StaticBatchNorm: source pooled needs the clients' data at the server, and data "
                "do not leave a "
                "node: use source server or moments"
            )
        if isinstance(callback, FederatedCheckpoint) and callback.every_n_rounds > 1:
            raise ValueError(
                f"FederatedCheckpoint: every_n_rounds is {callback.every_n_rounds}, but a server "
                "that resumed an older "
                "round would find clients with newer states: set it to 1 in a deployment"
            )
