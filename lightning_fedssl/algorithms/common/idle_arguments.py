"""Arguments that a method inherits and does not read."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import Any

from lightning_fedssl.algorithm import FederatedAlgorithm

_log = logging.getLogger(__name__)

WORK_OF_OTHERS = ("client_epochs", "server_epochs", "server_phase", "server_weight")
"""Arguments of other methods for the duration and order of training."""
RULE_OF_OTHERS = ("server_momentum", "server_lr", "client_weighting")
"""Arguments of other methods for the average."""


def refuse_idle(method: str, given: dict[str, Any], names: tuple[str, ...], remedy: str) -> None:
    """Refuse arguments that a method inherits but does not read, unless they have their defaults.

    Args:
        method: The method's name.
        given: Its keyword arguments.
        names: Those it does not read.
        remedy: What to do instead.

    Raises:
        ValueError: Names the key.
    """
    defaults = inspect.signature(FederatedAlgorithm).parameters
    for name in names:
        if given.get(name, defaults[name].default) != defaults[name].default:
            raise ValueError(
                f"model.{name} has no effect on {method}: {remedy}; leave {name} out, or begin with a configuration of "
                f"{method} (lightning-fedssl configs)"
            )


def warn_of_idle(algorithm: FederatedAlgorithm, names: Iterable[str], remedy: str) -> None:
    """Name the arguments that have no effect on a method, unless they have their defaults.

    A method that shares a configuration with others, as the bounds of a comparison do, may be given them.

    Args:
        algorithm: The method.
        names: The arguments that it does not read.
        remedy: What to do instead.
    """
    owners = [owner for owner in type(algorithm).__mro__ if issubclass(owner, FederatedAlgorithm)]
    signatures = [inspect.signature(owner).parameters for owner in owners]
    defaults = {name: next(found[name].default for found in signatures if name in found) for name in names}
    idle = [f"model.{name}" for name, default in defaults.items() if getattr(algorithm, name) != default]
    if idle:
        _log.warning("%s: no effect on %s: %s", ", ".join(idle), type(algorithm).__name__, remedy)
