"""What a GPU does: agreement with the CPU, client steps per second, a SemiFL round by phases, pfl's CIFAR-10 setting.

Every part takes at most ``--budget-s`` seconds; each measurement is appended to ``gpu.csv`` as soon as it is made, and
``gpu.md`` (after a part ``gpu.png``, too) is made anew from all that is there. Images are random and no file is read,
so that the script runs on any machine with PyTorch, Lightning and a GPU, without a network; with the threshold 0 every
image is trained on, which is the most that a round can cost.

    python benchmarks/gpu.py --part agree ceilings engines
    python benchmarks/gpu.py --part curve
    python benchmarks/gpu.py --part round pfl
    python benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import torch
from engines import BATCH, Nobody, ReadyBatches
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.augment import make_views
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.hooks import FederatedCallback
from lightning_fedssl.local_training import sequential, vectorized
from lightning_fedssl.local_training.fixed_memory import FixedMemory
from lightning_fedssl.models import WideResNet
from lightning_fedssl.state import ServerState
from lightning_fedssl.trainer import FederatedTrainer

PARTS = ("agree", "ceilings", "engines", "curve", "round", "pfl")
BYTES_PER_IMAGE = {"32-true": 45.8e6, "bf16-mixed": 22.9e6}
"""WRN-28-2 forward and backward with unfused kernels, counted by hand: 21.5 passes over 1.06 M values of an image."""

PREDICTED = {
    ("agree", "float64, vectorised against sequential"): "1e-11 or better",
    ("engines", "sequential, 32-true"): "80 to 200",
    ("engines", "vectorised, 32-true"): "700 to 2,000",
    ("engines", "vectorised graph, 32-true"): "6,000 to 10,000",
    ("engines", "sequential graph, 32-true"): "700 to 1,000",
    ("round", "vectorised graph, bf16-mixed: whole round"): "0.5 to 0.8",
    ("round", "vectorised graph, bf16-mixed: statistics"): "0.11",
    ("round", "vectorised graph, bf16-mixed: server"): "0.11",
    ("pfl", "vectorised graph, 32-true: a round"): "0.005 to 0.015",
}
"""Estimates by arithmetic for an H200, made before anything was measured."""

Engine = tuple[str, int, bool]
"""Name, clients in a stack, and whether steps are recorded."""


@dataclass(frozen=True)
class Setting:
    """What the command line asks for.

    Attributes:
        device: ``cuda`` or ``cpu``.
        tiny: Sizes for a trial on a CPU.
        deadline: When to stop, on ``time.monotonic``'s clock.
        output: Where results are written.
        repeats: Measurements of each case; the median counts.
    """

    device: str
    tiny: bool
    deadline: float
    output: Path
    repeats: int

    def network(self) -> Callable[..., nn.Module]:
        """WRN-28-2 with static batch norm."""
        return functools.partial(
            WideResNet, depth=10 if self.tiny else 28, widen_factor=1 if self.tiny else 2, norm="static_batch"
        )

    def time_left(self) -> bool:
        """Whether another measurement may begin."""
        return time.monotonic() < self.deadline

    def note(self, part: str, case: str, value: float, unit: str) -> None:
        """Append a measurement, and write the report anew."""
        place = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        row = {"part": part, "case": case, "value": f"{value:.6g}", "unit": unit, "device": place}
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
        # The rate is one that 32 bits hold: a recorded step reads it so.
        settings: dict[str, Any] = {"lr": 2**-5, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "fused": True}
        self.optimizer = torch.optim.SGD(self.algorithm.parameters(), **settings)
        self.steps, self.number = steps, clients
        self.clients = [no_data(client, setting.device) for client in range(clients)]
        self.memory: FixedMemory | None = None

    def train(self, engine: Engine) -> Tensor:
        """A round; what the clients return, ``(clients, weights)``."""
        name, at_once, recorded = engine
        arguments = (self.algorithm, self.clients, self.optimizer, self.fabric, Nobody())
        if name == "sequential" and not recorded:
            updates = sequential.train_clients(*arguments)
        else:
            if recorded and self.memory is None:
                self.memory = FixedMemory(at_once)
            updates = vectorized.train_clients(*arguments, clients_at_once=at_once, trainer=self.memory)
        return torch.stack([torch.cat([t.flatten() for t in update.parameters.values()]) for update in updates])

    def seconds(self, engine: Engine, setting: Setting) -> float:
        """Median time of a round, after one that does what is done once."""
        self.train(engine)
        return statistics.median(timed(lambda: self.train(engine), setting.device) for _ in range(setting.repeats))


def no_data(client: int, device: str) -> LocalData:
    """A client without images of its own."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8, device=device)
    spec = DatasetSpec("cifar10", 10, (3, 8, 8), (0.5,) * 3, (0.25,) * 3, tuple("0123456789"))
    return LocalData(client, 1, 0, images, none, none, none, BATCH, make_views(spec, weak="none", strong="none"))


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds of a call, with all that the device does for it."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """TensorFloat-32 in matrix products and convolutions, or not."""
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
    expected = Case(setting, 4, "64-true", steps).train(("sequential", 1, False))
    for title, engine in (("vectorised", ("vectorised", 4, False)), ("graph", ("vectorised", 4, True))):
        found = Case(setting, 4, "64-true", steps).train(engine)
        difference = float((found - expected).abs().max())
        setting.note("agree", f"float64, {title} against sequential", difference, "largest difference")
    here = Setting("cpu", setting.tiny, setting.deadline, setting.output, 1)
    for precision, steps in (("64-true", 2), ("32-true", 1)):
        with tf32(False):
            pair = [Case(place, 2, precision, steps).train(("sequential", 1, False)) for place in (here, setting)]
        difference = float((pair[0] - pair[1].cpu()).abs().max())
        setting.note("agree", f"{precision}, device against CPU, {steps} step(s)", difference, "largest difference")


def ceilings(setting: Setting) -> None:
    """What a copy and a matrix product reach."""
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
            seconds = statistics.median(timed(functools.partial(torch.matmul, a, b), setting.device) for _ in range(10))
        setting.note("ceilings", f"{side} x {side} product, {title}", 2 * side**3 / seconds / 1e12, "TFLOP/s")


def engines_of(clients: int) -> dict[str, Engine]:
    """The rival designs."""
    return {
        "sequential": ("sequential", 1, False),
        "sequential graph": ("sequential", 1, True),
        "vectorised": ("vectorised", clients, False),
        "vectorised graph": ("vectorised", clients, True),
    }


def engines(setting: Setting) -> None:
    """Client steps per second of ten clients; TF32 is allowed, as its rounding is below the gradients' noise."""
    clients = 3 if setting.tiny else 10
    for precision in ("32-true", "bf16-mixed"):
        for title, engine in engines_of(clients).items():
            if setting.time_left():
                measure_engine(setting, f"{title}, {precision}", clients, engine, precision)
        for form in ("compiled", "channels-last"):
            if setting.time_left() and not (setting.tiny and form == "compiled"):
                measure_engine(
                    setting, f"sequential {form}, {precision}", clients, ("sequential", 1, False), precision, form
                )


def measure_engine(
    setting: Setting, title: str, clients: int, engine: Engine, precision: str, form: str = "", part: str = "engines"
) -> None:
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
    """Client steps per second over the clients trained at once."""
    for number in (1, 2, 3) if setting.tiny else (1, 2, 5, 10, 20, 40, 100):
        for precision in ("32-true", "bf16-mixed"):
            for title, recorded in (("vectorised", False), ("vectorised graph", True)):
                if setting.time_left():
                    engine = ("vectorised", number, recorded)
                    measure_engine(
                        setting, f"{title}, {precision}, {number} at once", number, engine, precision, part="curve"
                    )


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


class Phases(StaticBatchNorm):  # type: ignore[misc]
    """Seconds of each phase of a round; the device is waited for at every border.

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
        """The time since the last border was this phase's."""
        wait(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.since  # type: ignore[assignment]
        self.since = now

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        """A round begins."""
        self.mark("saving and logging")
        if trainer.round_index > self.first:
            self.rounds.append(self.seconds)
        self.seconds = Counter()

    def on_fit_end(self, trainer: Any, algorithm: Any) -> None:
        """The last round's phases."""
        self.rounds.append(self.seconds)

    def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
        """Statistics are of the phase of their own."""
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
    """SemiFL that notes what labelling takes.

    Args:
        phases: Where it is noted.
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
    """SemiFL's optimizer, with the kernel that a recorded step needs."""
    settings = {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4} | more
    return torch.optim.SGD(parameters, fused=True, **settings)


def round_(setting: Setting) -> None:
    """Rounds of SemiFL on CIFAR-10 with 4,000 labels, by phases: 10 of 100 clients, five local epochs."""
    clients, cohort = (4, 2) if setting.tiny else (100, 10)
    train, test, labels = (200, 50, 20) if setting.tiny else (50_000, 10_000, 4_000)
    for precision in ("32-true", "bf16-mixed"):
        for title, (_, at_once, recorded) in engines_of(cohort).items():
            if (recorded and at_once == 1) or not setting.time_left() or (setting.tiny and precision != "32-true"):
                continue
            phases = Phases(setting.device, 1 if at_once == 1 else 2, source="pooled")
            epochs = 1 if setting.tiny else 5
            algorithm = TimedSemiFL(
                phases, network=setting.network(), optimizer=sgd, threshold=0.0, client_epochs=epochs,
                server_epochs=epochs, num_classes=10, in_shape=(3, 32, 32),
            )  # fmt: skip
            data = RandomImages(
                train, test, num_clients=clients, num_labels=labels, server_batch_size=250, strong="semifl",
                validation="test",
            )  # fmt: skip
            whole = run(setting, algorithm, data, cohort, at_once, recorded, precision, phases)
            setting.note("round", f"{title}, {precision}: whole round", whole, "s")
            for phase in ("statistics", "labels", "clients", "average", "server", "test", "saving and logging"):
                median = statistics.median(seconds[phase] for seconds in phases.rounds)
                setting.note("round", f"{title}, {precision}: {phase}", median, "s")


def run(
    setting: Setting, algorithm: Any, data: FederatedDataModule, cohort: int, at_once: int, recorded: bool,
    precision: Any, callback: Any,
) -> float:  # fmt: skip
    """Train for some rounds; the median of their seconds."""
    rounds = callback.first + (2 if setting.tiny else 3)
    with tempfile.TemporaryDirectory() as folder, tf32(True):
        trainer = FederatedTrainer(
            max_rounds=rounds, clients_per_round=cohort, clients_at_once=at_once, cuda_graphs=recorded,
            accelerator="gpu" if setting.device == "cuda" else "cpu", precision=precision, logger=False,
            callbacks=[callback, FederatedCheckpoint(every_n_rounds=10**6)], enable_progress_bar=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(algorithm, data)
    return float(statistics.median(sum(seconds.values()) for seconds in callback.rounds))


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
    clients, cohort = (10, 3) if setting.tiny else (1000, 50)
    for title, (_, at_once, recorded) in engines_of(cohort).items():
        if (recorded and at_once == 1) or not setting.time_left():
            continue
        callback = RoundTimes(setting.device, 1 if setting.tiny else 20)
        algorithm = FedAvg(
            network=PflCnn, optimizer=functools.partial(sgd, lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0),
            client_epochs=1, num_classes=10, in_shape=(3, 32, 32),
        )  # fmt: skip
        data = RandomImages(
            50 * clients,
            100,
            num_clients=clients,
            num_labels="all",
            label_location="clients",
            validation=0,
            weak="none",
        )
        seconds = run(setting, algorithm, data, cohort, at_once, recorded, "32-true", callback)
        setting.note("pfl", f"{title}, 32-true: a round", seconds, "s")
        setting.note("pfl", f"{title}, 32-true: 1500 rounds, projected, without tests", 1500 * seconds, "s")


# The report.


def write_report(output: Path, drawn: bool = False) -> None:
    """Make ``gpu.md`` from ``gpu.csv``, and ``gpu.png``; of a case that was measured again the last row counts."""
    with (output / "gpu.csv").open(newline="", encoding="utf-8") as file:
        rows = {(row["device"], row["part"], row["case"]): row for row in csv.DictReader(file)}
    lines = ["# On a GPU", "", *__doc__.splitlines()[2:6], ""]
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


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, help="what to measure, in order")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where")
    parser.add_argument("--budget-s", type=float, default=540, help="seconds after which no measurement begins")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of a case; the median counts")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--output", type=Path, default=command_line.RESULTS, help="folder of gpu.csv, .md and .png")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device: give --device cpu --tiny to try the script")
    setting = Setting(given.device, given.tiny, time.monotonic() + given.budget_s, given.output, given.repeats)
    for part in given.part:
        if setting.time_left():
            RUN[part](setting)
            write_report(setting.output, drawn=True)
        else:
            print(f"{part}: no time left; ask for it alone", flush=True)


if __name__ == "__main__":
    main()
