"""Records the tensors that clients upload and download, with their sizes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.storage.files import write_table

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import Direction

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class Entry:
    """The transfers of the tensors of one name in one direction, over all clients and rounds.

    Attributes:
        largest: Bytes of the largest tensor of that name.
        times: Number of transfers.
        client_rounds: Number of pairs of a client and a round with a transfer.
        total: Bytes of all transfers.
    """

    largest: int = 0
    times: int = 0
    client_rounds: int = 0
    total: int = 0

    def add(self, sent: Sequence[tuple[int, int]]) -> None:
        """Add the transfers of a round.

        Args:
            sent: The client and the bytes of every transfer.
        """
        for _, size in sent:
            self.largest = max(self.largest, size)
            self.total += size
        self.times += len(sent)
        self.client_rounds += len({client for client, _ in sent})


Key = tuple[str, str]
"""A direction and a tensor's name."""

Transfers = dict[Key, list[tuple[int, int]]]
"""Client and bytes of every transfer."""


class CommunicationLedger(FederatedCallback):
    """Writes a ledger of all tensors that clients and server exchange into the run folder, when the
    run ends.

    ``ledger.csv`` has a line for every tensor name and direction: the size of one tensor, the
    number of transfers, and of pairs of a client and a round with a transfer, the total bytes, and
    the kind of tensor: weights, batch-norm statistics, features and so on. A resumed run continues
    the ledger.

    Only part of a run that lists it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.entries: dict[Key, Entry] = {}
        self._before: dict[Key, Entry] = {}
        self._sent: Transfers = defaultdict(list)
        self._round_index = -1

    def on_transfer(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        client: int,
        direction: Direction,
        sizes: Mapping[str, int],
    ) -> None:
        """Record the sizes of the tensors."""
        self._begin(trainer.round_index)
        for name, size in sizes.items():
            self._sent[direction, name].append((client, size))

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Add the round's transfers of all ranks.

        At the end of a round, all callbacks have sent their tensors.
        """
        self._add_round(trainer)

    def on_train_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the file.

        What was sent for the test belongs to the last round.
        """
        self._add_round(trainer)
        self._write(trainer, algorithm)

    def _write(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        if not trainer.is_global_zero or not trainer.log_dir or trainer.fast_dev_run:
            return
        model = {*algorithm.server.parameters, *algorithm.server.buffers}
        rows = [["direction", "name", "kind", *(field.name for field in fields(Entry))]]
        for (direction, name), entry in sorted(self.entries.items()):
            rows.append([direction, name, kind_of(name, model), *astuple(entry)])
        write_table(Path(trainer.log_dir, "ledger.csv"), rows)

    def _begin(self, round_index: int) -> None:
        """Close the round before, if this is a new one."""
        if round_index != self._round_index:
            self._before = self.entries
            self._round_index = round_index
            self._sent = defaultdict(list)

    def _add_round(self, trainer: TrainerView) -> None:
        """Set the entries to those before the round and those of its transfers so far, over all
        ranks.
        """
        self._begin(trainer.round_index)
        sent: Transfers = defaultdict(list)
        for of_rank in trainer.gather(dict(self._sent)):
            for key, transfers in of_rank.items():
                sent[key] += transfers
        self.entries = map_values(replace, self._before)
        for key, transfers in sent.items():
            self.entries.setdefault(key, Entry()).add(transfers)

    def state_dict(self) -> dict[str, Any]:
        """All entries."""
        state: dict[str, Any] = {"up": {}, "down": {}}
        for (direction, name), entry in self.entries.items():
            state[direction][name] = list(astuple(entry))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.entries = {}
        for direction, entries in state_dict.items():
            for name, values in entries.items():
                self.entries[direction, name] = Entry(*values)


def kind_of(name: str, model: set[str]) -> str:
    """The kind of a tensor, such as ``weights`` or ``optimizer state``, for readers who do not know
    the network.

    Args:
        name: The name of the transferred tensor, such as ``network.conv.weight``,
            ``last_round.network.conv.weight``, or ``network.conv.weight.positions`` for the
            positions of a sparse tensor's entries.
        model: Names of the global model's weights and buffers.
    """
    tensor = name.removesuffix(".positions")
    for start in reversed([0, *(match.end() for match in re.finditer("[. ]", tensor))]):
        if tensor[start:] in model:
            what = "batch-norm statistics" if tensor.endswith(_STATISTICS) else "weights"
            owner = re.sub(" *[0-9]+", "", tensor[:start].rstrip(". "))
            what = what if tensor == name else f"positions of {what}"
            return f"{what} ({owner})" if owner else what
    titles = {"optimizer": "optimizer state", "moments": "batch-norm moments"}
    first = name.partition(".")[0]
    return titles.get(first, first)
