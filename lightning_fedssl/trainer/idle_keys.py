"""Warnings of keys that have no effect together with the other keys of a run."""

from __future__ import annotations

import inspect
import logging

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule

_log = logging.getLogger(__name__)


def warn_of_idle_keys(algorithm: FederatedAlgorithm, datamodule: FederatedDataModule) -> None:
    """Name keys without an effect, unless they have their defaults; one line for each.

    Args:
        algorithm: The method.
        datamodule: The data, partitioned.
    """
    if _ignores_server_weight(algorithm):
        _log.warning(
            "model.server_weight has no effect, because model.server_phase is %s: leave it out, or set server_phase: "
            "parallel",
            algorithm.server_phase,
        )
    if _ignores_server_batch_size(datamodule):
        _log.warning(
            "data.server_batch_size has no effect, because the server has no labelled images: leave it out, or set "
            "data.label_location: server"
        )


def _ignores_server_weight(algorithm: FederatedAlgorithm) -> bool:
    """A method without clients reports it itself, and a user's own average may read it."""
    default = _default(type(algorithm), FederatedAlgorithm, "server_weight")
    given = algorithm.server_weight != default and algorithm.trains_clients
    return given and algorithm.server_phase != "parallel" and not _has_own_average(type(algorithm))


def _has_own_average(method: type[FederatedAlgorithm]) -> bool:
    parts = method.round, method.accumulate, method.client_weight, method.aggregate
    return not all(part.__module__.startswith("lightning_fedssl.") for part in parts)


def _ignores_server_batch_size(datamodule: FederatedDataModule) -> bool:
    """One batch size for all parties is usual in a configuration that several methods share; it gets no message."""
    default = _default(type(datamodule), FederatedDataModule, "server_batch_size")
    given = datamodule.server_batch_size not in (default, datamodule.client_batch_size)
    return given and not len(datamodule.split.server_labeled)


def _default(kind: type, base: type, key: str) -> object:
    """The default of a key; a class of the user's own may have another one than its base class."""
    of_kind, of_base = (inspect.signature(part).parameters for part in (kind, base))
    return of_kind.get(key, of_base[key]).default
