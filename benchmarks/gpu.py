"""What a GPU makes of this package: agreement with the CPU, its own limits, and rounds of the papers by phase.

Images are random and no file is read. With threshold 0 every image is trained on, so that all clients of a round have
batches of the same shapes. In a real run they differ: the designs with *shares* draw the confident part of each
client's images from Beta(40, 3), 93 % in the mean, or Beta(4, 2), 67 %. Every measurement is written to a CSV file at
once; one that is there is not measured again, and one that fails leaves its traceback while the others go on. The
parts: ``kernels`` lists the kernels of SemiFL's stacked steps by time, ``rounds`` trains two rounds of published
configurations and times the second, ``limits`` measures launches, matrix products, a step of ten clients and ways to
convolve, ``agree`` compares weights with the CPU's.

    python benchmarks/gpu.py --output runs/gpu                             # about 8 minutes of a GPU
    python benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu         # every part, small
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from lightning_fedssl import Experiment, FederatedDataModule, FederatedTrainer, SemiFL
from lightning_fedssl.algorithms.semifl import GlobalLabels
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data import datasets
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.stacked_layers import StackedLayers
from lightning_fedssl.local_training import sequential, split_learning, vectorized
from lightning_fedssl.models import CNN, WideResNet
from lightning_fedssl.trainer import evaluation

SMALL_NETWORK = {"model.network.init_args.depth": 10, "model.network.init_args.widen_factor": 1}
ROUNDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "semifl_cifar10_4000.yaml": ({}, {**SMALL_NETWORK, "model.client_epochs": 1, "model.server_epochs": 1}),
    "fedrgd_cifar10_labels_at_clients.yaml": ({}, {"model.network.width": 8, "model.local_steps": 4}),
    "semisfl_cifar10_4000.yaml": ({}, {"model.network.width": 4, "model.client_steps": 4, "model.server_steps": 4}),
    "sage_cifar10.yaml": ({}, {"model.client_epochs": 1}),
    "fedshvr_mnist_iid.yaml": ({}, {"model.network.hidden": [50]}),
}
"""The configurations, what differs in all runs, and what also differs in tiny ones."""

_STACKED = {"FEDSSL_RECORD": "1", "trainer.clients_at_once": 10}
_CHANNELS_LAST = {**_STACKED, "trainer.channels_last": True}
_BF16 = {**_CHANNELS_LAST, "trainer.precision": "bf16-mixed"}
DESIGNS: dict[str, dict[str, Any]] = {
    "stacked, recorded": _STACKED,
    "stacked": {**_STACKED, "FEDSSL_RECORD": "0"},
    "one by one, recorded": {**_STACKED, "trainer.clients_at_once": 1},
    "stacked, recorded, channels last": _CHANNELS_LAST,
    "stacked, recorded, bf16, channels last": _BF16,
    "stacked, recorded, bf16, channels last, timed kernels": _BF16,
    "one by one, recorded, bf16, channels last": {**_BF16, "trainer.clients_at_once": 1},
    "stacked, recorded, bf16, channels last, shares Beta(40, 3)": {**_BF16, "shares": (40, 3)},
    "stacked, recorded, bf16, channels last, shares Beta(4, 2)": {**_BF16, "shares": (4, 2)},
}
"""The ways to train the clients of a round. *Timed kernels*: cuDNN tries kernels and takes the fastest."""

PHASES: list[tuple[Any, str, str]] = [
    (GlobalLabels, "label_images", "labels"),
    (LocalData, "_view", "views"),
    (StaticBatchNorm, "_refresh", "batch norm"),
    (vectorized, "_trained", "stacked steps"),
    (sequential.Loop, "train", "steps of one party"),
    (split_learning, "train_jointly", "joint steps"),
    (evaluation, "evaluate", "evaluation"),
]
"""Functions and the phases that they are; what they call in another phase counts there."""


class Phases(FederatedCallback):
    """What passes in each phase of the last round, by a reading that grows, such as seconds."""

    def __init__(self, reading: Callable[[], float]) -> None:
        self.reading = reading
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.inside = ["rest"]
        self.before = 0.0

    def switch(self) -> None:
        """What has passed belongs to the present phase."""
        now = self.reading()
        self.spent[self.inside[-1]] += now - self.before
        self.before = now

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        """Begin anew."""
        self.switch()
        self.spent.clear()

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """End the round."""
        self.switch()
        self.result = dict(self.spent)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the functions of :data:`PHASES` switch to their phases."""
        with ExitStack() as stack:
            for owner, name, phase in PHASES:
                stack.enter_context(mock.patch.object(owner, name, self._wrapped(getattr(owner, name), phase)))
            yield

    def _wrapped(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def new(*arguments: Any, **more: Any) -> Any:
            self.switch()
            self.inside.append(phase)
            try:
                return function(*arguments, **more)
            finally:
                self.switch()
                self.inside.pop()

        return new


def seconds() -> float:
    """The time when all that was launched has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def random_images(sizes: tuple[int, int], spec: Any, chosen: Any, root: Any, download: bool) -> datasets.ImageSplit:
    """A split of a data set with random pixels: the first call is for the training split."""
    number = sizes[0] if chosen is datasets._SOURCES[spec.name].train else sizes[1]
    labels = torch.arange(number) % spec.num_classes
    return datasets.ImageSplit(torch.randint(256, (number, *spec.in_shape), dtype=torch.uint8), labels)


def partly_confident(label: Callable[..., Any], shares: tuple[float, float]) -> Callable[..., Any]:
    """The function that labels a client's images, confident for a part that is drawn from a beta distribution."""

    def label_images(algorithm: Any, data: LocalData) -> Any:
        found = label(algorithm, data)
        drawn = data.rng("share of confident images")
        found.mask.copy_(torch.from_numpy(drawn.random(len(found.mask)) < drawn.beta(*shares)))
        return found

    return label_images


def measured_round(config: str, design: str, device: str, tiny: bool, **keys: Any) -> dict[str, float]:
    """The phases of the second round of a configuration, with further keys of the model."""
    always, small = ROUNDS[config]
    shared = {key: value for key, value in DESIGNS[design].items() if "." in key}
    sizes = (600, 60) if tiny else (60000 if "mnist" in config else 50000, 10000)
    few = {"num_labels": 120, "num_clients": 6, "server_batch_size": 40}
    labels = {"trainer.clients_per_round": 3, **{f"data.{name}": value for name, value in few.items()}}
    of_model = {f"model.{name}": value for name, value in keys.items()}
    chosen = {**always, **shared, **({**labels, **small} if tiny else {}), **of_model}
    phases = Phases(seconds)
    torch.backends.cudnn.benchmark = design.endswith("timed kernels")
    environment = {"FEDSSL_RECORD": DESIGNS[design]["FEDSSL_RECORD"]}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(mock.patch.dict(os.environ, environment))
        stack.enter_context(mock.patch.object(datasets, "_read_torchvision", partial(random_images, sizes)))
        if "shares" in DESIGNS[design]:
            some = partly_confident(GlobalLabels.label_images, DESIGNS[design]["shares"])
            stack.enter_context(mock.patch.object(GlobalLabels, "label_images", some))
        more = {"trainer.max_rounds": 2, "trainer.accelerator": device, "trainer.devices": 1, "trainer.logger": False,
                "trainer.enable_progress_bar": False, "trainer.default_root_dir": folder}  # fmt: skip
        trainer, model, data = Experiment.from_config(config, {**more, **chosen})
        if hasattr(model, "threshold"):
            vars(model)["threshold"] = 0.0
        trainer.given_callbacks = [*trainer.given_callbacks, phases]
        stack.enter_context(phases.watching())
        trainer.fit(model, data)
    return phases.result


Cases = Iterator[tuple[tuple[str, str, str], Callable[[], str]]]
"""The names of each measurement, and what measures it: rows in lines, their cells between ``|``."""


def name_of(device: str) -> str:
    """The card, or CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def kernels(device: str, tiny: bool) -> Cases:
    """The kernels of 12 steps of ten stacked clients, the slowest first, in the second round of SemiFL."""
    own, activity = "self_cpu_time_total", torch.profiler.ProfilerActivity.CPU
    if device == "cuda":
        own, activity = "self_device_time_total", torch.profiler.ProfilerActivity.CUDA
    train, calls = vectorized._trained, []

    def watched(*arguments: Any) -> Any:
        began = seconds()
        with torch.profiler.profile(activities=[activity]) as profile:
            trained = train(*arguments)
            took = seconds() - began
        calls.append((took, profile.key_averages()))
        return trained

    def measure(config: str, design: str) -> str:
        with mock.patch.object(vectorized, "_trained", watched):
            measured_round(config, design, device, tiny, client_epochs=0.25, server_epochs=0.1)
        took, events = calls[-1]
        each = sorted(((getattr(e, own) / 1e3, e.count, e.key) for e in events if getattr(e, own)), reverse=True)
        everything = (sum(e[0] for e in each), sum(e[1] for e in each), f"all, in {1e3 * took:.1f} ms of wall time")
        return "\n".join(f"{ms:.3f} ms|{number}|{name[:90]}" for ms, number, name in [everything, *each[:50]])

    config = "semifl_cifar10_4000.yaml"
    for design in ("stacked, recorded", "stacked, recorded, bf16, channels last"):
        yield (config.removesuffix(".yaml"), design, name_of(device)), partial(measure, config, design)


def rounds(device: str, tiny: bool) -> Cases:
    """Rounds of the configurations: all by the first design, then each by the others."""

    def measure(config: str, design: str) -> str:
        found = measured_round(config, design, device, tiny)
        if device == "cuda":
            torch.cuda.empty_cache()
        parts = "; ".join(f"{name} {value:.3f}" for name, value in found.items())
        return f"{sum(found.values()):.3f} s a round|{parts}"

    first, *others = DESIGNS
    chosen = [(config, first) for config in ROUNDS]
    of_shares = [design for design in others if "shares" in DESIGNS[design]]
    chosen += [("semifl_cifar10_4000.yaml", design) for design in of_shares]
    chosen += [(config, design) for config in ROUNDS for design in others if design not in of_shares]
    for config, design in chosen:
        yield (config.removesuffix(".yaml"), design, name_of(device)), partial(measure, config, design)


def trained(device: str, precision: str, at_once: int) -> SemiFL:
    """SemiFL after a round: 4 of 5 clients with 20 images each."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5 * 20 + 250 + 100) % 10
    pixels = torch.randint(256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
    data = FederatedDataModule.from_datasets(
        (pixels[:-100], labels[:-100]), (pixels[-100:], labels[-100:]), validation=0.0,
        weak="flip_crop", strong="semifl", num_clients=5, num_labels=250, server_batch_size=250,
    )  # fmt: skip
    sgd = partial(torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=5e-4)
    network = partial(CNN, width=4)
    algorithm = SemiFL(network=network, optimizer=sgd, threshold=0.0, client_epochs=1, server_epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            max_rounds=1, clients_per_round=4, accelerator=device, devices=1, precision=precision,
            clients_at_once=at_once, logger=False, enable_progress_bar=False, default_root_dir=folder,
        ).fit(algorithm, data)  # fmt: skip
    return algorithm


def agree(device: str, tiny: bool) -> Cases:
    """The largest difference of a weight to the CPU's."""

    def measure(precision: str, at_once: int) -> str:
        theirs = trained("cpu", "64-true" if precision == "64-true" else "32-true", 1).server.model()
        here = trained(device, precision, at_once).server.model()
        far = max(float((t.cpu().double() - theirs[n].double()).abs().max()) for n, t in here.items())
        return f"largest difference of a weight {far:.1e}"

    for precision, at_once in (("64-true", 10), ("32-true", 1), ("bf16-mixed", 1)):
        yield ("agree", precision, str(at_once)), partial(measure, precision, at_once)


def milliseconds(function: Callable[[], object], repeat: int = 10) -> float:
    """The median time of a call."""
    times = []
    for _ in range(3 + repeat if torch.cuda.is_available() else 2):
        began = seconds()
        function()
        times.append(1e3 * (seconds() - began))
    return statistics.median(times[-repeat:])


def recorded(function: Callable[[], object], device: str) -> Callable[[], object]:
    """The replay of a CUDA graph of a call; on the CPU the call."""
    if device == "cpu":
        return function
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def step_of(clients: int, images: int, side: int, device: str, small: bool) -> Callable[[], object]:
    """A step of WRN-28-2 with two passes of a batch, for stacked clients."""
    network = WideResNet(depth=10 if small else 28, widen_factor=1 if small else 2, norm="static_batch").to(device)
    names = [name for name, _ in network.named_parameters()]
    shape = (clients, images, 3, side, side)
    x, y = torch.randn(shape, device=device), torch.randint(10, (clients, images), device=device)
    weights = [p.expand(clients, *p.shape).clone().detach().requires_grad_() for p in network.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.03, momentum=0.9, weight_decay=5e-4, fused=True)

    def loss(weights: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        logits = [functional_call(network, given, (x,)), functional_call(network, given, (x.flip(-1),))]
        return F.cross_entropy(logits[0], y) + F.cross_entropy(logits[1], y)

    def step() -> None:
        optimizer.zero_grad()
        with StackedLayers():
            vmap(loss)(weights, x, y).sum().backward()
        optimizer.step()

    return step


def convolve(last: bool, clients: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> float:
    """Milliseconds of 3 x 3 convolutions of several clients with 10 images, there and back, a group for each client."""
    channels_in, channels, side = shape
    weight = torch.randn(clients * channels, channels_in, 3, 3, device=device, dtype=dtype, requires_grad=True)
    x = torch.randn(10, clients * channels_in, side, side, device=device, dtype=dtype)
    x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()

    def call() -> None:
        out = F.conv2d(x, weight, padding=1, groups=clients)
        torch.autograd.grad(out, (x, weight), torch.ones_like(out))

    return milliseconds(recorded(call, device))


def limits(device: str, tiny: bool) -> Cases:
    """What bounds a round: launches, arithmetic, and ways to step and to convolve ten clients."""
    clients, images, side, size = (3, 4, 8, 256) if tiny else (10, 10, 32, 8192)
    number = torch.zeros(64, device=device)

    def launches(how: Callable[[Callable[[], object], str], Callable[[], object]]) -> str:
        def many() -> None:
            for _ in range(1000):
                number.add_(1)

        return f"{milliseconds(how(many, device)):.2f} us a launch"

    def product(dtype: torch.dtype, tf32: bool) -> str:
        a = torch.randn(size, size, device=device, dtype=dtype)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        return f"{2 * size**3 / milliseconds(lambda: a @ a) / 1e9:.1f} TFLOP/s"

    def steps(graph: bool) -> str:
        step = step_of(clients, images, side, device, tiny)
        return f"{milliseconds(recorded(step, device) if graph else step):.3f} ms"

    def convolutions(last: bool, shape: tuple[int, int, int], dtype: torch.dtype) -> str:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        return f"{convolve(last, clients, shape, dtype, device):.3f} ms"

    yield ("launch", "eager", ""), partial(launches, lambda function, device: function)
    yield ("launch", "graph", ""), partial(launches, recorded)
    for name, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32), ("fp32", torch.float32)):
        yield ("matrix product", name, ""), partial(product, dtype, name != "fp32")
    for graph in ("graph", "eager"):
        yield ("step of ten clients", "stacked", graph), partial(steps, graph == "graph")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3, 16, side), (32, 32, side), (64, 64, side // 2), (128, 128, side // 4)):
            for way in ("grouped", "grouped, channels last"):
                what = f"{shape[0]} to {shape[1]} at {shape[2]}"
                yield ("convolution " + what, way, str(dtype)[6:]), partial(convolutions, "last" in way, shape, dtype)


PARTS = {
    "kernels": (kernels, "gpu_kernels.csv"),
    "rounds": (rounds, "gpu_rounds.csv"),
    "limits": (limits, "gpu_limits.csv"),
    "agree": (agree, "gpu.csv"),
}


def main() -> int:
    """Measure what is missing; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a trial")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--budget", type=float, default=480, help="seconds after which nothing further begins")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device: --device cpu --tiny tries every part")
    options.output.mkdir(parents=True, exist_ok=True)
    failed, began = False, time.monotonic()
    for make, file in (PARTS[part] for part in options.parts):
        path = options.output / file
        known = [tuple(row[:3]) for row in csv.reader(path.read_text().splitlines())] if path.is_file() else []
        for case, measure in make(options.device, options.tiny):
            if case in known or time.monotonic() - began > options.budget:
                continue
            try:
                result = measure()
            except Exception:
                traceback.print_exc()
                failed = True
                continue
            with path.open("a", newline="") as table:
                rows = [[*case, *row.split("|")] for row in result.splitlines()]
                csv.writer(table, lineterminator="\n").writerows(rows)
            print(*case, result, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
