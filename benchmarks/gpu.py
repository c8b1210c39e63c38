r"""Benchmarks on a GPU: agreement with the CPU, client steps per second, SemiFL by phases, pfl's CIFAR-10 setting.

Each measurement is appended to ``gpu.csv`` at once, and ``gpu.md`` (after each part also ``gpu.png``) is written anew
from all of them. Images are random and no file is read, so that the script runs on any machine with PyTorch, Lightning
and a GPU, without a network; with the threshold 0 every image is trained on, which is the most that a round can cost.
Nothing is saved, and the time of a SemiFL round is the sum of its phases, logging left out.

A measurement that fails leaves its traceback and a row, the others follow, and the exit code is 1. None begins later
than ``--budget-s`` seconds after the process, or with less time left than the one before it in its part took; the one
in hand is finished. Where a command may take 600 seconds, and what it leaves in $OUT is kept, ask so:

    PYTHONPATH=. python3 benchmarks/gpu.py --part agree ceilings engines --budget-s 400 --output $OUT
    PYTHONPATH=. python3 benchmarks/gpu.py --part curve --budget-s 400 --output $OUT
    PYTHONPATH=. python3 benchmarks/gpu.py --part round pfl --budget-s 400 --output $OUT
    PYTHONPATH=. python3 benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu

``make gpu`` runs the tests below and then every part, at most 10 minutes each, and resumes where it stopped:

    PYTHONPATH=. python3 -m pytest -m gpu tests
"""

from __future__ import annotations

import time

__started__ = time.monotonic()  # before the imports that take long: a limit on the command's time counts them, too

import argparse
import csv
import functools
import gc
import math
import statistics
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import command_line
import torch
from engines import BATCH, ReadyBatches
from lightning.fabric import Fabric
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.augment.views import make_views
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_training import sequential, vectorized
from lightning_fedssl.local_training.sequential import NoObserver
from lightning_fedssl.models import WideResNet
from lightning_fedssl.state import ServerState
from lightning_fedssl.trainer import FederatedTrainer

PARTS = ("agree", "ceilings", "engines", "curve", "round", "pfl")
PRECISIONS = ("32-true", "bf16-mixed")
FAILED = ": failed"
"""The end of the name of a measurement without a result."""

BYTES_PER_IMAGE = {"32-true": 45.8e6, "bf16-mixed": 22.9e6}
"""WRN-28-2 forward and backward with unfused kernels, counted by hand: 21.5 passes over 1.06 M values of an image."""

PREDICTED = {
    ("agree", "float64, vectorised against sequential"): "1e-11 or better",
    ("engines", "sequential, 32-true"): "80 to 200",
    ("engines", "vectorised, 32-true"): "700 to 2,000",
}
"""Estimates by arithmetic for an H200, made before anything was measured.

Views are made for a client and an epoch at a time: SemiFL's strong one takes 627 kernels (FixMatch's 474), a weak one
31, so that a round launches about 35,000, one by one, at 6 to 10 microseconds each.
"""

Engine = tuple[str, int]
"""Name, and clients in a stack."""

ALONE: Engine = ("sequential", 1)
"""Sequential training."""


@dataclass(frozen=True)
class Setting:
    """What the command line asks for.

    Attributes:
        device: ``cuda`` or ``cpu``.
        tiny: Sizes for a trial on a CPU.
        deadline: When to stop, on ``time.monotonic``'s clock.
        output: Where results are written.
        repeats: Measurements of each case; the median counts.
        seconds: What the latest measurement of each part took.
        failed: Measurements that failed.
        resume: Leave out what ``gpu.csv`` holds already.
        unfinished: Measurements that were left out for lack of time.
    """

    device: str
    tiny: bool
    deadline: float
    output: Path
    repeats: int
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    failed: list[str] = field(default_factory=list, compare=False)
    resume: bool = False
    unfinished: list[str] = field(default_factory=list, compare=False)

    def network(self) -> Callable[..., nn.Module]:
        """WRN-28-2 with static batch norm."""
        return partial(
            WideResNet, depth=10 if self.tiny else 28, widen_factor=1 if self.tiny else 2, norm="static_batch"
        )

    def attempt(self, part: str, case: str, measure: Callable[[], object]) -> None:
        """Make a measurement if there is time; if it fails, the next ones are made all the same.

        Args:
            part: One of :data:`PARTS`.
            case: Names the measurement.
            measure: Makes it, and notes what it finds.
        """
        started = time.monotonic()
        if self.resume and self.has_measured(part, case):
            return
        if not may_begin(self.deadline - started, self.seconds.get(part, 0.0)):
            print(f"{part}: {case}: no time left; ask for this part alone", flush=True)
            self.unfinished.append(f"{part}: {case}")
            return
        try:
            measure()
        except Exception:
            traceback.print_exc()
            self.failed.append(f"{part}: {case}")
            self.note(part, f"{case}{FAILED}", math.nan, "")
        self.seconds[part] = time.monotonic() - started
        free(self.device)

    def has_measured(self, part: str, case: str) -> bool:
        """Whether ``gpu.csv`` has a result of a measurement on this device."""
        path, place = self.output / "gpu.csv", self.place()
        if not path.exists():
            return False
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if (row["part"], row["device"]) == (part, place)]
        cases = [row["case"] for row in rows]
        return any(
            name == case or name.startswith((f"{case}:", f"{case}, NOT")) for name in cases if FAILED not in name
        )

    def place(self) -> str:
        """The device's name in the tables."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU"

    def note(self, part: str, case: str, value: float, unit: str) -> None:
        """Append a measurement, and write the report anew."""
        row = {"part": part, "case": case, "value": f"{value:.6g}", "unit": unit, "device": self.place()}
        row["torch"] = torch.__version__
        path = self.output / "gpu.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        print(f"{part}: {case}: {value:.4g} {unit}", flush=True)
        write_report(self.output)


def may_begin(left: float, before: float) -> bool:
    """Whether a measurement may begin.

    Args:
        left: Seconds to the deadline.
        before: Seconds that the part's last measurement took: one of the same part may well take as long.
    """
    return left > 0 and before <= left


def free(device: str) -> None:
    """Free memory: a trainer and its algorithm refer to each other, so they need a garbage collection."""
    gc.collect()
    if device == "cuda":
        with suppress(RuntimeError):  # this fails, too, on a device that an error has broken
            torch.cuda.empty_cache()


class Case:
    """Clients with ready batches, and an engine that trains them.

    Args:
        setting: Device and sizes.
        clients: Number of clients.
        precision: As the trainer's.
        steps: Steps of a client.
    """

    def __init__(self, setting: Setting, clients: int, precision: str = "32-true", steps: int = 8) -> None:
        dtype = torch.float64 if precision == "64-true" else torch.float32
        in_shape = (3, 8, 8) if setting.tiny else (3, 32, 32)
        self.algorithm = ReadyBatches(steps, dtype, network=setting.network(), in_shape=in_shape)
        self.algorithm.collector = lambda name, value, weight: None
        self.algorithm.configure_model()
        self.algorithm.to(setting.device, dtype)
        self.algorithm.server = ServerState.of(self.algorithm)
        self.fabric = Fabric(accelerator=setting.device, devices=1, precision=precision)  # type: ignore[arg-type]
        settings: dict[str, Any] = {"lr": 2**-5, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "fused": True}
        self.optimizer = torch.optim.SGD(self.algorithm.parameters(), **settings)
        self.steps, self.number = steps, clients
        self.clients = [no_data(client, setting.device) for client in range(clients)]

    def train(self, engine: Engine) -> Tensor:
        """A round; what the clients return, ``(clients, weights)``."""
        name, at_once = engine
        arguments = (self.optimizer, self.fabric, NoObserver())
        stacks = sampling.equal_parts(self.clients, at_once)
        updates = (
            sequential.train_clients(self.algorithm, self.clients, *arguments)
            if name == "sequential"
            else chain.from_iterable(vectorized.train_clients(self.algorithm, stack, *arguments) for stack in stacks)
        )
        return torch.stack([torch.cat([t.flatten() for t in update.parameters.values()]) for update in updates])

    def seconds(self, engine: Engine, setting: Setting) -> float:
        """Median time of a round, after a warm-up round."""
        self.train(engine)
        return statistics.median(timed(lambda: self.train(engine), setting.device) for _ in range(setting.repeats))


def no_data(client: int, device: str) -> LocalData:
    """A client without images."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device=device)
    spec = DatasetSpec("cifar10", 10, (3, 8, 8), (0.5,) * 3, (0.25,) * 3, tuple("0123456789"))
    return LocalData(client, 1, 0, images, none, none, none, BATCH, make_views(spec, weak="none", strong="none"))


def wait(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds of a call, including its work on the device."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TensorFloat-32 in matrix products and convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# The parts.


def agree(setting: Setting) -> None:
    """Largest difference of a weight: engines in float64 after 20 steps, devices in float64 and, one step, float32."""
    steps = 3 if setting.tiny else 20
    expected = Case(setting, 4, "64-true", steps).train(ALONE)
    for title, engine in (("vectorised", ("vectorised", 4)),):
        title = f"float64, {title} against sequential"
        setting.attempt("agree", title, partial(compare_engines, setting, title, engine, steps, expected))
    for precision, steps in (("64-true", 2), ("32-true", 1)):
        title = f"{precision}, device against CPU, {steps} step(s)"
        setting.attempt("agree", title, partial(compare_devices, setting, title, precision, steps))


def compare_engines(setting: Setting, title: str, engine: Engine, steps: int, expected: Tensor) -> None:
    """An engine's weights in float64 against the expected ones."""
    case = Case(setting, 4, "64-true", steps)
    difference = float((case.train(engine) - expected).abs().max())
    setting.note("agree", title, difference, "largest difference")


def compare_devices(setting: Setting, title: str, precision: str, steps: int) -> None:
    """The device's weights against the CPU's."""
    with tf32(False):
        pair = [Case(place, 2, precision, steps).train(ALONE) for place in (replace(setting, device="cpu"), setting)]
    difference = float((pair[0] - pair[1].cpu()).abs().max())
    setting.note("agree", title, difference, "largest difference")


def ceilings(setting: Setting) -> None:
    """The speed of a copy and of a matrix product, as upper limits."""
    count, side = (2**20, 256) if setting.tiny else (2**31, 8192)
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), setting.device) for _ in range(10))
    setting.note("ceilings", "copy, bytes read and written", 2 * count / seconds / 1e12, "TB/s")
    for title, dtype, allowed in (("bf16", torch.bfloat16, False), ("tf32", torch.float32, True)):
        a, b = (torch.randn(side, side, device=setting.device, dtype=dtype) for _ in range(2))
        with tf32(allowed):
            torch.matmul(a, b)
            seconds = statistics.median(timed(partial(torch.matmul, a, b), setting.device) for _ in range(10))
        setting.note("ceilings", f"{side} x {side} product, {title}", 2 * side**3 / seconds / 1e12, "TFLOP/s")


def engines_of(clients: int) -> dict[str, Engine]:
    """The local trainers that are compared."""
    return {
        "sequential": ("sequential", 1),
        "vectorised": ("vectorised", clients),
    }


def engines(setting: Setting) -> None:
    """Client steps per second of ten clients; TF32 is allowed, as its rounding is below the gradients' noise."""
    clients = 3 if setting.tiny else 10

    def attempt(title: str, engine: Engine, precision: str, form: str = "") -> None:
        title = f"{title}, {precision}"
        setting.attempt("engines", title, partial(measure_engine, setting, title, clients, engine, precision, form))

    for precision in PRECISIONS:
        for title, engine in engines_of(clients).items():
            attempt(title, engine, precision)
        attempt("sequential channels-last", ALONE, precision, "channels-last")
    if not setting.tiny:  # at the end: compiling takes minutes, and asks for a C compiler
        for precision in PRECISIONS:
            attempt("sequential compiled", ALONE, precision, "compiled")


def measure_engine(
    setting: Setting, title: str, clients: int, engine: Engine, precision: str, form: str = "", part: str = "engines",
    ending: str = "",
) -> None:  # fmt: skip
    """One engine's rate, its share of the ceilings, and its memory."""
    with tf32(True):
        case = Case(setting, clients, precision, steps=2 if setting.tiny else 10)
        if form == "compiled":
            case.algorithm.network.compile()
        elif form == "channels-last":
            case.algorithm.to(memory_format=torch.channels_last)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rate = clients * case.steps / case.seconds(engine, setting)
    title += ending
    setting.note(part, title, rate, "client steps/s")
    images = 2 * BATCH * rate  # two passes a step
    setting.note(part, f"{title}: arithmetic", images * flop_of_an_image(setting) / 1e12, "TFLOP/s")
    if not setting.tiny:
        setting.note(part, f"{title}: memory traffic, estimated", images * BYTES_PER_IMAGE[precision] / 1e12, "TB/s")
    if setting.device == "cuda":
        setting.note(part, f"{title}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")


@functools.lru_cache
def flop_of_an_image(setting: Setting) -> float:
    """Forward and backward, counted."""
    network = setting.network()(num_classes=10, in_shape=(3, 32, 32))
    with FlopCounterMode(display=False) as counter:
        network(torch.randn(2, 3, 32, 32)).sum().backward()
    return float(counter.get_total_flops()) / 2


def curve(setting: Setting) -> None:
    """Client steps per second for several numbers of stacked clients."""
    for number in (1, 2, 3) if setting.tiny else (1, 2, 5, 10, 20, 40, 100):
        for precision in PRECISIONS:
            title, ending = f"vectorised, {precision}", f", {number} at once"
            measure = partial(
                measure_engine, setting, title, number, ("vectorised", number), precision, "", "curve", ending
            )
            setting.attempt("curve", title + ending, measure)


class RandomImages(FederatedDataModule):
    """Random images and labels in the shape of CIFAR-10.

    Args:
        train: Number of training images.
        test: Number of test images.
        kwargs: The data module's.
    """

    def __init__(self, train: int, test: int, **kwargs: Any) -> None:
        super().__init__("cifar10", **kwargs)
        self.sizes = (train, test)

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        generator = torch.Generator().manual_seed(0)
        splits = []
        for count in self.sizes:
            images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
            splits.append(ImageSplit(images, torch.arange(count) % 10))
        return self.spec, splits[0], splits[1]


class Unsaved(FederatedCheckpoint):  # type: ignore[misc]
    """Replaces the trainer's checkpoints: writing every new best round would take seconds."""

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Write nothing."""

    def on_train_end(self, trainer: Any, algorithm: Any) -> None:
        """Write nothing."""


class Phases(StaticBatchNorm):  # type: ignore[misc]
    """Seconds of each phase of a round up to its evaluation; it waits for the device at the end of each phase.

    Args:
        device: The device.
        first: The first round that counts.
        kwargs: Those of static batch norm.
    """

    def __init__(self, device: str, first: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.device, self.first = device, first
        self.rounds: list[Counter[str]] = []
        self.seconds: Counter[str] = Counter()
        self.since = 0.0

    def mark(self, phase: str) -> None:
        """Add the time since the end of the last phase to this phase."""
        wait(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.since  # type: ignore[assignment]
        self.since = now

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        """A round begins."""
        wait(self.device)
        self.seconds, self.since = Counter(), time.perf_counter()

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """A round has ended; its logging since the end of the last phase is not measured."""
        if trainer.round_index >= self.first:
            self.rounds.append(self.seconds)
        self.seconds = Counter()  # the last round is followed by the test of the run

    def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
        """Statistics have their own phase."""
        super().on_client_phase_start(trainer, algorithm)
        self.mark("statistics")

    def on_aggregate(self, trainer: Any, algorithm: Any) -> None:
        """The clients have trained."""
        self.mark("clients")

    def on_server_phase_start(self, trainer: Any, algorithm: Any) -> None:
        """The average has been made."""
        self.mark("average")

    def on_server_phase_end(self, trainer: Any, algorithm: Any) -> None:
        """The server has trained."""
        self.mark("server")

    def on_global_model(self, trainer: Any, algorithm: Any) -> None:
        """The round's new statistics."""
        super().on_global_model(trainer, algorithm)
        self.mark("statistics")

    def on_evaluation_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """The test images."""
        self.mark("test")


class TimedSemiFL(SemiFL):
    """SemiFL that measures the time of labelling.

    Args:
        phases: The phases, to which it is added.
        kwargs: SemiFL's.
    """

    def __init__(self, phases: Phases, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.phases = phases

    def label_images(self, data: LocalData) -> PseudoLabels:
        """As SemiFL."""
        self.phases.mark("clients")
        result = super().label_images(data)
        self.phases.mark("labels")
        return result


def sgd(parameters: Any, **more: Any) -> torch.optim.Optimizer:
    """SemiFL's optimizer, with its fused kernel."""
    settings = {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4} | more
    return torch.optim.SGD(parameters, fused=True, **settings)


def whole_runs(cohort: int) -> list[tuple[str, Engine]]:
    """The local trainers, the fastest first, so that the slowest is left out if time runs out."""
    return [*engines_of(cohort).items()][::-1]


def round_(setting: Setting) -> None:
    """Rounds of SemiFL on CIFAR-10 with 4,000 labels, by phases: 10 of 100 clients, five local epochs."""
    for name, engine in whole_runs(2 if setting.tiny else 10):
        for precision in ("32-true",) if setting.tiny else reversed(PRECISIONS):
            title = f"{name}, {precision}"
            setting.attempt("round", title, partial(measure_round, setting, title, engine, precision))


def measure_round(setting: Setting, title: str, engine: Engine, precision: str) -> None:
    """One engine's rounds; the whole is the sum of the phases, without logging and saving."""
    clients, cohort, epochs = (4, 2, 1) if setting.tiny else (100, 10, 5)
    train, test, labels = (100, 20, 20) if setting.tiny else (50_000, 10_000, 4_000)
    phases = Phases(setting.device, 1 if engine[1] == 1 else 2, source="pooled")
    algorithm = TimedSemiFL(
        phases, network=setting.network(), optimizer=sgd, threshold=0.0, client_epochs=epochs, server_epochs=epochs,
        num_classes=10, in_shape=(3, 32, 32),
    )  # fmt: skip
    data = RandomImages(
        train, test, num_clients=clients, num_labels=labels, server_batch_size=250, strong="semifl", validation="test"
    )
    whole = run(setting, algorithm, data, cohort, engine, precision, phases)
    setting.note("round", f"{title}: whole round", whole, "s")
    for phase in ("statistics", "labels", "clients", "average", "server", "test"):
        median = statistics.median(seconds[phase] for seconds in phases.rounds)
        setting.note("round", f"{title}: {phase}", median, "s")


def run(
    setting: Setting, algorithm: Any, data: FederatedDataModule, cohort: int, engine: Engine, precision: Any,
    callback: Any,
) -> float:  # fmt: skip
    """Train for some rounds; the median of their seconds.

    Raises:
        KeyboardInterrupt: If a signal stopped the trainer, which ends the current round and returns.
    """
    _, at_once = engine
    rounds = callback.first + (2 if setting.tiny else 3)
    with tempfile.TemporaryDirectory() as folder, tf32(True):
        trainer = FederatedTrainer(
            max_rounds=rounds, clients_per_round=cohort, clients_at_once=at_once,
            accelerator="gpu" if setting.device == "cuda" else "cpu", precision=precision, logger=False,
            callbacks=[callback, Unsaved()], enable_progress_bar=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(algorithm, data)
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise KeyboardInterrupt
    seconds = statistics.median(sum(seconds.values()) for seconds in callback.rounds)
    return float(seconds)


class PflCnn(nn.Module):
    """The CNN of pfl's CIFAR-10 benchmark: two 3x3 convolutions, pooling, a hidden layer; 1,626,442 parameters."""

    def __init__(self, num_classes: int = 10, in_shape: tuple[int, int, int] = (3, 32, 32)) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.hidden, self.classifier = nn.Linear(64 * 14 * 14, 128), nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)``."""
        x = F.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        logits: Tensor = self.classifier(self.hidden(x.flatten(1)).relu())
        return logits


class RoundTimes(FederatedCallback):
    """Seconds of rounds without evaluation, waiting for the device at their borders."""

    def __init__(self, device: str, first: int) -> None:
        self.device, self.first = device, first
        self.rounds: list[Counter[str]] = []
        self.since = 0.0

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        """A round begins."""
        wait(self.device)
        now = time.perf_counter()
        if trainer.round_index > self.first:
            self.rounds.append(Counter({"round": now - self.since}))
        self.since = now


def pfl(setting: Setting) -> None:
    """FedAvg in pfl's setting: 1000 clients with 50 images, 50 in a round, batches of 10, one epoch, SGD at 0.1."""
    for name, engine in whole_runs(3 if setting.tiny else 50):
        title = f"{name}, 32-true"
        setting.attempt("pfl", title, partial(measure_pfl, setting, title, engine))


def measure_pfl(setting: Setting, title: str, engine: Engine) -> None:
    """One engine's rounds."""
    clients, cohort, images = (10, 3, 20) if setting.tiny else (1000, 50, 50)
    callback = RoundTimes(setting.device, 1 if setting.tiny else 20)
    algorithm = FedAvg(
        network=PflCnn, optimizer=partial(sgd, lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0),
        client_epochs=1, num_classes=10, in_shape=(3, 32, 32),
    )  # fmt: skip
    data = RandomImages(
        images * clients, 100, num_clients=clients, num_labels="all", label_location="clients", validation=0,
        weak="none",
    )  # fmt: skip
    seconds = run(setting, algorithm, data, cohort, engine, "32-true", callback)
    setting.note("pfl", f"{title}: a round", seconds, "s")
    setting.note("pfl", f"{title}: 1500 rounds, projected, without tests", 1500 * seconds, "s")


# The report.


def write_report(output: Path, drawn: bool = False) -> None:
    """Make ``gpu.md`` from ``gpu.csv``, and ``gpu.png``; of a case that was measured again the last row counts."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    with (output / "gpu.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place, part, case = row["device"], row["part"], row["case"]
            rows.pop((place, part, case.partition(":")[0] + FAILED), None)  # it was measured again later
            rows[place, part, case] = row
    lines = ["# On a GPU", "", __doc__.split("\n\n")[1], ""]
    for device in dict.fromkeys(device for device, _, _ in rows):
        for part in PARTS:
            chosen = [row for (where, what, _), row in rows.items() if (where, what) == (device, part)]
            if not chosen:
                continue
            lines += [f"## {part}, {device}, torch {chosen[0]['torch']}", ""]
            lines += ["| case | measured | unit | estimated before, for an H200 |", "|---|---|---|---|"]
            for row in chosen:
                estimate = PREDICTED.get((part, row["case"]), "")
                lines.append(f"| {row['case']} | {row['value']} | {row['unit']} | {estimate} |")
            lines.append("")
    (output / "gpu.md").write_text("\n".join(lines), encoding="utf-8")
    if drawn:
        draw_curve([row for (_, part, _), row in rows.items() if part == "curve"], output / "gpu.png")


def draw_curve(rows: list[dict[str, str]], path: Path) -> None:
    """Client steps per second over the clients trained at once, where matplotlib is installed."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        title, _, number = row["case"].rpartition(", ")
        if number.endswith(" at once"):
            lines.setdefault(f"{title} ({row['device']})", []).append((int(number.split()[0]), float(row["value"])))
    if not lines:
        return
    try:
        figure, axes = command_line.new_figure("WRN-28-2, batches of 10, two passes a step", "client steps per second")
    except ImportError:
        return
    for title, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=title)
    axes.set(xlabel="clients trained at once", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


RUN: dict[str, Callable[[Setting], None]] = {
    "agree": agree, "ceilings": ceilings, "engines": engines, "curve": curve, "round": round_, "pfl": pfl,
}  # fmt: skip


def run_part(setting: Setting, part: str) -> None:
    """Measure a part, and draw the results."""
    RUN[part](setting)
    if (setting.output / "gpu.csv").exists():
        write_report(setting.output, drawn=True)


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure, in order")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=400,
        help="no measurement begins later than these seconds",
    )
    parser.add_argument("--repeats", type=int, default=5, help="measurements of a case; the median counts")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what gpu.csv holds; exit code 3: not all is done"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--output", type=Path, default=command_line.RESULTS, help="folder of gpu.csv, .md and .png")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device: give --device cpu --tiny to try the script")
    setting = Setting(
        given.device, given.tiny, __started__ + given.budget_s, given.output, given.repeats, resume=given.resume
    )
    for part in given.part:
        setting.attempt(part, "whole part", partial(run_part, setting, part))
    if setting.failed:
        sys.exit("failed: " + "; ".join(setting.failed))
    if given.resume and setting.unfinished:
        print("not all is done; ask again for: " + "; ".join(setting.unfinished), flush=True)
        sys.exit(3)


if __name__ == "__main__":
    gc.freeze()  # what the imports made stays, and need not be searched after each measurement
    main()
