"""Several labels and masks: the labels alone against FixMatch, SemiFL and FL2 on scenes of handwritten digits.

    python benchmarks/tasks.py multilabel     # or: segmentation

A scene is 24 x 24 pixels with three of scikit-learn's digits 0 to 4 at random places, under noise; the digits of test
scenes are in no training scene. The scenes are made, the handwriting is real. Of 640 training scenes 120 (masks: 40)
have labels, at the server; 10 clients share the others, and 5 of them train in each of 30 (masks: 15) rounds. All
runs of a seed have the same network, initial weights, labels and server steps. Prints the mean of three seeds, and
the paired difference from the labels alone with its 95 % interval (Student's t, 2 degrees of freedom).
"""

from __future__ import annotations

import sys
from functools import partial
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from lightning import seed_everything
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_fedssl import CNN, FL2, FederatedDataModule, FederatedTrainer, FixMatch, SemiFL, Supervised, UNet
from lightning_fedssl.task import MultiLabel, Segmentation, Task

SEEDS, SIDE, CLASSES = (1, 2, 3), 24, 5
T_95 = 4.303
"""Student's t of 2 degrees of freedom."""

SHARED: dict[str, Any] = {"server_epochs": 5, "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
METHODS: dict[str, Any] = {
    "labels alone": partial(Supervised, **SHARED),
    "FixMatch": partial(FixMatch, threshold=0.95, client_epochs=1, **SHARED),
    "SemiFL": partial(SemiFL, threshold=0.95, client_epochs=2, **SHARED),
    "FL2": partial(FL2, rho=0, client_epochs=2, pretrain_epochs=0, **SHARED),
}


def scenes(count: int, pool: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
    """Images uint8 ``(count, 1, 24, 24)``, and the class of each pixel, 0 for the background."""
    digits, draw = load_digits(), np.random.default_rng(seed)
    images = draw.normal(30, 25, (count, SIDE, SIDE))
    masks = np.zeros((count, SIDE, SIDE), np.int64)
    for image, mask in zip(images, masks, strict=True):
        for cell in draw.choice(9, 3, replace=False):
            chosen = draw.choice(pool)
            top, left = cell // 3 * 8, cell % 3 * 8
            ink = digits.images[chosen]
            image[top : top + 8, left : left + 8] += ink * draw.uniform(6, 13)
            mask[top : top + 8, left : left + 8][ink >= 6] = digits.target[chosen] + 1
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))[:, None], torch.from_numpy(masks)


def presence(masks: Tensor) -> Tensor:
    """Which digits a scene has, ``(count, 5)``."""
    return torch.stack([(masks == k + 1).flatten(1).any(1) for k in range(CLASSES)], dim=1).long()


def score(method: Any, task: Task, seed: int) -> float:
    """The task's first metric of the last round on the test scenes."""
    seed_everything(seed)
    rows = np.flatnonzero(load_digits().target < CLASSES)
    parts = scenes(640, rows[: len(rows) * 2 // 3], 0), scenes(300, rows[len(rows) * 2 // 3 :], 1)
    train, test = ((x, y if task.per_pixel else presence(y)) for x, y in parts)
    labels, rounds = (40, 15) if task.per_pixel else (120, 30)
    data = FederatedDataModule.from_datasets(
        train,
        test,
        task=task,
        weak="crop",
        strong="fixmatch",
        num_labels=labels,
        num_clients=10,
        validation=0,
    )
    network = partial(UNet, width=8) if task.per_pixel else partial(CNN, width=16)
    trainer = FederatedTrainer(
        max_rounds=rounds, clients_per_round=5, clients_at_once=5, accelerator="cpu", enable_progress_bar=False,
        logger=False, default_root_dir=mkdtemp(),
    )  # fmt: skip
    trainer.fit(method(network=network), data)
    return float(trainer.callback_metrics[f"test/{task.monitor}"])


def main(name: str) -> None:
    """Train all methods and print the table."""
    task: Task = {"multilabel": MultiLabel(), "segmentation": Segmentation()}[name]
    found = {method: np.array([score(make, task, seed) for seed in SEEDS]) for method, make in METHODS.items()}
    for method, values in found.items():
        gain = values - found["labels alone"]
        half = T_95 * gain.std(ddof=1) / len(gain) ** 0.5
        print(f"{name}  {method:13s} {task.monitor} {values.mean():.3f}  difference {gain.mean():+.3f} +- {half:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
