"""Runs candidate settings of the presets for own data on development tasks; writes a row of test accuracies for each.

No task of ``benchmarks/own_tasks.py`` is among them. A candidate is a mapping of keys on top of the preset.

    python benchmarks/presets.py --root data --output presets.csv --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import csv
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from lightning_fedssl import Experiment, Supervised
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.callbacks.labels_alone import CHOSEN
from lightning_fedssl.data import datasets
from lightning_fedssl.data.sources.examples import Signals
from lightning_fedssl.storage import checkpoint_file

Array = NDArray[Any]


class Task(NamedTuple):
    """A federation's data.

    Attributes:
        preset: The kind of the data: images, signals or table.
        arrays: What the file for :class:`~lightning_fedssl.data.Arrays` holds.
        keys: Clients, labels and partition, and what a user would set for these data.
    """

    preset: str
    arrays: dict[str, Array]
    keys: dict[str, Any]


def parts(samples: Array, labels: Array, train: int, test: int, client_ids: Array | None = None) -> dict[str, Array]:
    """Random training and test samples, and the clients of the former, as the arrays of a file."""
    order = np.random.default_rng(0).permutation(len(labels))
    a, b = order[:train], order[train : train + test]
    arrays = {"train": samples[a], "train_labels": labels[a], "test": samples[b], "test_labels": labels[b]}
    return arrays if client_ids is None else arrays | {"client_ids": client_ids[a], "test_client_ids": client_ids[b]}


def images(root: str, name: str, train: int, halve: bool = True) -> dict[str, Array]:
    """A part of an image data set, with half as many pixels a side: ``(n, channels, side, side)`` uint8."""
    _, split, *_ = datasets.load(name, root, False)
    chosen = parts(split.images.numpy(), split.labels.numpy(), train, min(500, len(split.labels) - train))
    small: Callable[[Array], Array] = lambda x: F.avg_pool2d(torch.from_numpy(x).float(), 2).byte().numpy()  # noqa: E731
    return {key: small(x) if halve and "labels" not in key else x for key, x in chosen.items()}


def coloured(arrays: dict[str, Array], sites: int) -> dict[str, Array]:
    """Grey images in the colours of their sites, which are drawn once, and whose clients they become."""
    rng = np.random.default_rng(0)
    dark, light = rng.uniform(0, 110, (sites, 3)), rng.uniform(130, 255, (sites, 3))
    result = dict(arrays)
    for part in ("train", "test"):
        site, grey = rng.integers(sites, size=len(arrays[part])), arrays[part] / 255
        tint = (dark[site][..., None, None], light[site][..., None, None])
        result[part] = (tint[0] + (tint[1] - tint[0]) * grey).astype(np.uint8)
        result["client_ids" if part == "train" else "test_client_ids"] = site
    return result


def table(name: str) -> dict[str, Array]:
    """A table of scikit-learn's, a fifth of its rows for the test."""
    bunch = getattr(importlib.import_module("sklearn.datasets"), f"load_{name}")()
    count = len(bunch.target)
    return parts(bunch.data.astype(np.float32), bunch.target, count - count // 5, count // 5)


def signals(noise: float) -> dict[str, Array]:
    """The package's generated signals."""
    _, train, test = Signals(1200, noise=noise, seed=7).load()[:3]
    return {
        "train": train.images.numpy(), "train_labels": train.labels.numpy(), "test": test.images.numpy(),
        "test_labels": test.labels.numpy(),
    }  # fmt: skip


def keys(clients: int, labels: int, partition: Any = "Iid", **more: Any) -> dict[str, Any]:
    """The keys that name a task's clients and labels."""
    return {
        "data.num_clients": clients, "data.num_labels": labels, "data.partition": partition, **more,
    }  # fmt: skip


def skewed(alpha: float) -> dict[str, Any]:
    """Clients with different mixtures of classes."""
    return {"class_path": "Dirichlet", "init_args": {"alpha": alpha}}


def tasks(root: str) -> dict[str, Callable[[], Task]]:
    """The development tasks by name."""
    crop = {"data.weak": "crop"}  # mirrored digits have no meaning
    return {
        "digits-20l-20c": lambda: Task("images", images(root, "digits", 1000, False), keys(20, 20, **crop)),
        "digits-50l-5c-dir": lambda: Task(
            "images", images(root, "digits", 1000, False), keys(5, 50, skewed(0.3), **crop)
        ),
        "digits-sites-60l-4c": lambda: Task(
            "images", coloured(images(root, "digits", 600, False), 4), keys(4, 60, "NaturalClients", **crop)
        ),
        "mnist-50l-10c": lambda: Task("images", images(root, "mnist", 1000), keys(10, 50, **crop)),
        "fashion-100l-10c-dir": lambda: Task("images", images(root, "fashion_mnist", 1000), keys(10, 100, skewed(0.3))),
        "cifar-200l-5c": lambda: Task("images", images(root, "cifar10", 1000), keys(5, 200)),
        "cancer-10l-5c": lambda: Task("table", table("breast_cancer"), keys(5, 10)),
        "wine-12l-4c-dir": lambda: Task("table", table("wine"), keys(4, 12, skewed(0.3))),
        "waves-30l-10c": lambda: Task("signals", signals(0.5), keys(10, 30)),
        "waves-60l-5c-dir": lambda: Task("signals", signals(0.8), keys(5, 60, skewed(0.3))),
    }


def fixmatch(threshold: float, steps: int, **more: Any) -> dict[str, Any]:
    """FixMatch with a threshold and a number of client steps, and further keys."""
    return {"model.threshold": threshold, "model.client_steps": steps, **more}


GROUP_NORM = {"model.network.init_args.norm": "group"}
CANDIDATES: dict[str, dict[str, Any]] = {
    "labels alone": {"model": "Supervised"},
    "preset": {},
    "threshold 0.8, 20 steps": fixmatch(0.8, 20),
    "threshold 0.95, 5 steps": fixmatch(0.95, 5),
    "threshold 0.95, 10 steps": fixmatch(0.95, 10),
    "threshold 0.95, 10 steps of 32": fixmatch(0.95, 10, **{"data.client_batch_size": 32}),
    "threshold 0.95, 20 steps": fixmatch(0.95, 20),
    "threshold 0.95, 40 steps": fixmatch(0.95, 40),
    "SemiFL, threshold 0.95": {"model": "SemiFL", "model.threshold": 0.95},
    "labels alone, group norm": {"model": "Supervised", **GROUP_NORM},
    "threshold 0.8, 20 steps, group norm": fixmatch(0.8, 20, **GROUP_NORM),
}
"""Candidates by name, as keys on top of the preset."""


def run(task: Task, overrides: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Train, and return the last scalars of the run.

    Args:
        task: The task.
        overrides: Keys on top of preset and task.
        seed: The seed of the run.
        folder: Where the data and the run are written.
    """
    np.savez(folder / "task.npz", **task.arrays)  # type: ignore[arg-type]
    fixed = {
        "seed_everything": seed, "data.dataset": str(folder / "task.npz"), "trainer.enable_progress_bar": False,
        "trainer.default_root_dir": str(folder), "trainer.devices": 1,
    }  # fmt: skip
    experiment = Experiment.from_config(f"presets/{task.preset}.yaml", fixed | task.keys, overrides)
    trainer, model, data = experiment
    trainer.fit(model, data)
    scalars = {name: float(value) for name, value in trainer.callback_metrics.items()}
    chosen = FederatedCheckpoint.folder(trainer) / CHOSEN
    if not chosen.is_file():
        return scalars
    if checkpoint_file.load(chosen)["algorithm"] == "Supervised":
        model = Supervised.of(model, 1)
    return scalars | {"export/accuracy": trainer.test(model, data, chosen)["test/accuracy"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for, and append a row to the CSV file after each run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--root", default="data")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--tasks", nargs="+")
    options = parser.parse_args(arguments)
    made = tasks(options.root)
    for seed in options.seeds:
        for name in options.tasks or made:
            for candidate in options.candidates:
                started = time.process_time()
                with TemporaryDirectory() as folder:
                    scalars = run(made[name](), CANDIDATES[candidate], seed, Path(folder))
                row = [name, candidate, seed, f"{scalars['test/accuracy']:.4f}", f"{time.process_time() - started:.0f}"]
                with options.output.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(row)
                print(*row, flush=True)


if __name__ == "__main__":
    main()
