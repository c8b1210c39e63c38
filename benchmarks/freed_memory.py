"""CPU time and page faults of a training step, with and without keeping the memory that the step before has freed.

Two processes train the same network in turns: one with the defaults of the C library, one after
``trainer/freed_memory.py``. Ratios are computed turn by turn.

    python benchmarks/freed_memory.py --turns 9
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import command_line
import torch
from command_line import RESULTS
from torch.nn import functional as F

from lightning_fedssl.models import CNN, ResNet9, WideResNet
from lightning_fedssl.trainer.freed_memory import keep_freed_memory

WARM_UP = 5
"""Steps before the first turn."""
SECONDS = 0.4
"""About the length of a turn."""


@dataclass(frozen=True)
class Case:
    """A network and how it is trained, on images of 3 x 32 x 32.

    Attributes:
        network: Its class.
        width: Its width.
        fast: In bfloat16 and channels-last; else in 32 bits.
        batch: Images of a step.
    """

    network: str
    width: int
    fast: bool
    batch: int

    def __str__(self) -> str:
        return f"{self.network}, width {self.width} | {'bfloat16' if self.fast else 'float32'} | {self.batch}"

    def build(self) -> torch.nn.Module:
        """The network."""
        if self.network == "WRN-28":
            return WideResNet(widen_factor=self.width, norm="batch")
        kind = {"ResNet-9": ResNet9, "CNN": CNN}[self.network]
        network: torch.nn.Module = kind(in_shape=(3, 32, 32), width=self.width, norm="batch")
        return network


CASES = (
    Case("ResNet-9", 16, True, 20),
    Case("ResNet-9", 16, True, 50),
    Case("ResNet-9", 8, True, 20),
    Case("ResNet-9", 8, True, 50),
    Case("CNN", 32, False, 50),
    Case("WRN-28", 2, False, 10),
)


@dataclass(frozen=True)
class Turn:
    """What a turn took.

    Attributes:
        seconds: CPU seconds of a step.
        faults: Page faults of a step.
        peak: Largest resident memory of the process so far, in MiB.
    """

    seconds: float
    faults: float
    peak: float


def train(turns: Connection, case: Case, keep: bool) -> None:
    """Train for as many turns as are requested.

    Args:
        turns: Sends a number of steps, or 0 for the end; receives a :class:`Turn`.
        case: What is trained.
        keep: Whether freed memory is kept.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if keep:
        keep_freed_memory()
    layout = torch.channels_last if case.fast else torch.contiguous_format
    network = case.build().train().to(memory_format=layout)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, fused=True)
    images = torch.randn(case.batch, 3, 32, 32).to(memory_format=layout)
    labels = torch.randint(0, 10, (case.batch,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.fast):
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    while steps := turns.recv():
        started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(steps):
            step()
        spent, usage = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF)
        turns.send(Turn(spent / steps, (usage.ru_minflt - before) / steps, usage.ru_maxrss / 1024))


def measure(case: Case, turns: int) -> str:
    """One row of the table.

    Args:
        case: What is trained.
        turns: Turns of each process.
    """
    context = multiprocessing.get_context("spawn")
    found: tuple[list[Turn], list[Turn]] = ([], [])
    pipes = []
    for keep in (False, True):
        ours, theirs = context.Pipe()
        context.Process(target=train, args=(theirs, case, keep), daemon=True).start()
        pipes.append(ours)
    pipes[0].send(1)
    steps = max(1, round(SECONDS / pipes[0].recv().seconds))
    for _ in range(turns):
        for pipe, of_process in zip(pipes, found, strict=True):
            pipe.send(steps)
            of_process.append(pipe.recv())
    for pipe in pipes:
        pipe.send(0)
    ratios = [kept.seconds / plain.seconds for plain, kept in zip(*found, strict=True)]
    cells = [f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"]
    for of_process in found:
        times, faults = (statistics.median(getattr(t, name) for t in of_process) for name in ("seconds", "faults"))
        cells.append(f"{1000 * times:.1f} ms, {faults:,.0f}, {of_process[-1].peak:,.0f} MiB")
    return f"| {case} | {' | '.join(cells)} |"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9, help="turns of each process; medians are printed")
    arguments = parser.parse_args()
    lines = [
        "# Keeping freed memory",
        "",
        "CPU time of a training step with `trainer/freed_memory.py`, divided by that without it: median of the turns",
        "(smallest-largest). Then CPU time and page faults of a step, and the peak of the process's memory.",
        "",
        "| network | precision | batch | ratio | returned to the system | kept |",
        "|---|---|---|---|---|---|",
        *(measure(case, arguments.turns) for case in CASES),
        "",
        f"`{command_line.command(turns=arguments.turns)}` on {command_line.machine()}; 1 torch thread a process.",
    ]
    command_line.write(RESULTS / "freed_memory.md", lines)


if __name__ == "__main__":
    main()
