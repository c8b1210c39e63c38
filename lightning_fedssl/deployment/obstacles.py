"""What only a simulation can do."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import Callback

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.task import Task


def refuse_undeployable(algorithm: FederatedAlgorithm) -> None:
    """Refuse a method whose clients cannot train on separate machines.

    Raises:
        ValueError: With the reason.
    """
    if algorithm.not_deployable:
        raise ValueError(
            f"{type(algorithm).__name__} {algorithm.not_deployable}, so it cannot be deployed: "
            "simulate it with lightning-fedssl fit"
        )


def refuse_other_tasks(task: Task) -> None:
    """Refuse a task that nodes with data of their own cannot have.

    Raises:
        ValueError: With the remedy.
    """
    if "one class" not in task.gives:
        raise ValueError(
            f"data.task: nodes hold one class for each sample, no {type(task).__name__}; "
            "simulate it with lightning-fedssl fit"
        )


def refuse_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that a deployment cannot have with the values of their keys.

    Raises:
        ValueError: With the reason and the remedy.
    """
    for callback in callbacks:
        if isinstance(callback, StaticBatchNorm) and callback.source == "pooled":
            raise ValueError(
                "StaticBatchNorm: source pooled needs the clients' data at the server, and data do "
                "not leave a node: use source server or moments"
            )
        if isinstance(callback, FederatedCheckpoint) and callback.every_n_rounds > 1:
            raise ValueError(
                f"FederatedCheckpoint: every_n_rounds is {callback.every_n_rounds}, but a server "
                "that resumed an older round would find clients with newer states: set it to 1 in "
                "a deployment"
            )
