"""Checks of arguments and data that several methods share."""

from __future__ import annotations

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.storage.hyperparameters import require as require

HAS_TEACHER = "a teacher follows statistics that training tracks"
"""Why a method with a teacher cannot have static batch norm."""


def probability(method: FederatedAlgorithm, *names: str) -> None:
    """Refuse thresholds of confidence, or other shares, that are not from 0 to 1.

    Args:
        method: The method.
        names: Its arguments.
    """
    for name in names:
        value = getattr(method, name)
        require(0 <= value <= 1, name, value, "give a number from 0 to 1, such as 0.95")


def above_zero(method: FederatedAlgorithm, *names: str) -> None:
    """Refuse arguments that are 0 or negative.

    Args:
        method: The method.
        names: Its arguments.
    """
    for name in names:
        value = getattr(method, name)
        require(value > 0, name, value, "give a number above 0")


def at_least(method: FederatedAlgorithm, minimum: float, *names: str) -> None:
    """Refuse arguments that are too small; None is allowed.

    Args:
        method: The method.
        minimum: The smallest possible value.
        names: Its arguments.
    """
    for name in names:
        value = getattr(method, name)
        require(value is None or value >= minimum, name, value, f"give {minimum} or more")


def decay(method: FederatedAlgorithm, *names: str) -> None:
    """Refuse decays of moving averages that are not from 0 to below 1; None is allowed.

    Args:
        method: The method.
        names: Its arguments.
    """
    for name in names:
        value = getattr(method, name)
        require(value is None or 0 <= value < 1, name, value, "give a number from 0 to below 1")


def fully_labeled_clients(data: FederatedDataModule, method: str) -> None:
    """Refuse clients that have both labelled and unlabelled images.

    Args:
        data: The data.
        method: The name of the method, for the message.

    Raises:
        ValueError: Names the key to change.
    """
    if any(len(client.labeled) and len(client.unlabeled) for client in data.split.clients):
        raise ValueError(
            f"{method} needs clients with labels for all of their images or for none: set "
            "data.partition to FullyLabeledClients and data.num_labels to all"
        )


def refuse_epochs(algorithm: FederatedAlgorithm, remedy: str) -> None:
    """Refuse numbers of epochs where a method counts its work in steps.

    Args:
        algorithm: The method.
        remedy: What to set instead.
    """
    epochs = (algorithm.client_epochs, algorithm.server_epochs)
    require(
        epochs == (1, 0),
        "client_epochs",
        epochs[0],
        f"client_epochs and server_epochs have no effect on this method; {remedy}",
    )
