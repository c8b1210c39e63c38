"""Several ranks train different clients of a cohort; the result is that of one rank."""

import csv
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data import Dirichlet
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.distributed import collectives
from lightning_fedssl.distributed.cpu_ranks import usable_cores
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer import exchange
from tests.algorithms.helpers import (
    ByNumber,
    mixed_clients,
    toy_fedmatch,
    toy_fedswitch,
    toy_fedswitch_sl,
    toy_fixmatch,
    toy_mean_teacher,
    toy_pseudo_label,
    toy_semi_sfl,
    toy_shvr,
    toy_uda,
    uneven_clients,
)
from tests.toy import ToyData, assert_same, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights


class DropsInTheTop(nn.Sequential):
    """A network whose top draws numbers, which every rank must draw alike."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(),
            nn.Linear(48, 3),
        )  # fmt: skip


class OneThread(FederatedCallback):
    """Sums in one order on every number of ranks."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        torch.set_num_threads(1)


def run(tmp_path: Path, ranks: int, make: Any, data: Any, **kwargs: Any) -> tuple[dict[str, torch.Tensor], Any, Any]:
    algorithm = make()
    trainer = toy_trainer(
        tmp_path / str(ranks), **forked(ranks),
        **{"max_rounds": 3, "callbacks": [OneThread(), StaticBatchNorm(source="moments")]} | kwargs,
    )  # fmt: skip
    trainer.fit(algorithm, data())
    return weights(algorithm), trainer, algorithm


@pytest.mark.parametrize(
    ("make", "data", "ranks"),
    [
        (toy_semifl, ToyData, 2),
        (lambda: toy_fedavg(keep_client_optimizer=True), labeled_clients, 3),
        (toy_shvr, uneven_clients, 2),
        (lambda: toy_pseudo_label(ramp_epochs=0), uneven_clients, 2),
        (toy_mean_teacher, uneven_clients, 2),
        (toy_fixmatch, mixed_clients, 2),
        (lambda: toy_fedmatch(lr_patience=1), mixed_clients, 2),
        (lambda: toy_fedmatch(lr_patience=1), ToyData, 2),  # labels at the server
        (lambda: toy_fedswitch(ByNumber), ToyData, 2),
        (toy_uda, mixed_clients, 2),
        (toy_semi_sfl, ToyData, 2),
        (lambda: toy_semi_sfl(network=DropsInTheTop, client_teacher_decay=0.9), ToyData, 4),  # one rank has no client
        (toy_fedswitch_sl, ToyData, 2),
    ],
)
def test_ranks_give_the_bits_of_one_in_32_bit_arithmetic(tmp_path: Path, make: Any, data: Any, ranks: int) -> None:
    alone, alone_trainer, _ = run(tmp_path, 1, make, data)
    together, together_trainer, _ = run(tmp_path, ranks, make, data)
    assert_same(alone, together)
    for name, value in alone_trainer.callback_metrics.items():
        if not name.startswith("time/"):
            assert float(together_trainer.callback_metrics[name]) == float(value), name
    assert sum(1 for _ in (tmp_path / str(ranks)).rglob("last.ckpt")) == 1


@pytest.mark.parametrize(
    ("make", "data", "clients", "ranks"),
    [
        (toy_semifl, ToyData, 3, 2),  # stacks of 2 and 1
        (lambda: toy_semifl(threshold=0.4), ToyData, 3, 2),  # some clients skip a round
        (lambda: toy_fedavg(keep_client_optimizer=True), labeled_clients, 3, 3),  # one rank has no stack
        (toy_shvr, uneven_clients, 4, 2),
        (toy_mean_teacher, uneven_clients, 4, 2),
        (toy_fixmatch, mixed_clients, 3, 2),
        (toy_semi_sfl, ToyData, 3, 2),
        (toy_fedswitch_sl, ToyData, 3, 2),
    ],
)
def test_stacks_have_the_bits_of_one_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, data: Any, clients: int, ranks: int
) -> None:
    """Which clients form a stack does not depend on the ranks, and ranks train whole stacks."""
    settings: dict[str, Any] = {"clients_at_once": 2, "clients_per_round": clients, "max_rounds": 2}
    alone, alone_trainer, _ = run(tmp_path, 1, make, data, **settings)
    together, together_trainer, _ = run(tmp_path, ranks, make, data, **settings)
    assert not [message for message in caplog.messages if "will train one after another" in message]
    assert_same(alone, together)
    for name, value in alone_trainer.callback_metrics.items():
        if not name.startswith("time/"):
            assert float(together_trainer.callback_metrics[name]) == float(value), name


class SkipsThree(FedAvg):
    """Skips a batch of three images, which a stack cannot."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if len(batch["x"]) == 3 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("batch_size", "found"),
    [(25, "the clients of SkipsThree will"), (5, "the clients of SkipsThree whose stack fails will")],
    ids=["found by the compatibility check", "found while a stack trains"],
)
def test_ranks_agree_where_one_client_cannot_be_stacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch_size: int, found: str
) -> None:
    """Clients of 26, 19, 28 and 35 images: only one of them has a batch of three images, its second or sixth."""

    def make() -> SkipsThree:
        return SkipsThree(**dict(toy_fedavg().hparams))

    def data() -> ToyData:
        return labeled_clients(partition=Dirichlet(1.0), client_batch_size=batch_size)

    def settings() -> dict[str, Any]:
        return {"clients_at_once": 2, "clients_per_round": 4, "callbacks": [OneThread()]}

    alone, *_ = run(tmp_path, 1, make, data, **settings())
    assert sum(found in message for message in caplog.messages) == 1
    assert sum("one after another" in message for message in caplog.messages) == 1
    together, *_ = run(tmp_path, 2, make, data, **settings())
    assert_same(alone, together)
    stops = {**settings(), "callbacks": [OneThread(), StopAfterTwo()]}
    toy_trainer(tmp_path / "two", **forked(2), max_rounds=3, **stops).fit(make(), data())
    resumed = make()
    toy_trainer(tmp_path / "two", max_rounds=3, **settings()).fit(resumed, data(), ckpt_path="last")
    assert_same(weights(resumed), alone)


@pytest.mark.parametrize(
    ("source", "average", "batches_of"),
    [
        ("server", "batches", 5),  # of 12 images: an uneven number of batches, which the ranks divide
        ("server", "exact", 250),  # one batch: the other rank has none
        ("pooled", "exact", 50),
    ],
)
def test_ranks_measure_the_batch_norm_statistics_of_one_rank(
    tmp_path: Path, source: Any, average: Any, batches_of: int
) -> None:
    def callbacks() -> list[FederatedCallback]:
        return [OneThread(), StaticBatchNorm(source, average, batches_of)]

    settings: dict[str, Any] = {"max_rounds": 2, "logger": False}
    alone, *_ = run(tmp_path, 1, toy_semifl, ToyData, callbacks=callbacks(), **settings)
    together, *_ = run(tmp_path, 2, toy_semifl, ToyData, callbacks=callbacks(), **settings)
    measured = {name: t for name, t in alone.items() if name.endswith("running_mean")}
    assert measured
    assert all(t.count_nonzero() for t in measured.values())  # they are 0 before the first measurement
    assert_same(alone, together)


@pytest.mark.parametrize("make", [toy_fedavg, toy_shvr])
def test_sums_of_the_ranks_are_added_where_the_updates_are_too_large(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "ORDERED_BYTES", 0)
    settings: dict[str, Any] = {"precision": "64-true", "max_rounds": 2, "logger": False}
    alone, *_ = run(tmp_path, 1, make, uneven_clients, **settings)
    together, *_ = run(tmp_path, 2, make, uneven_clients, **settings)
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-10)


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


class SharesOneNumber(FedAvg):
    """Every client writes under the same number, so ranks could not agree."""

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        self.clients.put(0, "last", {"client": torch.tensor(update.client)})
        return update


def test_clients_of_two_ranks_that_write_the_same_state_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="two clients of a round wrote the client state 'last' of number 0"):
        run(tmp_path, 2, lambda: SharesOneNumber(**dict(toy_fedavg().hparams)), labeled_clients)


def test_a_checkpoint_of_two_ranks_resumes_on_one(tmp_path: Path) -> None:
    whole, *_ = run(tmp_path, 1, toy_semifl, ToyData)
    two = toy_trainer(
        tmp_path / "two", max_rounds=3, **forked(2),
        callbacks=[OneThread(), StaticBatchNorm(source="moments"), StopAfterTwo()],
    )  # fmt: skip
    two.fit(toy_semifl(), ToyData())
    assert two.round_index == 2
    algorithm = toy_semifl()
    one = toy_trainer(tmp_path / "two", max_rounds=3, callbacks=[OneThread(), StaticBatchNorm(source="moments")])
    one.fit(algorithm, ToyData(), ckpt_path="last")
    assert_same(weights(algorithm), whole)


FIT = [
    "fit", "--config", "configs/semifl_digits.yaml", "--trainer.max_rounds", "2",
    "--trainer.precision", "64-true", "--model.threshold", "0.3", "--model.client_epochs", "1",
]  # fmt: skip


def own_environment() -> dict[str, str]:
    """The environment without a job of several processes."""
    launchers = ("SLURM_", "LOCAL_RANK", "WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if not name.startswith(launchers)}


def start(arguments: list[str], root: Path, job: Mapping[str, str] = MappingProxyType({})) -> subprocess.Popen[str]:
    """A process of the command line, or of torchrun, which writes below ``root``."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments, "--trainer.default_root_dir", str(root)], cwd=Path(__file__).parent.parent,
        env={**own_environment(), "PYTHONPATH": ".", **job}, stderr=subprocess.PIPE, text=True,
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
    finished(start(["lightning_fedssl", *FIT], root))
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
    fit = ["-m", "lightning_fedssl", *FIT, "--trainer.strategy", "ddp", "--trainer.num_nodes", "2"]
    nodes = ([*launch, "--node_rank", str(node), *fit] for node in range(2))
    finished(*(start(node, tmp_path) for node in nodes))
    assert_close(saved_weights(tmp_path), alone)


def test_two_machines_by_slurm_give_the_weights_of_one(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """Two processes that find SLURM's variables as `srun` with two nodes of a task each sets them."""
    fit = ["lightning_fedssl", *FIT, "--trainer.strategy", "ddp", "--trainer.num_nodes", "2"]
    job = {
        "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1", "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "MASTER_PORT": free_port(),
    }  # fmt: skip
    tasks = ({**job, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)} for node in range(2))
    finished(*(start(fit, tmp_path, job=task) for task in tasks))
    assert_close(saved_weights(tmp_path), alone)
    assert not (tmp_path / "lightning_logs/version_1").exists()


def test_missing_data_are_reported_once(tmp_path: Path) -> None:
    nowhere = ["--data.dataset", "mnist", "--data.root", str(tmp_path / "nowhere")]
    process = start(["lightning_fedssl", *FIT, "--trainer.devices", "2", *nowhere], tmp_path)
    log = process.communicate(timeout=600)[1]
    assert process.returncode in (1, -signal.SIGTERM)  # which Lightning sends where it sees the other rank end first
    assert log.count("data.root: mnist was not found") == 1
    assert "Traceback" not in log


def test_a_rank_does_not_go_on_where_another_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "gather", lambda fabric, value: [value, "disk full"])
    with pytest.raises(ConnectionAbortedError, match="rank 1 ended with an error: disk full"):
        collectives.together(Fabric(accelerator="cpu"), lambda: None)


LEAVING = """
import atexit
import sys
from pathlib import Path

import torch

from tests.toy import ToyData, toy_semifl, toy_trainer

trainer = toy_trainer(Path(sys.argv[-1]), strategy="ddp", devices=1, max_rounds=1)
atexit.register(lambda: print("at the end:", torch.distributed.is_initialized(), file=sys.stderr))
trainer.fit(toy_semifl(), ToyData())
trainer.test(trainer.algorithm, ToyData())
print("after training:", torch.distributed.is_initialized(), file=sys.stderr)
"""


def test_a_rank_leaves_its_group_before_the_interpreter_ends(tmp_path: Path) -> None:
    """A backend's thread that outlives the interpreter aborts a run that has done its work."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING, str(tmp_path)], cwd=Path(__file__).parent.parent, env=own_environment(),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    (log,) = finished(process)
    assert log.index("after training: True") < log.index("at the end: False")


@pytest.mark.skipif(usable_cores() < 2, reason="one core gives one rank")
def test_a_rank_a_core_gives_the_weights_of_one(tmp_path: Path, alone: dict[str, torch.Tensor]) -> None:
    """``devices: auto``, by the command line; a run's own configuration then evaluates the checkpoint."""
    ranks = min(usable_cores(), 10)
    (log,) = finished(start(["lightning_fedssl", *FIT, "--trainer.devices", "auto"], tmp_path))
    assert log.count(f"trainer.devices is auto; ranks: {ranks}, processor cores: ") == 1
    assert_close(saved_weights(tmp_path), alone)
    run = tmp_path / "lightning_logs/version_0"
    test = ["lightning_fedssl", "test", "--config", str(run / "config.yaml"), "--ckpt_path", "last"]
    (log,) = finished(start(test, tmp_path))
    assert f"trainer.devices is auto; ranks: {ranks}, processor cores: " in log
    accuracies = [
        [row["test/accuracy"] for row in csv.DictReader(path.open()) if row.get("test/accuracy")]
        for path in (run / "metrics.csv", run.with_name("version_1") / "metrics.csv")
    ]
    assert len(accuracies[0]) == 1
    assert accuracies[0] == accuracies[1]


class StopAfterTwo(FederatedCallback):
    """Ends the run after round 2, asked for on the last rank only."""

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        trainer.should_stop = trainer.round_index == 2 and trainer.global_rank == trainer.world_size - 1
