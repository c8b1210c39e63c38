"""What ``devices: auto`` stands for on a CPU."""

import logging
import os
from typing import Any

import pytest
from lightning.fabric.accelerators.cuda import CUDAAccelerator
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from lightning_fedssl.distributed import cpu_ranks
from lightning_fedssl.trainer import FederatedTrainer, launch


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, and a process that nobody has started with others."""
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 8)
    for name in os.environ:
        if name.startswith("SLURM_") or name in ("OMP_NUM_THREADS", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def trainer(**kwargs: Any) -> FederatedTrainer:
    settings: dict[str, Any] = {"devices": "auto", "accelerator": "cpu", "clients_per_round": 10} | kwargs
    return FederatedTrainer(**settings)


def ranks(**kwargs: Any) -> int:
    strategy = trainer(**kwargs).fabric.strategy
    assert isinstance(strategy, DDPStrategy)
    return strategy.num_processes


@pytest.mark.parametrize(
    ("cores_", "threads", "clients", "ranks"),
    [(8, 1, 10, 8), (8, 1, 3, 3), (8, 2, 10, 4), (8, 3, 10, 2), (8, 16, 10, 1), (1, 1, 10, 1), (8, 1, 1, 1)],
)
def test_as_many_ranks_as_find_a_core_and_a_client(cores_: int, threads: int, clients: int, ranks: int) -> None:
    assert cpu_ranks.ranks_for(cores_, threads, clients) == ranks


@pytest.mark.parametrize(
    ("clients", "nodes", "environment", "ranks"),
    [
        (10, 1, {}, 8),
        (10, 3, {}, 4),  # 4 + 4 + 2 clients
        (10, 1, {"OMP_NUM_THREADS": "4"}, 2),
        (10, 1, {"OMP_NUM_THREADS": "4,2"}, 2),
        (10, 1, {"OMP_NUM_THREADS": "many"}, 8),
        (10, 1, {"LOCAL_RANK": "1", "WORLD_SIZE": "3", "OMP_NUM_THREADS": "8"}, 3),  # Lightning's own child
        (10, 2, {"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, 2),  # torchrun on two machines
        (10, 2, {"SLURM_NTASKS": "6", "SLURM_JOB_NAME": "train"}, 3),
        (10, 1, {"SLURM_NTASKS": "6", "SLURM_JOB_NAME": "bash"}, 8),  # a shell in an allocation, which started nothing
    ],
)
def test_the_plan_of_a_machine(
    clients: int, nodes: int, environment: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cpu_ranks.plan_ranks(clients, nodes) == ranks


def test_auto_takes_ddp_with_a_rank_a_core_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_fedssl"):
        strategy = trainer().fabric.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy.num_processes == 8
    (line,) = caplog.messages
    assert line == "trainer.devices is auto; ranks: 8, processor cores: 8, clients or stacks a round: 10"


def test_auto_chooses_no_more_than_the_number_for_a_given_strategy() -> None:
    strategy = trainer(strategy="ddp_spawn", clients_per_round=3).fabric.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy.num_processes == 3
    assert isinstance(strategy.launcher, _MultiProcessingLauncher)


def test_a_trial_run_has_two_clients_hence_two_ranks() -> None:
    strategy = trainer(fast_dev_run=True).fabric.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy.num_processes == 2


def test_one_core_is_the_plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 1)
    assert isinstance(trainer().fabric.strategy, SingleDeviceStrategy)


@pytest.mark.parametrize("strategy", ["auto", "forked", "ddp_spawn"])
def test_more_ranks_than_cores_are_refused(strategy: str) -> None:
    message = r"trainer\.devices is 9: .* this machine has 8 processor cores for them; give at most 8, or auto"
    for devices in (9, "9"):
        with pytest.raises(ValueError, match=message):
            trainer(devices=devices, strategy=strategy)
    assert ranks(devices=8, strategy=strategy, clients_per_round=2) == 8


def test_a_few_ranks_may_share_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ranks, "usable_cores", lambda: 1)
    assert ranks(devices=4) == 4
    with pytest.raises(ValueError, match="this machine has 1 processor core for them; give at most 1, or auto"):
        trainer(devices=5)


def test_ranks_that_a_launcher_has_started_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    assert ranks(devices=9) == 9


@pytest.mark.parametrize(
    ("accelerator", "has_gpu", "devices"), [("gpu", True, "auto"), ("auto", True, "auto"), ("auto", False, 8)]
)
def test_on_gpus_auto_is_lightnings(
    accelerator: str, has_gpu: bool, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder:
        def __init__(self, **kwargs: Any) -> None:
            self.given = kwargs
            self.strategy = type("", (), {})()

    monkeypatch.setattr(launch, "Fabric", Recorder)
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: has_gpu)
    fabric: Any = launch.make_fabric(accelerator, "auto", 1, "auto", "32-true", 10)
    assert fabric.given["devices"] == devices
    assert fabric.given["strategy"] == "auto"
