"""The one FedAvg workload that every simulator of the comparison runs: sizes, images, networks.

1000 clients hold 50 images of 3 x 32 x 32 each, a client trains one epoch of batches of 10 with SGD, 50 clients make a
round, and the server averages the weights. Client i has block i modulo 50 of 2,500 random images; a brighter square
marks the class, so that it can be learnt. The networks are a softmax regression, whose rounds are dominated by
overhead, and the CNN of pfl-research's CIFAR-10 benchmark (1,626,442 parameters), whose rounds are dominated by
arithmetic.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

CLIENTS = 1000
BLOCKS = 50
IMAGES = 50
COHORT = 50
BATCH = 10
CLASSES = 10
SHAPE = (3, 32, 32)


def rate(name: str) -> float:
    """A network's learning rate; the other networks diverge with the CNN's rate."""
    return 0.1 if name == "cnn" else 0.02


def images() -> tuple[np.ndarray, np.ndarray]:
    """All images, uint8 ``(2500, 3, 32, 32)``, and their classes, int64 ``(2500,)``."""
    generator = np.random.default_rng(0)
    labels = generator.integers(CLASSES, size=BLOCKS * IMAGES)
    pixels = generator.integers(0, 200, size=(len(labels), *SHAPE))
    for row, label in enumerate(labels):
        top, left = divmod(int(label), 4)
        pixels[row, :, 8 * top : 8 * top + 8, 8 * left : 8 * left + 8] += 55
    return pixels.astype(np.uint8), labels


def client(number: int) -> slice:
    """The rows of a client's images."""
    first = number % BLOCKS * IMAGES
    return slice(first, first + IMAGES)


@functools.cache
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """All images as input of the simulators, float32 from 0 to 1, and their classes."""
    import torch

    pixels, labels = images()
    return torch.from_numpy(pixels).float() / 255, torch.from_numpy(labels)


def network(name: str) -> torch.nn.Module:
    """A network with weights that depend on its name alone.

    Args:
        name: ``lr`` or ``cnn``.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "lr":
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, CLASSES))
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, CLASSES),
    )  # fmt: skip


@functools.cache
def resident_network(name: str) -> torch.nn.Module:
    """A network that is built once per process, for simulators that train in worker processes."""
    return network(name)


def loss(module: torch.nn.Module) -> float:
    """The mean cross-entropy of the global model over all images."""
    import torch

    x, y = tensors()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x), y))
