"""Several labels and masks on real data: the labels alone against FixMatch, SemiFL and FL2.

    pip download --no-deps --only-binary :all: -d wheels river stardist
    python benchmarks/tasks.py --wheels wheels --seeds 1 2 3 4 5 --output tasks.csv

``yeast`` (river): 2,417 genes with 103 features and any of 14 functions; 100 of 1,500 training rows have labels.
``nuclei`` (stardist): one fluorescence micrograph of the Data Science Bowl 2018 with nuclei drawn by hand, cut into 256
tiles of 32 x 32 pixels; a pixel is background, inside or edge. 12 of 192 training tiles have masks; the test tiles are
the right quarter of the picture. All labels are at the server, 10 clients share the other samples, and 5 of them train
in each of 30 rounds. All runs of a seed have the same network, initial weights, labels and server steps. Prints the
mean of the seeds, and the paired difference from the labels alone with its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lightning import seed_everything
from PIL import Image
from scipy.stats import t as student
from torch import Tensor

from lightning_fedssl import FL2, MLP, FederatedDataModule, FederatedTrainer, FixMatch, SemiFL, Supervised, UNet
from lightning_fedssl.data.augment.custom import Compose, FeatureMask, GaussianNoise
from lightning_fedssl.task import MultiLabel, Segmentation
from real_data import open_wheel

SHARED: dict[str, Any] = {"server_epochs": 5, "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
METHODS: dict[str, Any] = {
    "labels alone": partial(Supervised, **SHARED),
    "FixMatch": partial(FixMatch, threshold=0.95, client_epochs=1, **SHARED),
    "SemiFL": partial(SemiFL, threshold=0.95, client_epochs=2, **SHARED),
    "FL2": partial(FL2, rho=0, client_epochs=2, pretrain_epochs=0, **SHARED),
}

Parts = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Samples and targets for training, and for the test."""


def yeast(wheels: Path) -> Parts:
    """Features standardised by the training rows, and 0 or 1 for each function."""
    text = gzip.decompress(open_wheel(wheels, "river").read("river/datasets/yeast.csv.gz")).decode()
    rows = np.loadtxt(io.StringIO(text), delimiter=",", skiprows=1)
    train, test = np.split(np.random.default_rng(0).permutation(rows), [1500])
    mean, std = train[:, :103].mean(0), train[:, :103].std(0)

    def part(of: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy((of[:, :103] - mean) / std).float(), torch.from_numpy(of[:, 103:]).long()

    return part(train), part(test)


def nuclei(wheels: Path) -> Parts:
    """Tiles of 8 bits, and 0 for the background, 1 inside a nucleus and 2 for its edge."""
    folder = open_wheel(wheels, "stardist")
    image, owner = (
        np.array(Image.open(io.BytesIO(folder.read(f"stardist/data/images/{name}.tif")))).astype(np.int64)
        for name in ("img2d", "mask2d")
    )
    around = np.stack([np.roll(owner, shift, axis) for shift in (-1, 1) for axis in (0, 1)])
    masks = np.where(owner == 0, 0, np.where((around == owner).all(0), 1, 2))

    def tiles(of: np.ndarray) -> Tensor:
        return torch.from_numpy(np.stack(np.split(np.stack(np.split(of, 16, axis=1)), 16, axis=1), axis=1))

    images, targets = tiles(image.astype(np.uint8)).reshape(256, 1, 32, 32), tiles(masks).reshape(256, 32, 32)
    return (images[:192], targets[:192]), (images[192:], targets[192:])


TASKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "yeast": (yeast, partial(MLP, hidden=(64,)), {
        "task": MultiLabel(), "num_labels": 100, "weak": GaussianNoise(0.1),
        "strong": Compose([GaussianNoise(0.3), FeatureMask(0.2)]),
    }),
    "nuclei": (nuclei, partial(UNet, width=8), {
        "task": Segmentation(), "num_labels": 12, "weak": "flip_crop", "strong": "fixmatch", "server_batch_size": 4,
    }),
}  # fmt: skip


def score(name: str, method: Any, wheels: Path, seed: int) -> float:
    """The task's first metric of the last round on the test samples."""
    read, network, options = TASKS[name]
    seed_everything(seed)
    train, test = read(wheels)
    data = FederatedDataModule.from_datasets(train, test, num_clients=10, validation=0, **options)
    with TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=30, clients_per_round=5, clients_at_once=5, accelerator="cpu", enable_progress_bar=False,
            logger=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(method(network=network), data)
    return float(trainer.callback_metrics[f"test/{options['task'].monitor}"])


def main() -> None:
    """Train all methods, print the table, and write every run's result to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="folder of pip download")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["data", "metric", "method", "seed", "value"])
        for name, (_, _, settings) in TASKS.items():
            metric, alone = settings["task"].monitor, np.zeros(len(options.seeds))
            for method, make in METHODS.items():
                values = np.array([score(name, make, options.wheels, seed) for seed in options.seeds])
                alone = values if method == "labels alone" else alone
                gain = values - alone
                half = student.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / len(gain) ** 0.5
                row = f"{name} {metric}: {method:12s} {values.mean():.3f}  {gain.mean():+.3f} +- {half:.3f}"
                print(row, flush=True)
                for seed, value in zip(options.seeds, values, strict=True):
                    writer.writerow([name, metric, method, seed, f"{value:.4f}"])
                file.flush()


if __name__ == "__main__":
    main()
