"""What ranks send each other: in few messages, and through shared memory where they are forked."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import distributed

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.distributed import collectives
from lightning_fedssl.distributed.connections import LONGEST, Connections, ConnectionToRankLostError
from lightning_fedssl.distributed.forked_ranks import ForkedRanks
from lightning_fedssl.distributed.shared_memory import PrivateMemory, SharedMemory
from tests.test_trainer import labeled_clients, toy_fedavg
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights

FORKED: dict[str, Any] = {"strategy": "forked", "devices": 2, "logger": False}

CALLS = ("all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast")


class Counts(FederatedCallback):
    """Counts messages and collectives from the start of a round to the start of the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts, self.rounds = Counter[str](), list[dict[str, int]]()
        for name in CALLS:
            monkeypatch.setattr(distributed, name, self._counted(name, getattr(distributed, name)))
        monkeypatch.setattr(Connections, "gather", self._counted("message", Connections.gather))

    def _counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return call

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.rounds.append(dict(self.counts))
        self.counts.clear()


def test_a_round_of_two_ranks_takes_five_messages_and_sends_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of the updates, updates and outcomes, scalars, pseudo-labels, requests to stop."""
    counts = Counts(monkeypatch)
    toy_trainer(tmp_path, callbacks=[counts], check_val_every_n_rounds=9, **FORKED).fit(
        toy_fedavg(), labeled_clients(validation=0)
    )
    assert counts.rounds[1:] == [{"message": 5}] * 2


class Gathers(FederatedCallback):
    """Gathers a value whose length depends on rank and round."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, str]]] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        length = (10, collectives._FIRST, 3 * collectives._FIRST)[trainer.round_index - 1]
        own = (trainer.global_rank, "x" * (length if trainer.global_rank else 0))
        self.seen.append(trainer.gather(own))


def test_values_of_any_length_are_gathered(tmp_path: Path) -> None:
    gathers = Gathers()
    toy_trainer(tmp_path, callbacks=[gathers], **FORKED).fit(toy_fedavg(), labeled_clients())
    lengths = [[(rank, len(text)) for rank, text in values] for values in gathers.seen]
    assert lengths == [[(0, 0), (1, n)] for n in (10, collectives._FIRST, 3 * collectives._FIRST)]


def test_updates_and_client_states_are_the_same_through_shared_memory(tmp_path: Path) -> None:
    alone, together = (toy_semifl(keep_client_optimizer=True) for _ in range(2))
    toy_trainer(tmp_path / "1", devices=1, logger=False).fit(alone, ToyData())
    toy_trainer(tmp_path / "2", **FORKED).fit(together, ToyData())
    assert_same(weights(together), weights(alone))
    states = (algorithm.clients.state_dict() for algorithm in (alone, together))
    for one, two in zip(*(sorted(state.items()) for state in states), strict=True):
        assert one[0] == two[0]
        assert_same(one[1], two[1])


def lengths_received(ranks: int, contents: list[bytes]) -> list[list[int]]:
    """The lengths of the messages that each of several forked ranks receives if each sends its content."""
    connections, received = Connections(ranks), [os.pipe() for _ in range(ranks)]

    def send(rank: int) -> None:
        connections.keep(rank)
        os.write(received[rank][1], pickle.dumps([len(part) for part in connections.gather(contents[rank])]))

    children = [os.fork() or exit_after(partial(send, rank)) for rank in range(ranks)]
    for child in children:
        os.waitpid(child, 0)
    connections.close()
    return [pickle.loads(os.read(reader, 1000)) for reader, _ in received]


def test_ranks_exchange_the_longest_messages_without_waiting_for_each_other() -> None:
    contents = [bytes(LONGEST), b"", b"one"]
    assert lengths_received(3, contents) == [[LONGEST, 0, 3]] * 3


def test_a_rank_that_has_ended_is_noticed() -> None:
    connections = Connections(2)
    in_child(lambda: connections.keep(1))
    connections.keep(0)
    with pytest.raises(ConnectionToRankLostError, match="closed"):
        connections.gather(b"to nobody")
    connections.close()


def test_closed_connections_leave_no_open_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    connections = Connections(3)
    connections.keep(0)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    connections.close()
    assert len(os.listdir("/proc/self/fd")) == before


class Lists:
    """Lists of a tensor that is overwritten when the next list is taken, as updates of a working module are."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.tensor = count, torch.empty(size)

    def __iter__(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        for number in range(self.count):
            yield number, [self.tensor.fill_(number)]
        self.tensor.fill_(-1)


@pytest.mark.parametrize("memory", [SharedMemory, lambda ranks: PrivateMemory()])
def test_lists_are_copied_before_the_next_one_is_taken_while_the_memory_grows(memory: Any) -> None:
    used = memory(1)
    used.begin_exchange()
    described, buffer = collectives._written(Lists(40, 1000), partial(used.of_rank, 0))
    parts = collectives._views(buffer, [layout for _, of_label in described for layout in of_label])
    assert [label for label, _ in described] == list(range(40))
    assert [(part == number).all().item() for number, part in enumerate(parts)] == [True] * 40


def shares_memory(strategy: ForkedRanks) -> tuple[bool, bool]:
    """Whether two ranks share memory during a command, and after it."""
    strategy.ranks = 2
    with strategy.meeting_point():
        during = strategy.shared_memory
    return during is not None, strategy.shared_memory is not None


def test_ranks_share_memory_during_a_command_if_python_can_create_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shares_memory(ForkedRanks()) == (True, False)
    monkeypatch.delattr(os, "memfd_create")
    assert shares_memory(ForkedRanks()) == (False, False)


def exit_after(action: Any) -> NoReturn:
    """Run an action, then end the process, which is a forked one."""
    try:
        action()
    finally:
        os._exit(0)


def in_child(action: Any) -> None:
    """Run an action in a forked process."""
    os.waitpid(os.fork() or exit_after(action), 0)


def test_a_rank_reads_what_another_has_written_also_when_its_memory_grows() -> None:
    memory = SharedMemory(2)
    for size in (5, 10_000, 7):
        for _ in range(2):  # both files
            memory.begin_exchange()
            in_child(lambda size=size: memory.of_rank(1, size)[:size].fill_(size % 251))
            assert torch.equal(memory.of_rank(1, size)[:size], torch.full((size,), size % 251, dtype=torch.uint8))
    memory.close()


def test_an_exchange_does_not_overwrite_what_the_last_one_wrote() -> None:
    memory = SharedMemory(1)
    memory.begin_exchange()
    first = memory.of_rank(0, 3)[:3].fill_(1)
    memory.begin_exchange()
    memory.of_rank(0, 3)[:3].fill_(2)
    assert first.tolist() == [1, 1, 1]
    memory.begin_exchange()
    memory.of_rank(0, 3)[:3].fill_(3)
    assert first.tolist() == [3, 3, 3]
    memory.close()


def test_closed_memory_leaves_no_open_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = SharedMemory(3)
    memory.begin_exchange()
    memory.of_rank(0, 8)
    assert len(os.listdir("/proc/self/fd")) > before
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before
