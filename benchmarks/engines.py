"""Client steps per second of the two local trainers: sequential, and vectorized over all clients of a round.

Ten clients train on batches of ten prepared images with SemiFL's loss (two forward passes), gradient clipping and
Nesterov SGD. Runs of the two trainers alternate, so that other load on the machine affects both; the ratio is the
result. On a GPU a small step waits for kernel launches, so the table also shows the number of operations that a step
dispatches, without views. Before the measurements, both trainers must give the same weights in float64.

    python benchmarks/engines.py --rounds 5
    python benchmarks/engines.py --device cuda --networks wrn-28-2
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import command_line
import torch
from command_line import RESULTS
from lightning.fabric import Fabric
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_training import sequential, vectorized
from lightning_fedssl.local_training.sequential import NoObserver
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN, MLP, WideResNet
from lightning_fedssl.state import Batch, ClientUpdate, ServerState
from lightning_fedssl.trainer.setup import prefer_fused

CLIENTS = 10
BATCH = 10
CLASSES = 10
TOLERANCE = 1e-10
"""The largest accepted difference of a weight between the local trainers in float64."""

NETWORKS: dict[str, tuple[Callable[..., nn.Module], tuple[int, int, int], int]] = {
    "cnn": (functools.partial(CNN, norm="static_batch"), (3, 32, 32), 8),
    "wrn-28-2": (functools.partial(WideResNet, norm="static_batch"), (3, 32, 32), 2),
    "mlp": (functools.partial(MLP, hidden=(200, 200)), (1, 28, 28), 40),
    "small mlp": (functools.partial(MLP, hidden=(64,)), (1, 8, 8), 200),
    "softmax": (functools.partial(MLP, hidden=()), (3, 32, 32), 100),
}
"""Network, shape of an image, and steps of a client in one measurement."""


class ReadyBatches(SemiFL):
    """SemiFL whose clients train a fixed number of steps on one prepared batch each.

    Args:
        steps: Steps of a client.
        dtype: The floating type of the images.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(self, steps: int, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(
            optimizer=lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4),
            num_classes=CLASSES,
            keep_client_optimizer=False,
            **kwargs,
        )
        self.steps = steps
        self.image_dtype = dtype
        self.batches: dict[int, Batch] = {}

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Local work that repeats the client's prepared batch."""
        if data.party not in self.batches:
            self.batches[data.party] = self._random_batch(data.party)
        batch = self.batches[data.party]
        return LocalWork(self.steps * BATCH, self.steps, lambda step: batch)

    def _random_batch(self, client: int) -> Batch:
        generator = torch.Generator().manual_seed(client)
        assert self.in_shape is not None
        images = {n: torch.randn(BATCH, *self.in_shape, generator=generator) for n in ("x_strong", "x_weak", "x_mix")}
        labels = {n: torch.randint(CLASSES, (BATCH,), generator=generator) for n in ("y_fix", "y_mix")}
        floats = {name: t.to(self.image_dtype) for name, t in images.items()}
        ratio = torch.rand(1, generator=generator).expand(BATCH).to(self.image_dtype)
        return {name: t.to(self.device) for name, t in {**floats, **labels, "ratio": ratio}.items()}


class Operations(TorchDispatchMode):
    """Counts dispatched operations except views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.count += not (func.is_view or func.name() in ("aten::_unsafe_view", "aten::detach"))
        return func(*args, **(kwargs or {}))


class Case:
    """A network, its clients and both local trainers.

    Args:
        name: One of :data:`NETWORKS`.
        device: ``cpu`` or ``cuda``.
        dtype: The floating type of weights and images.
        steps: Steps of a client; the network's usual number if left out.
    """

    def __init__(self, name: str, device: str, dtype: torch.dtype = torch.float32, steps: int | None = None) -> None:
        network, in_shape, usual = NETWORKS[name]
        self.steps = steps or usual
        self.algorithm = ReadyBatches(self.steps, dtype, network=network, in_shape=in_shape)
        self.algorithm.collector = lambda name, value, weight: None
        self.algorithm.configure_model()
        self.algorithm.to(device, dtype)
        self.algorithm.server = ServerState.of(self.algorithm)
        self.fabric = Fabric(accelerator=device, devices=1, precision="64-true" if dtype.itemsize == 8 else "32-true")
        self.optimizer = prefer_fused(self.algorithm.optimizer_factory(self.algorithm.parameters()))
        data = FederatedDataModule("digits", num_clients=CLIENTS, validation=0)
        data.setup("fit")
        self.clients = [data.local_data(client, 1) for client in range(CLIENTS)]

    def updates(self, together: bool, max_steps: int | None = None) -> Iterator[ClientUpdate]:
        """One round."""
        arguments = (self.algorithm, self.clients, self.optimizer, self.fabric, NoObserver(), max_steps)
        if together:
            return vectorized.train_clients(*arguments)
        return sequential.train_clients(*arguments)

    def weights(self, together: bool) -> torch.Tensor:
        """The clients' weights after one round, ``(clients, weights)``."""
        rows = [torch.cat([t.flatten() for t in u.parameters.values()]) for u in self.updates(together)]
        return torch.stack(rows)

    def steps_per_second(self, together: bool) -> float:
        """Client steps per second of one round."""
        started = time.perf_counter()
        for update in self.updates(together):
            last = next(iter(update.parameters.values()))
        float(last.sum())  # waits for the device
        return CLIENTS * self.steps / (time.perf_counter() - started)

    def operations(self, together: bool) -> int:
        """Number of operations of the second step of all clients."""
        counts: list[int] = []
        for steps in (1, 2):
            with Operations() as operations:
                for _ in self.updates(together, steps):
                    pass
            counts.append(operations.count)
        return counts[1] - counts[0]


def measure(name: str, device: str, rounds: int) -> str:
    """One row of the table.

    Args:
        name: One of :data:`NETWORKS`.
        device: ``cpu`` or ``cuda``.
        rounds: Alternating measurements.

    Raises:
        SystemExit: If the local trainers disagree.
    """
    exact = Case(name, device, torch.float64, steps=3)
    difference = float((exact.weights(False) - exact.weights(True)).abs().max())
    if not difference < TOLERANCE:
        raise SystemExit(f"{name}: the engines differ by {difference:.1e} in float64")
    case = Case(name, device)
    operations = [case.operations(together) for together in (False, True)]
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for together in (False, True):
            rates[together].append(case.steps_per_second(together))
    ratios = [b / a for a, b in zip(*rates, strict=True)]
    alone, stacked = (statistics.median(rate) for rate in rates)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    dispatched = f"{operations[0]:,} | {operations[1]:,} | {operations[0] / operations[1]:.1f}"
    return f"| {name} | {alone:,.3g} | {stacked:,.3g} | {spread} | {dispatched} | {difference:.0e} |"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), help="rows")
    parser.add_argument("--rounds", type=int, default=5, help="alternating measurements; medians are printed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to train")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments.device, arguments.rounds) for name in arguments.networks]
    place = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads} torch thread(s)"
    options = {"rounds": arguments.rounds, "device": arguments.device, "threads": arguments.threads}
    name = "engines.md" if arguments.device == "cpu" else "engines_cuda.md"
    command_line.write(RESULTS / name, _report(rows, command_line.command(**options), place))


def _report(rows: list[str], command: str, place: str) -> list[str]:
    return [
        "# The two engines",
        "",
        f"{CLIENTS} clients, batches of {BATCH}, SemiFL's loss (two passes), clipping, Nesterov SGD, float32. Client",
        "steps per second of the sequential engine and of the vectorised one, medians of alternating runs; the ratio",
        "is the median of the runs' ratios (smallest-largest). Operations are those that one step of all clients",
        "dispatches, views left out: what counts on a GPU, where such small steps wait for launches. On a CPU stacking",
        "gains only where calls take longer than arithmetic, as with the last two networks (one hidden layer of 64",
        "units, and none); there `clients_at_once: auto` trains one client after another. The last column is the",
        "largest difference of a weight between the engines after three steps in float64.",
        "",
        "| network | sequential | vectorised | ratio | operations, sequential | vectorised | ratio | difference |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"`{command}` on {command_line.machine()}; {place}.",
    ]


if __name__ == "__main__":
    main()
