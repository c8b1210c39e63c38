"""The communication cost of methods that send only entries whose change exceeds a threshold."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common.checks import require_least
from lightning_fedssl.functional.averaging import State, sizes_of
from lightning_fedssl.functional.device_copies import on_cpu
from lightning_fedssl.functional.sparsity import sparse_sizes
from lightning_fedssl.state import ClientUpdate

_ROUND, _VALUE, _SEEN = "round", "announced", "seen"


class SparseTraffic(FederatedAlgorithm):
    """Counts the bytes of sparse communication; the simulation copies all weights.

    The server announces a new value of an entry when it differs from the last announced value by more than the
    threshold. A client downloads the entries announced since it last took part; the first time it downloads all. A
    client uploads the entries that differ from the server's.

    Args:
        delta_threshold: Entries that moved by no more than this are not sent.
        kwargs: The arguments every algorithm takes.
    """

    server_keeps: ClassVar[frozenset[str]] = frozenset({_SEEN})

    def __init__(self, delta_threshold: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_least(0, delta_threshold=delta_threshold)
        self.delta_threshold = delta_threshold

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Store at the server that the client has received the values of this round."""
        self.clients.put(update.client, _SEEN, {_ROUND: torch.tensor(self.federation.round_index)})
        return update

    def announce(self, model: State) -> None:
        """Announce the entries of the model that differ from the last announced values by more than the threshold.

        Args:
            model: The model that will be sent, by name.
        """
        values, since = (self.server.extra.setdefault(kind, {}) for kind in (_VALUE, _ROUND))
        for name, t in model.items():
            if name not in values:
                values[name], since[name] = t.clone(), torch.zeros_like(t, dtype=torch.int32)
            moved = (t - values[name]).abs() > self.delta_threshold
            values[name].copy_(torch.where(moved, t, values[name]))
            since[name].masked_fill_(moved, self.federation.round_index)

    def download_sizes(self, client: int, received: State) -> dict[str, int]:
        """Bytes of the entries that were announced since the client last took part."""
        seen, since = self.clients.get(client, _SEEN), self.server.extra.get(_ROUND, {})
        newer = _counts({name: since[name] > seen[_ROUND] for name in received if seen and name in since})
        sizes: dict[str, int] = {}
        for name, t in received.items():
            sizes |= sparse_sizes(name, newer.get(name, t.numel()), t)
        return sizes

    def upload_sizes(self, update: ClientUpdate) -> dict[str, int]:
        """Bytes of the entries that differ from the server's, and of all buffers."""
        sizes = sizes_of(update.buffers)
        changed = _counts({name: p != self.server.parameters[name] for name, p in update.parameters.items()})
        for name, p in update.parameters.items():
            sizes |= sparse_sizes(name, changed[name], p)
        return sizes


def _counts(masks: State) -> dict[str, int]:
    """How many entries of each mask are true, computed with one copy from the device."""
    return {name: int(count) for name, count in on_cpu({name: mask.sum() for name, mask in masks.items()}).items()}
