"""Ranks that are forked where ``trainer.devices`` is left out: rank 0 is the caller, the bits are those of one rank."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import FedAvg, Supervised
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.distributed import cpu_ranks, forked_ranks, rank_watch
from lightning_fedssl.distributed.forked_ranks import ForkedRanks, RemoteTracebackError
from lightning_fedssl.distributed.rank_watch import LostRankError
from lightning_fedssl.models import MLP
from lightning_fedssl.trainer import launch, setup
from lightning_fedssl.trainer.federation import SimulatedFederation
from tests.test_trainer import labeled_clients, toy_fedavg
from tests.toy import ToyData, Transfers, assert_same, toy_semifl, toy_trainer, weights


@pytest.fixture(autouse=True)
def two_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, a process that nobody has started with others, and runs of any length that are worth two ranks."""
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 2)
    monkeypatch.setattr(setup, "WORTH_STEPS", 0)
    monkeypatch.setattr(launch, "can_fork", lambda: True)
    for name in os.environ:
        if name.startswith("SLURM_") or name in ("OMP_NUM_THREADS", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


class Seen(FederatedCallback):
    """Records the process and the ranks of every round; on one rank it fails in round 2."""

    def __init__(self, rank: int = -1, how: str = "") -> None:
        self.rounds: list[tuple[int, int, int]] = []
        self.rank, self.how = rank, how

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.rounds.append((os.getpid(), trainer.global_rank, trainer.world_size))
        if trainer.round_index == 2 and trainer.global_rank == self.rank:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the disk is full")


def test_the_caller_s_process_is_rank_0_and_has_the_bits_of_one_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also in the second run of a script, after this process has trained itself."""
    alone, seen = toy_fedavg(), Seen()
    toy_trainer(tmp_path / "alone", devices=1, logger=False).fit(alone, labeled_clients())
    trainer = toy_trainer(tmp_path, callbacks=[seen], logger=False, max_rounds=3)
    for _ in range(2):
        with caplog.at_level(logging.INFO, "lightning_fedssl"):
            trainer.fit(together := toy_fedavg(), labeled_clients())
        assert_same(weights(together), weights(alone))
        assert not torch.distributed.is_initialized()
        assert trainer.world_size == 1
    assert seen.rounds == [(os.getpid(), 0, 2)] * 6
    assert sum("2 processes train the clients" in message for message in caplog.messages) == 2
    assert capfd.readouterr().out.count("round 3") <= 2  # rank 0 alone prints


class RefusesGarbage(FederatedCallback):
    """Fails on a forked rank whose inherited objects could be collected as garbage."""

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.global_rank and (not gc.get_freeze_count() or not gc.isenabled()):
            raise AssertionError("garbage of the parent can be collected")


def test_a_rank_does_not_destroy_what_its_parent_has_left(tmp_path: Path) -> None:
    """A process group of an earlier run would wait for threads of rank 0 that were not forked."""
    gc.unfreeze()
    trainer = toy_trainer(tmp_path, callbacks=[RefusesGarbage()], logger=False)
    trainer.fit(toy_fedavg(), labeled_clients())
    assert trainer.round_index == trainer.max_rounds
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_an_error_of_another_rank_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the disk is full") as raised:
        toy_trainer(tmp_path, callbacks=[Seen(rank=1)], logger=False).fit(toy_fedavg(), labeled_clients())
    assert isinstance(raised.value.__cause__, RemoteTracebackError)
    assert "in on_round_start" in str(raised.value.__cause__)


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(LostRankError, match=r"rank 1 died: killed, out of memory, .*--ckpt_path last"):
        toy_trainer(tmp_path, callbacks=[Seen(rank=1, how="kill")], logger=False).fit(toy_fedavg(), labeled_clients())


def test_an_error_of_this_rank_is_raised_and_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "DYING_SECONDS", 0.1)
    with pytest.raises(ValueError, match="the disk is full"):
        toy_trainer(tmp_path, callbacks=[Seen(rank=0)], logger=False).fit(toy_fedavg(), labeled_clients())


def chosen(**kwargs: Any) -> type:
    return type(toy_trainer(Path(), **kwargs).fabric.strategy)


def test_ranks_are_forked_only_where_the_choice_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() is ForkedRanks
    assert chosen(devices=1) is not ForkedRanks
    assert chosen(clients_per_round=1) is not ForkedRanks
    assert chosen(strategy="ddp") is not ForkedRanks
    for name, value in {"OMP_NUM_THREADS": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
        if name != "LOCAL_RANK":  # a launcher sets both
            assert chosen() is not ForkedRanks
        if name == "OMP_NUM_THREADS":
            monkeypatch.delenv(name)
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert chosen(devices=2, strategy="forked") is ForkedRanks
    monkeypatch.setattr(launch, "can_fork", lambda: False)
    assert chosen() is not ForkedRanks
    with pytest.raises(ValueError, match=r"trainer\.strategy is forked: processes can be forked on Linux, .*; use ddp"):
        chosen(devices=2, strategy="forked")


def test_ranks_pay_where_clients_make_enough_steps_and_bits_do_not_depend_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds of three clients with 30 images each in batches of 5: 54 steps."""
    monkeypatch.setattr(setup, "WORTH_STEPS", 54)
    data, make = labeled_clients(validation=0), partial(toy_fedavg, client_epochs=1)
    assert setup.pays_for_ranks(toy_trainer(tmp_path), make(), data)
    assert not setup.pays_for_ranks(toy_trainer(tmp_path, max_rounds=2), make(), data)
    assert setup.pays_for_ranks(toy_trainer(tmp_path, clients_at_once=2), make(), data)
    assert not setup.pays_for_ranks(toy_trainer(tmp_path), Supervised(network=MLP), data)
    assert not setup.pays_for_ranks(toy_trainer(tmp_path, callbacks=[Transfers()]), make(), data)
    assert not setup.pays_for_ranks(toy_trainer(tmp_path), OwnFedAvg(**dict(make().hparams)), data)
    monkeypatch.setattr(setup, "sends_all_updates", lambda size, clients: False)
    assert not setup.pays_for_ranks(toy_trainer(tmp_path), make(), data)


class OwnFedAvg(FedAvg):
    """A user's algorithm, which may store in an attribute what its clients did."""


def test_a_federation_of_real_machines_uses_one_rank(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[seen := Seen()], logger=False, max_rounds=1)
    trainer.make_federation = lambda run: SimulatedFederation(run)
    trainer.fit(toy_fedavg(), labeled_clients())
    assert seen.rounds == [(os.getpid(), 0, 1)]


def test_commands_other_than_fit_use_one_rank(tmp_path: Path) -> None:
    trainer, algorithm = toy_trainer(tmp_path, callbacks=[seen := Seen()], logger=False), toy_fedavg()
    trainer.test(algorithm, labeled_clients())
    assert seen.rounds == []
    assert isinstance(trainer.fabric.strategy, ForkedRanks)
    assert trainer.fabric.strategy.num_processes == 1


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"clients_per_round": 2}, "2 clients: lower trainer.devices"),
        ({"clients_per_round": 3}, None),
        (
            {"clients_per_round": 3, "clients_at_once": 2},
            "2 stacks of clients: lower trainer.devices or trainer.clients_at_once",
        ),
    ],
    ids=["too few clients", "enough clients", "shared server steps", "too few stacks"],
)
def test_ranks_that_never_train_a_client_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], reason: str | None
) -> None:
    trainer = toy_trainer(tmp_path, strategy="forked", devices=3, max_rounds=1, logger=False, **keys)
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        trainer.fit(toy_semifl(), ToyData())
    found = [message for message in caplog.messages if "ranks train no client" in message]
    assert found == ([f"1 of 3 ranks train no client, because a round has {reason}"] if reason else [])


class Process:
    """A process that does not end; it counts the seconds for which it was waited for."""

    waited = 0.0

    def join(self, seconds: float = 0.0) -> None:
        Process.waited += seconds
        time.sleep(seconds)

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        pass


def test_ranks_that_do_not_end_share_the_time_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_ranks, "LEAVING_SECONDS", 0.1)
    children: Any = [(Process(), multiprocessing.Pipe(duplex=False)[0]) for _ in range(3)]
    forked_ranks._end(children)
    assert Process.waited <= 0.1


def test_ranks_that_were_forked_end_if_another_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fork = forked_ranks._ForkLauncher._fork

    def fails(self: Any, rank: int, *rest: Any) -> Any:
        if rank == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork(self, rank, *rest)

    monkeypatch.setattr(forked_ranks._ForkLauncher, "_fork", fails)
    monkeypatch.setattr(forked_ranks, "LEAVING_SECONDS", 0.1)
    with pytest.raises(BlockingIOError):
        toy_trainer(tmp_path, devices=3, strategy="forked", logger=False).fit(toy_fedavg(), labeled_clients())
    assert not [child for child in multiprocessing.active_children() if child.name == "rank 1"]
