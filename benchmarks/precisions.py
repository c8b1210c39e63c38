"""CPU time of a training step by precision and memory layout: WRN-28-2 and ResNet-9 on images of 3 x 32 x 32.

One thread, SGD with momentum, static batch norm; batches of 10 (a client's) and 250 (the server's). The ways take
turns, and CPU time is measured, so that other programs disturb little. It prints a table.

    python benchmarks/precisions.py --turns 3

On a processor with AVX512, ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`` measures it without AVX512.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from lightning_fedssl.models import ResNet9, WideResNet

NETWORKS: dict[str, Callable[..., nn.Module]] = {"WRN-28-2": WideResNet, "ResNet-9": ResNet9}
WAYS = [("32-true", False), ("32-true", True), ("bf16-mixed", False), ("bf16-mixed", True)]


def step_of(network: Callable[..., nn.Module], batch: int, precision: str, channels_last: bool) -> Callable[[], None]:
    """A function that makes one training step."""
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = network(in_shape=(3, 32, 32), num_classes=10, norm="static_batch").to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True, fused=True)
    x, y = torch.randn(batch, 3, 32, 32).to(memory_format=layout), torch.arange(batch) % 10

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            logits = model(x)
        F.cross_entropy(logits.float(), y).backward()
        optimizer.step()

    return step


def cpu_seconds(step: Callable[[], None], times: int) -> float:
    """CPU seconds of a step."""
    started = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - started) / times


def main() -> None:
    """Measure, and print a row for each network and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 250])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}\n")
    head = [f"{precision}, channels {'last' if last else 'first'}" for precision, last in WAYS]
    print("| network, batch | " + " | ".join(head) + " |\n|---|" + "---|" * len(WAYS))
    for (name, network), batch in [(item, batch) for batch in arguments.batches for item in NETWORKS.items()]:
        steps = [partial(step_of, network, batch, *way)() for way in WAYS]
        for step in steps:
            step()  # the first step allocates memory and chooses kernels
        rows = [[cpu_seconds(step, 5 if batch == 10 else 1) for step in steps] for _ in range(arguments.turns)]
        medians = [median(column) for column in zip(*rows, strict=True)]
        cells = [f"{1000 * seconds:.0f} ms ({seconds / medians[0]:.2f})" for seconds in medians]
        print(f"| {name}, {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
