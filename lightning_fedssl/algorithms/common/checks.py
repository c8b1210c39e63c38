"""Checks of arguments and data that several methods share."""

from __future__ import annotations

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithm import require as require
from lightning_fedssl.data.datamodule import FederatedDataModule

HAS_TEACHER = "a teacher follows statistics that training tracks"
"""Why a method with a teacher cannot have static batch norm."""


def probability(key: str, value: float) -> None:
    """Refuse a threshold of confidence that is not a probability.

    Args:
        key: The argument's name.
        value: Its value.
    """
    require(0 <= value <= 1, key, value, "give a probability between 0 and 1, such as 0.95")


def above_zero(**arguments: float) -> None:
    """Refuse arguments that are 0 or negative.

    Args:
        arguments: The arguments by name.
    """
    for key, value in arguments.items():
        require(value > 0, key, value, "give a number above 0")


def at_least(least: float, **arguments: float | None) -> None:
    """Refuse arguments that are too small; None is allowed.

    Args:
        least: The smallest possible value.
        arguments: The arguments by name.
    """
    for key, value in arguments.items():
        require(value is None or value >= least, key, value, f"give {least} or more")


def decays(**arguments: float | None) -> None:
    """Refuse decays of moving averages that are not from 0 to below 1; None is allowed.

    Args:
        arguments: The arguments by name.
    """
    for key, value in arguments.items():
        require(value is None or 0 <= value < 1, key, value, "give a number from 0 to below 1")


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


def no_epochs(algorithm: FederatedAlgorithm, remedy: str) -> None:
    """Refuse numbers of epochs where a method counts its work in steps.

    Args:
        algorithm: The method.
        remedy: What to set instead.
    """
    given = (algorithm.client_epochs, algorithm.server_epochs)
    require(
        given == (1, 0),
        "client_epochs",
        given[0],
        f"client_epochs and server_epochs have no effect on this method; {remedy}",
    )
