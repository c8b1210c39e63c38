"""Several ranks train different clients of a cohort; the result is that of one rank."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.cli import main
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import cpu_ranks, launch, signals
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage import checkpoint_file
from tests.algorithms import helpers as h
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import run

BY_NAME = ("semifl_masks", "fl2_labels", "mean_teacher_numbers", "self_training_shares", "fixmatch_shares")


def assert_ranks_are_one(tmp_path: Path, make: Any, data: Any, ranks: int, **settings: Any) -> None:
    """Several ranks have the weights and the scalars of one, bit by bit."""
    alone, alone_trainer, _ = run(tmp_path, 1, make, data, **settings)
    together, together_trainer, _ = run(tmp_path, ranks, make, data, **settings)
    assert_same(alone, together)
    for name, value in alone_trainer.callback_metrics.items():
        if not name.startswith("time/"):
            assert float(together_trainer.callback_metrics[name]) == float(value), name


@pytest.mark.parametrize(
    ("make", "data", "ranks"),
    [
        (toy_semifl, ToyData, 2),
        (lambda: toy_fedavg(keep_client_optimizer=True), labeled_clients, 3),
        (h.toy_shvr, h.uneven_clients, 2),
        (lambda: h.toy_pseudo_label(ramp_epochs=0), h.uneven_clients, 2),
        (h.toy_mean_teacher, h.uneven_clients, 2),
        (h.toy_fixmatch, h.mixed_clients, 2),
        (lambda: h.toy_fedmatch(lr_patience=1), h.mixed_clients, 2),
        (lambda: h.toy_fedmatch(lr_patience=1), ToyData, 2),  # labels at the server
        (lambda: h.toy_fedswitch(h.ByNumber), ToyData, 2),
        (h.toy_uda, h.mixed_clients, 2),
        (h.toy_semi_sfl, ToyData, 2),
        (lambda: h.toy_semi_sfl(client_teacher_decay=0.9), ToyData, 4),  # one rank has no client
        (h.toy_fedswitch_sl, ToyData, 2),
        (h.toy_fl2, ToyData, 2),
        (h.toy_rscfed, h.fully_labeled, 2),
        (h.toy_cbafed, h.fully_labeled, 2),
        (h.toy_feddb, h.mixed_clients, 2),
        (h.toy_sage, h.mixed_clients, 2),
        *((*h.METHODS[name], 2) for name in BY_NAME),
    ],
)
def test_ranks_give_the_bits_of_one_in_32_bit_arithmetic(tmp_path: Path, make: Any, data: Any, ranks: int) -> None:
    assert_ranks_are_one(tmp_path, make, data, ranks)
    assert sum(1 for _ in (tmp_path / str(ranks)).rglob("last.ckpt")) == 1


@pytest.mark.parametrize(
    ("make", "data", "clients", "ranks"),
    [
        (toy_semifl, ToyData, 3, 2),  # stacks of 2 and 1
        (h.toy_fl2, ToyData, 3, 2),
        (h.toy_sage, h.mixed_clients, 3, 2),
        (lambda: toy_semifl(threshold=0.4), ToyData, 3, 2),  # some clients skip a round
        (lambda: toy_fedavg(keep_client_optimizer=True), labeled_clients, 3, 3),  # one rank has no stack
        (h.toy_shvr, h.uneven_clients, 4, 2),
        (h.toy_mean_teacher, h.uneven_clients, 4, 2),
        (h.toy_fixmatch, h.mixed_clients, 3, 2),
        (h.toy_semi_sfl, ToyData, 3, 2),
        (h.toy_fedswitch_sl, ToyData, 3, 2),
    ],
)
def test_stacks_have_the_bits_of_one_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, data: Any, clients: int, ranks: int
) -> None:
    """Which clients form a stack does not depend on the ranks, and ranks train whole stacks."""
    settings: dict[str, Any] = {"clients_at_once": 2, "clients_per_round": clients, "max_rounds": 2}
    assert_ranks_are_one(tmp_path, make, data, ranks, **settings)
    assert "will train one after another" not in caplog.text


@pytest.mark.parametrize(
    ("source", "batches_of"),
    [
        ("server", 5),  # of 12 images: an uneven number of batches, which the ranks divide
        ("server", 250),  # one batch: the other rank has none
        ("pooled", 50),
    ],
)
def test_ranks_measure_the_batch_norm_statistics_of_one_rank(tmp_path: Path, source: Any, batches_of: int) -> None:
    def callbacks() -> list[FederatedCallback]:
        return [StaticBatchNorm(source, batches_of)]

    settings: dict[str, Any] = {"max_rounds": 2, "logger": False}
    alone, *_ = run(tmp_path, 1, toy_semifl, ToyData, callbacks=callbacks(), **settings)
    together, *_ = run(tmp_path, 2, toy_semifl, ToyData, callbacks=callbacks(), **settings)
    measured = {name: t for name, t in alone.items() if name.endswith("running_mean")}
    assert measured
    assert all(t.count_nonzero() for t in measured.values())  # they are 0 before the first measurement
    assert_same(alone, together)


class Remembers(FedAvg):
    """A method that declares nothing: a client corrects its gradients by half of its last update."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        return replace(super().on_client_start(data), control_variate=self.clients.get(data.party, "last update"))

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        difference = {n: (p - self.server.parameters[n]) / 2 for n, p in update.parameters.items()}
        self.clients.put(update.client, "last update", difference)
        return update


def toy_remembers() -> Remembers:
    return Remembers(**dict(toy_fedavg().hparams))


def test_ranks_share_the_state_that_a_method_stores_without_declaring_it(tmp_path: Path) -> None:
    """Two of four clients a round: some train on a rank that did not train them before."""
    results = []
    for ranks in (1, 2):
        made, *_ = run(tmp_path, ranks, toy_remembers, labeled_clients, clients_per_round=2, max_rounds=5)
        (path,) = (tmp_path / str(ranks)).rglob("last.ckpt")
        kept = checkpoint_file.load(path)["federation"]["clients"]
        results.append({**made, **{f"{k}.{name}": t for k, state in kept.items() for name, t in state.items()}})
    alone, together = results
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-10)


def test_a_checkpoint_of_two_ranks_resumes_on_one(tmp_path: Path) -> None:
    whole, *_ = run(tmp_path, 1, toy_semifl, ToyData)
    two = toy_trainer(
        tmp_path / "two", max_rounds=3, **forked(2),
        callbacks=[StaticBatchNorm(source="moments"), StopAfterTwo()],
    )  # fmt: skip
    two.fit(toy_semifl(), ToyData())
    assert two.round_index == 2
    algorithm = toy_semifl()
    one = toy_trainer(tmp_path / "two", max_rounds=3, callbacks=[StaticBatchNorm(source="moments")])
    one.fit(algorithm, ToyData(), ckpt_path="last")
    assert_same(weights(algorithm), whole)


FIT = [
    "fit", "--config", "configs/semifl_digits.yaml", "--trainer.max_rounds", "2",
    "--trainer.precision", "64-true", "--model.threshold", "0.3", "--model.client_epochs", "1",
    "--trainer.clients_per_round", "4", "--model.network.width", "8", "--data.max_train_images", "300",
]  # fmt: skip


def start(arguments: list[str], root: Path, job: Mapping[str, str] = MappingProxyType({})) -> subprocess.Popen[str]:
    """A process of the command line, or of torchrun, which writes below ``root``."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments, "--trainer.default_root_dir", str(root)], cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": ".", **job}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(*processes: subprocess.Popen[str]) -> list[str]:
    """What the processes wrote to stderr, once all have ended well."""
    errors = [process.communicate(timeout=600)[1] for process in processes]
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    assert not failed, "\n\n".join(failed)
    return errors


def saved_weights(root: Path) -> dict[str, torch.Tensor]:
    """The global model of the run below a folder."""
    return checkpoint_file.load(root / "lightning_logs/version_0/checkpoints/last.ckpt")["state_dict"]  # type: ignore[no-any-return]


def assert_close(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to the order of sums."""
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The result of one rank."""
    root = tmp_path_factory.mktemp("alone")
    assert main([*FIT, "--trainer.default_root_dir", str(root)]) == 0
    return saved_weights(root)


def free_port() -> str:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_two_machines_by_torchrun_give_the_weights_of_one(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """Two launchers, each of which starts one fresh interpreter, as on two nodes, on the loopback interface."""
    launch = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launch += ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    fit = ["-m", "lightning_fedssl", *FIT, "--trainer.strategy", "ddp", "--trainer.devices", "1"]
    nodes = ([*launch, "--node_rank", str(node), *fit] for node in range(2))
    finished(*(start(node, tmp_path) for node in nodes))
    assert_close(saved_weights(tmp_path), alone)


def test_two_machines_by_slurm_give_the_weights_of_one(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """Two processes that find SLURM's variables as `srun` with two nodes of a task each sets them."""
    fit = ["lightning_fedssl", *FIT, "--trainer.strategy", "ddp", "--trainer.devices", "1"]
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "MASTER_PORT": free_port(),
    }  # fmt: skip
    tasks = ({**job, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)} for node in range(2))
    finished(*(start(fit, tmp_path, job=task) for task in tasks))
    assert_close(saved_weights(tmp_path), alone)
    assert not (tmp_path / "lightning_logs/version_1").exists()


class StopAfterTwo(FederatedCallback):
    """Ends the run after round 2, asked for on the last rank only."""

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        trainer.should_stop = trainer.round_index == 2 and trainer.global_rank == trainer.world_size - 1


class FailsOnRankOne(FederatedCallback):
    """Raises an error, or is killed, on rank 1 in round 2."""

    def __init__(self, killed: bool) -> None:
        self.killed = killed

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.round_index == 2 and trainer.global_rank == 1:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the error of rank 1")


@pytest.mark.parametrize(("killed", "error"), [(False, ValueError), (True, Exception)])
def test_the_end_of_a_rank_ends_the_run_which_can_be_resumed(
    tmp_path: Path, killed: bool, error: type[Exception]
) -> None:
    with pytest.raises(error, match="SIGKILL|closed by peer|reset by peer" if killed else "the error of rank 1"):
        toy_trainer(tmp_path, callbacks=FailsOnRankOne(killed), **forked(2)).fit(toy_semifl(), ToyData())
    resumed, whole = toy_semifl(), toy_semifl()
    trainer = toy_trainer(tmp_path, **forked(2))
    trainer.fit(resumed, ToyData(), ckpt_path="last")
    assert trainer.round_index == 3
    toy_trainer(tmp_path / "whole").fit(whole, ToyData())
    assert_same(weights(resumed), weights(whole))


def test_the_calling_process_has_what_forked_ranks_have_computed(tmp_path: Path) -> None:
    trainer, alone = toy_trainer(tmp_path, **forked(2)), toy_trainer(tmp_path / "alone")
    models = toy_semifl(), toy_semifl()
    for one, model in zip((trainer, alone), models, strict=True):
        one.fit(model, ToyData())
    assert trainer.round_index == 3
    assert trainer.participation == alone.participation
    assert trainer.total_bytes == alone.total_bytes
    assert trainer.state.status == alone.state.status
    assert Path(str(trainer.log_dir), "checkpoints/last.ckpt").is_file()
    assert trainer.test(models[0], ToyData()) == alone.test(models[1], ToyData())
    found = [one.predict(model, ToyData())[0] for one, model in zip((trainer, alone), models, strict=True)]
    torch.testing.assert_close(*found, rtol=0, atol=0)


class SignalsTheCaller(FederatedCallback):
    """Sends a signal to the process that has forked the ranks, when round 3 begins on rank 1."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.round_index == 3 and trainer.global_rank == 1:
            os.kill(os.getppid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_calling_process_stops_all_ranks_after_their_round(
    tmp_path: Path, number: signal.Signals
) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1000, callbacks=SignalsTheCaller(number), **forked(2))
    trainer.fit(toy_semifl(), ToyData())
    assert (trainer.state.status, trainer.stopped_by) == (TrainerStatus.INTERRUPTED, number)
    assert checkpoint_file.load(checkpoint_file.find("last", tmp_path))["round"] == trainer.round_index


class Stuck(FederatedCallback):
    """Signals the calling process: once before the first round, or twice in a round.

    The last of several ranks then handles no signal, like one that waits for another.
    """

    def __init__(self, number: signal.Signals, in_round: bool) -> None:
        self.number, self.in_round, self.caller = number, in_round, os.getpid()

    def on_train_start(self, trainer: Any, algorithm: Any) -> None:
        if not self.in_round:
            self._signal(trainer)

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if self.in_round:
            self._signal(trainer)

    def _signal(self, trainer: Any) -> None:
        if trainer.global_rank < trainer.world_size - 1:
            return
        if trainer.world_size > 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, {self.number})
        for _ in range(1 + self.in_round):
            os.kill(self.caller, self.number)
            time.sleep(0.2)
        time.sleep(60)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("in_round", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_round_or_a_second_one_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, in_round: bool, number: signal.Signals
) -> None:
    monkeypatch.setattr(signals, "SAME_SECONDS", 0)
    monkeypatch.setattr(signals, "KILL_SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit) as ended:
        toy_trainer(tmp_path, callbacks=Stuck(number, in_round), **forked(ranks)).fit(toy_semifl(), ToyData())
    assert ended.value.args == (() if number == signal.SIGINT else (143,))
    assert not multiprocessing.active_children()
    assert time.monotonic() - began < 30


def test_one_thread_on_a_cpu_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    with launch.settings(torch.device("cpu"), deterministic=False, precision="32-true"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with launch.settings(torch.device("cpu"), deterministic=False, precision="32-true"):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(("precision", "tf32"), [("32-true", True), ("32-full", False)])
def test_the_precision_chooses_tf32_for_convolutions_and_matrix_products(precision: str, tf32: bool) -> None:
    assert launch.make_fabric("cpu", 1, "auto", precision, 1).strategy.precision.precision == "32-true"
    with launch.settings(torch.device("cpu"), deterministic=False, precision=precision):
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32


@pytest.mark.parametrize(
    ("devices", "strategy", "ranks", "forks"),
    [(None, "auto", 1, False), (2, "auto", 2, True), ("auto", "auto", 3, True), (2, "ddp", 2, False)],
)
def test_devices_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, devices: Any, strategy: str, ranks: int, forks: bool
) -> None:
    """One process unless devices are given; ``auto`` is a process a core, but no more than a round has clients."""
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fabric = launch.make_fabric("cpu", devices, strategy, "32-true", stacks=3)
    assert (fabric.world_size, launch.forks(fabric)) == (ranks, forks)
