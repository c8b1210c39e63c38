"""Benchmarks on a GPU: rounds of SemiFL with WRN-28-2 by way of training and precision, and agreement with the CPU.

Images are random and no file is read; with the threshold 0 every image is trained on, which is the most that a round
can cost. Every measurement is a case of its own: one that fails leaves its traceback, the others follow, and the exit
code is 1. A row is appended to ``gpu.csv`` at once, and a case that is there is not measured again.

    python benchmarks/gpu.py --output runs/gpu
    python benchmarks/gpu.py --device cpu --tiny --output /tmp/gpu
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fedssl import FederatedDataModule, FederatedTrainer, SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.models import CNN, WideResNet
from lightning_fedssl.run import Run

CASES = [("agree", precision, at_once) for precision, at_once in (("64-true", 10), ("32-true", 1), ("bf16-mixed", 1))]
CASES += [("round", precision, at_once) for precision in ("32-true", "bf16-mixed") for at_once in (1, 5, 10)]
"""What is measured, precision, and clients in a stack."""


class Clock(FederatedCallback):
    """The seconds of every round, and the most memory of the GPU in MiB."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.began = 0.0

    def on_round_start(self, trainer: Run, algorithm: Any) -> None:
        """Start the clock."""
        wait()
        self.began = time.monotonic()

    def on_round_end(self, trainer: Run, algorithm: Any, metrics: dict[str, float]) -> None:
        """Stop it."""
        wait()
        self.seconds.append(time.monotonic() - self.began)


def wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(device: str, precision: str, at_once: int, rounds: int, tiny: bool) -> tuple[SemiFL, Clock]:
    """Train SemiFL for some rounds: 10 of 20 clients with 100 images each, or 4 of 5 with 20."""
    clients, cohort, images = (5, 4, 20) if tiny else (20, 10, 100)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(clients * images + 1000) % 10
    pixels = torch.randint(256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
    data = FederatedDataModule.from_datasets(
        (pixels[:-100], labels[:-100]), (pixels[-100:], labels[-100:]), validation=0.0,
        weak="flip_crop", strong="semifl", num_clients=clients, num_labels=250, server_batch_size=250,
    )  # fmt: skip
    network = partial(CNN, width=4) if tiny else partial(WideResNet, depth=28, widen_factor=2)
    sgd = partial(torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=5e-4)
    algorithm = SemiFL(network=network, optimizer=sgd, threshold=0.0, client_epochs=1, server_epochs=1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        FederatedTrainer(
            max_rounds=rounds, clients_per_round=cohort, accelerator=device, devices=1, precision=precision,
            clients_at_once=at_once, callbacks=[clock], logger=False, enable_progress_bar=False,
            default_root_dir=folder,
        ).fit(algorithm, data)  # fmt: skip
    return algorithm, clock


def measure(case: tuple[str, str, int], device: str, tiny: bool) -> str:
    """The result of a case as text."""
    what, precision, at_once = case
    if what == "agree":
        on_cpu, _ = train("cpu", "64-true" if precision == "64-true" else "32-true", 1, 1, tiny=True)
        here, _ = train(device, precision, at_once, 1, tiny=True)
        theirs = on_cpu.server.model()
        far = max(float((t.cpu().double() - theirs[n].double()).abs().max()) for n, t in here.server.model().items())
        return f"largest difference of a weight {far:.1e}"
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    _, clock = train(device, precision, at_once, 3 if tiny else 4, tiny)
    memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0
    return f"{statistics.median(clock.seconds[1:]):.3f} s a round, {memory:.0f} MiB"


def main() -> int:
    """Measure what is missing; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a trial")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path, failed = options.output / "gpu.csv", False
    known = [row[:3] for row in csv.reader(path.read_text().splitlines())] if path.is_file() else []
    for case in CASES:
        if [str(part) for part in case] in known:
            continue
        try:
            result = measure(case, options.device, options.tiny)
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        with path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*case, result])
        print(*case, result, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
