"""Small federations of every digits configuration, and what the device did for them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.local_training import LocalTraining, sequential, split_learning, vectorized
from lightning_fedssl.local_training.cuda_graphs import FixedStack
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer import FederatedTrainer, fit_loop
from lightning_fedssl.trainer.federation import Federation
from tests.pretend_cuda.device import Device

SMALL = {"trainer.max_rounds": 2, "trainer.clients_per_round": 3, "trainer.logger": False, "data.client_batch_size": 20}
"""Two rounds of three clients."""

CNN = {"model.network.width": 4}
MLP = {"model.network.hidden": [16]}
EPOCH = {"model.client_epochs": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "datasharing": {**CNN, "model.local_steps": 3},
    "easgd": {**CNN, "model.local_steps": 3},
    "fedavg": CNN,
    "fedmatch": {**CNN, "model.server_epochs": 1, "model.threshold": 0.1},
    "fedrgd": {
        **CNN,
        "model.server_only_rounds": 0,
        "model.network.norm_groups": 2,
        "trainer.clients_per_round": 4,
        "model.local_steps": 3,
        "model.threshold": 0.1,
    },
    "fedshvr": {**MLP, **EPOCH},
    "fedswitch": {**CNN, "model.client_steps": 5, "model.server_steps": 3, "model.threshold": 0.1},
    "fedswitchsl": {**CNN, "model.client_steps": 4, "model.server_steps": 3, "model.threshold": 0.1},
    "fixmatch": {**CNN, **EPOCH, "model.server_epochs": 1, "model.threshold": 0.1},
    "fixmatch_pooled": {**CNN, **EPOCH, "trainer.clients_per_round": 1, "model.threshold": 0.1},
    "meanteacher": {**MLP, **EPOCH},
    "overlapsgd": {**CNN, "model.local_steps": 3},
    "pseudolabel": {**MLP, **EPOCH},
    "semifl": {**CNN, **EPOCH, "model.server_epochs": 1, "model.threshold": 0.1},
    "semisfl": {**CNN, "model.client_steps": 4, "model.server_steps": 3, "model.threshold": 0.1},
    "supervised": {**CNN, "trainer.clients_per_round": 1},
    "uda": {**CNN, **EPOCH, "model.server_epochs": 1, "model.threshold": 0.1},
}
"""Every ``configs/NAME_digits.yaml`` and the settings in which every party trains from the first round on."""


@dataclass
class Round:
    """What a device did in a round.

    Attributes:
        waits: Where the host waited, by line.
        uploads: Uploads that block, by line.
        kernels: Launches.
        replays: Graphs replayed.
        step_waits: Where the host waited, or an upload blocked, inside the steps of clients, by line.
        step_kernels: Launches inside the steps of clients.
        client_steps: Steps of all clients.
        uploaded: Updates that clients sent.
    """

    waits: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    kernels: int = 0
    replays: int = 0
    step_waits: Counter[str] = field(default_factory=Counter)
    step_kernels: int = 0
    client_steps: int = 0
    uploaded: int = 0


@dataclass
class Result:
    """What a run gave: the global model on the CPU, its scalars, and each round on the device.

    ``needed`` is the most memory that clients' training took in any round, beyond what was in use when the first of
    them began, and ``estimate`` what the compatibility check said of a stack of the whole cohort.
    """

    model: dict[str, Tensor]
    metrics: dict[str, float]
    rounds: list[Round]
    trainer: FederatedTrainer
    needed: int
    estimate: float | None


class Recorder:
    """Notes what a device does in each round of a run.

    Args:
        device: The device; None on a CPU.
        stop_after: The round after which the run ends early; None for the last.
    """

    def __init__(self, device: Device | None, stop_after: int | None = None) -> None:
        self.device = device
        self.stop_after = stop_after
        self.rounds: list[Round] = []
        self.in_steps = self.preparing = False
        self.base: int | None = None
        self.needed = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, every run is noted."""
        with contextlib.ExitStack() as stack:
            for owner, name, wrapper in (
                (fit_loop, "run_round", self._round),
                (LocalTraining, "train_clients", self._memory),
                (Federation, "client_batch_ended", self._step_ended),
                (Federation, "client_ended", self._client_ended),
                (sequential.Loop, "train", self._client_steps),
                (vectorized.Stack, "train", self._client_steps),
                (FixedStack, "train_all", self._client_steps),
                (FixedStack, "_prepared", self._preparation),
                (FixedStack, "_confirm", self._preparation),
                (split_learning, "_groups", self._preparation),
                (split_learning, "_server_step", self._client_steps),
                (split_learning, "_report", self._client_steps),
                (split_learning._Bottoms, "features", self._client_steps),
                (split_learning._Bottoms, "step", self._client_steps),
                (split_learning._Seats, "gather", self._client_steps),
            ):
                original = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, wrapper(original)))
            yield

    def _round(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            now = Round()
            self.rounds.append(now)
            with self._noted(now):
                result = original(*arguments)
            status = arguments[0].status
            status.should_stop = status.should_stop or status.round_index == self.stop_after
            return result

        return run

    @contextlib.contextmanager
    def _noted(self, now: Round) -> Iterator[None]:
        device = self.device
        if device is None:
            yield
            return
        waits, uploads = device.waits.copy(), device.blocking_uploads.copy()
        kernels, replays = device.kernels.total(), device.replays
        yield
        now.waits, now.uploads = device.waits - waits, device.blocking_uploads - uploads
        now.kernels, now.replays = device.kernels.total() - kernels, device.replays - replays

    def _memory(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What clients' training takes; the compatibility check, which comes before the first of them, is left out."""

        def run(*arguments: Any, **more: Any) -> Any:
            updates, device = original(*arguments, **more), self.device
            return updates if device is None else self._measured(device, updates)

        return run

    def _measured(self, device: Device, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        if self.base is None:
            self.base = device.allocated
        device.reset_peak()
        yield from updates
        self.needed = max(self.needed, device.peak + device.pool - self.base)

    def _client_steps(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            of_server = arguments[0].__class__ is sequential.Loop and "client/loss" not in arguments
            if self.device is None or of_server or self.preparing:
                return original(*arguments, **more)
            inside, now = Round(), self.rounds[-1]
            self.in_steps = True
            with self._noted(inside):
                result = original(*arguments, **more)
            self.in_steps = False
            now.step_waits += inside.waits + inside.uploads
            now.step_kernels += inside.kernels
            return result

        return run

    def _preparation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is compared and recorded is no step."""

        def run(*arguments: Any) -> Any:
            inside, now = Round(), self.rounds[-1]
            self.preparing = True
            with self._noted(inside):
                result = original(*arguments)
            self.preparing = False
            if self.in_steps:
                now.step_waits.subtract(inside.waits + inside.uploads)
                now.step_kernels -= inside.kernels
            return result

        return run

    def _step_ended(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.rounds[-1].client_steps += 1
            return original(*arguments)

        return run

    def _client_ended(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.rounds[-1].uploaded += 1
            return original(*arguments)

        return run


def options(settings: dict[str, Any]) -> list[str]:
    """The settings as the command line takes them."""
    return [
        part
        for key, value in settings.items()
        for part in (f"--{key}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


@functools.cache
def read(name: str) -> tuple[FederatedCLI, Any]:
    """The command line for a digits configuration, and what it has read: as long as half a run."""
    chosen = options({**SMALL, **CONFIGS[name], "trainer.enable_progress_bar": False})
    cli = FederatedCLI(args=["--config", f"configs/{name}_digits.yaml", *chosen], run=False)
    return cli, cli.config.clone()


def run(name: str, settings: dict[str, Any]) -> FederatedCLI:
    """Train a digits configuration with other settings: by the command line, or as it does.

    Args:
        name: One of :data:`CONFIGS`.
        settings: Values by key, in addition to :data:`SMALL` and those of the configuration.
    """
    if any(key.startswith("model.network") for key in settings):  # a class inside the method, with its arguments
        chosen = {**SMALL, **CONFIGS[name], **settings, "trainer.enable_progress_bar": False}
        return FederatedCLI(args=["fit", "--config", f"configs/{name}_digits.yaml", *options(chosen)])
    cli, config = read(name)
    cli.config = config.clone()
    for key, value in settings.items():
        if key != "ckpt_path":
            cli.config[key.replace("model.", "model.init_args.")] = value
    cli._set_seed()
    cli.instantiate_classes()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=settings.get("ckpt_path"))
    return cli


def fit(name: str, device: Device | None, root: Path, stop_after: int | None = None, **more: Any) -> Result:
    """Train a digits configuration.

    Args:
        name: One of :data:`CONFIGS`.
        device: The pretend device; None for the CPU.
        root: Where files are written.
        stop_after: End the run early, after this round.
        more: Further keys, with ``__`` for a dot.
    """
    chosen = {key.replace("__", "."): value for key, value in more.items()}
    settings = {**chosen, "trainer.default_root_dir": root, "trainer.accelerator": "cpu" if device is None else "cuda"}
    recorder = Recorder(device, stop_after)
    with recorder.watching(), quiet():
        cli = run(name, settings)
    model = {key: t.detach().cpu() for key, t in cli.model.server.model().items()}
    trainer: Any = cli.trainer
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")}
    memory, at_once = trainer.local_training.memory, len(trainer.cohort)
    estimate = None if memory is None else memory.of(at_once)
    return Result(model, metrics, recorder.rounds, trainer, recorder.needed, estimate)
