"""Images per second of batched augmentation against torchvision v2 called for each image.

Rounds are interleaved, so that other load on the machine affects both; the ratio is the result. torchvision can also
transform a batch in one call, but then all images of the batch get the same random transform.

    python benchmarks/augmentation.py --batch 100 500 --rounds 5
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from lightning_fedssl import sampling
from lightning_fedssl.data.augment.views import make_views
from lightning_fedssl.data.datasets import SPECS

Views = dict[str, Callable[[Tensor, Tensor], Tensor]]


def batched(strong: str) -> Views:
    """The package's weak and strong view of CIFAR-10."""
    views = make_views(SPECS["cifar10"], strong=strong)
    return {"weak": views.weak, strong: views.strong}


def per_image() -> Views:
    """Torchvision's weak view, and its RandAugment after that view, one image at a time."""
    weak = [v2.RandomHorizontalFlip(), v2.RandomCrop(32, padding=4, padding_mode="reflect")]
    randaugment = [v2.RandAugment(2, 10, interpolation=InterpolationMode.NEAREST)]
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(SPECS["cifar10"].mean, SPECS["cifar10"].std)]
    chains = {"weak": v2.Compose(weak + last), "strong": v2.Compose(weak + randaugment + last)}
    return {name: _one_by_one(chain) for name, chain in chains.items()}


def _one_by_one(chain: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda images, keys: torch.stack([chain(image) for image in images])


def measure(view: Callable[[Tensor, Tensor], Tensor], images: Tensor, seconds: float) -> float:
    """Images per second of one view, called on one batch for about ``seconds``."""
    keys = sampling.sample_keys(0, len(images))
    view(images, keys)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        view(images, keys + calls)
        calls += 1
    return calls * len(images) / elapsed


def compare(batch: int, rounds: int, seconds: float) -> list[tuple[str, float, float, float]]:
    """Rows of view, images per second of this package and of torchvision, and their ratio: medians over rounds."""
    ours = batched("fixmatch") | batched("semifl") | batched("digits")
    peers = per_image()
    images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rates: dict[str, list[float]] = {name: [] for name in ours}
    others: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, view in ours.items():
            rates[name].append(measure(view, images, seconds))
        for name, view in peers.items():
            others[name].append(measure(view, images, seconds))
    return [_row(name, rates[name], others["weak" if name == "weak" else "strong"]) for name in ours]


def _row(name: str, ours: list[float], peer: list[float]) -> tuple[str, float, float, float]:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    return name, statistics.median(ours), statistics.median(peer), statistics.median(ratios)


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description="Images per second: batched augmentation against torchvision v2.")
    parser.add_argument("--batch", type=int, nargs="+", default=[100, 500], help="images per batch")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; medians are printed")
    parser.add_argument("--seconds", type=float, default=0.5, help="time of one measurement")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}"
    print(f"{versions}; {args.threads} thread(s); 3x32x32 uint8 to float32; medians of {args.rounds} rounds.\n")
    print("| view | batch | images/s | torchvision v2 per image | ratio |\n|---|---|---|---|---|")
    for batch in args.batch:
        for name, ours, peer, ratio in compare(batch, args.rounds, args.seconds):
            print(f"| {name} | {batch} | {ours:,.0f} | {peer:,.0f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
