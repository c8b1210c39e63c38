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


def table(name: str, test: int) -> dict[str, Array]:
    """A table of scikit-learn's, a number of its rows for the test."""
    bunch = getattr(importlib.import_module("sklearn.datasets"), f"load_{name}")()
    return parts(bunch.data.astype(np.float32), bunch.target, len(bunch.target) - test, test)


def signals(noise: float) -> dict[str, Array]:
    """The package's generated signals."""
    _, train, test = Signals(1200, noise=noise, seed=7).load()[:3]
    return {
        "train": train.images.numpy(), "train_labels": train.labels.numpy(), "test": test.images.numpy(),
        "test_labels": test.labels.numpy(),
    }  # fmt: skip


def drawn(draw: Callable[[np.random.Generator, int], Array], classes: int) -> dict[str, Array]:
    """A thousand samples each for training and test, drawn class by class."""
    rng = np.random.default_rng(5)
    labels = rng.integers(classes, size=2000)
    return parts(np.stack([draw(rng, int(y)) for y in labels]).astype(np.float32), labels, 1000, 1000)


def bell(rng: np.random.Generator, label: int) -> Array:
    """Cylinder, bell or funnel (N. Saito, 1994), with three times the usual noise: ``(1, 128)``."""
    t = np.arange(128)
    start = rng.integers(16, 33)
    end = start + rng.integers(32, 97)
    shape = [np.ones(128), (t - start) / (end - start), (end - t) / (end - start)][label]
    signal = (6 + rng.normal()) * shape * ((t >= start) & (t <= end))
    return np.asarray((signal + rng.normal(0, 3, 128))[None] / 5)


def chart(rng: np.random.Generator, label: int) -> Array:
    """A control chart (Alcock, Manolopoulos, 1999), noisier: normal, cyclic, trend up or down, shift: ``(1, 60)``."""
    t, noise = np.arange(60), rng.uniform(-3, 3, 60) * 1.6
    slope, step, at = rng.uniform(0.1, 0.3), rng.uniform(5, 10), rng.integers(20, 40)
    cycle = rng.uniform(5, 10) * np.sin(2 * np.pi * t / rng.uniform(10, 15))
    signal = [0 * t, cycle, slope * t, -slope * t, step * (t > at), -step * (t > at)][label]
    return np.asarray((signal + noise)[None] / 8)


def clusters() -> dict[str, Array]:
    """Three classes of two clusters each, in 6 of 20 columns."""
    x, y = importlib.import_module("sklearn.datasets").make_classification(
        1800, n_features=20, n_informative=6, n_classes=3, class_sep=1.6, random_state=3
    )
    return parts(x.astype(np.float32), y, 800, 1000)


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
        "digits-50l-30c-dir": lambda: Task(
            "images", images(root, "digits", 1000, False), keys(30, 50, skewed(0.3), **crop)
        ),
        "digits-sites-60l-4c": lambda: Task(
            "images", coloured(images(root, "digits", 600, False), 4), keys(4, 60, "NaturalClients", **crop)
        ),
        "mnist-50l-10c": lambda: Task("images", images(root, "mnist", 1000), keys(10, 50, **crop)),
        "fashion-100l-10c-dir": lambda: Task("images", images(root, "fashion_mnist", 1000), keys(10, 100, skewed(0.3))),
        "fashion-500l-3c": lambda: Task("images", images(root, "fashion_mnist", 1000), keys(3, 500)),
        "cifar-200l-5c": lambda: Task("images", images(root, "cifar10", 1000), keys(5, 200)),
        "cancer-10l-5c": lambda: Task("table", table("breast_cancer", 113), keys(5, 10)),
        "wine-12l-4c-dir": lambda: Task("table", table("wine", 35), keys(4, 12, skewed(0.3))),
        "clusters-24l-5c": lambda: Task("table", clusters(), keys(5, 24)),
        "digit-table-50l-10c-dir": lambda: Task("table", table("digits", 797), keys(10, 50, skewed(0.5))),
        "bells-15l-5c": lambda: Task("signals", drawn(bell, 3), keys(5, 15)),
        "charts-36l-10c-dir": lambda: Task("signals", drawn(chart, 6), keys(10, 36, skewed(0.5))),
        "waves-30l-10c": lambda: Task("signals", signals(0.5), keys(10, 30)),
        "waves-60l-5c-dir": lambda: Task("signals", signals(0.8), keys(5, 60, skewed(0.3))),
    }


AFTER = {"model.server_phase": "after"}


def fixmatch(threshold: float, steps: int, **more: Any) -> dict[str, Any]:
    """FixMatch with a threshold and a number of client steps, and further keys."""
    fixed = {"model": "FixMatch", "model.label_mode": "eval", "model.client_epochs": 1, "model.server_steps": 25}
    return {**fixed, **AFTER, "model.threshold": threshold, "model.client_steps": steps, **more}


def semifl(threshold: float) -> dict[str, Any]:
    """SemiFL with a threshold."""
    fixed = {"model": "SemiFL", "model.client_epochs": 1, "model.server_steps": 25}
    return {**fixed, **AFTER, "model.threshold": threshold}


def fl2(epochs: float, **more: Any) -> dict[str, Any]:
    """FL2 without its sharpness-aware term, with 25 steps of the server, and further keys."""
    return {"model": "FL2", "model.rho": 0, "model.client_epochs": epochs, "model.server_steps": 25, **AFTER, **more}


GROUP_NORM = {"model.network.init_args.norm": "group"}
FAST = {"model.optimizer.init_args.lr": 0.1}
PARALLEL = {"model.server_phase": "parallel"}
PLAIN = {"model.server_momentum": 0}
EPOCHS = {"model.server_steps": None, "model.server_epochs": 5}
FIXED = {"model.adaptive_threshold": False}
FRESH = {"model.keep_client_optimizer": False, "model.keep_server_optimizer": False}
BATCHES = {"data.client_batch_size": 32}
ROUNDS = {"trainer.max_rounds": 100, "trainer.check_val_every_n_rounds": 10, "model.server_steps": 6, **BATCHES}
CANDIDATES: dict[str, dict[str, Any]] = {
    "preset": {},
    "labels alone": {"model": "Supervised", "model.server_steps": 25},
    "threshold 0.5, 20 steps": fixmatch(0.5, 20),
    "threshold 0.8, 20 steps": fixmatch(0.8, 20),
    "threshold 0.95, 5 steps": fixmatch(0.95, 5),
    "threshold 0.95, 10 steps": fixmatch(0.95, 10),
    "threshold 0.95, 10 steps of 32": fixmatch(0.95, 10, **BATCHES),
    "threshold 0.95, 20 steps": fixmatch(0.95, 20),
    "threshold 0.95, 40 steps": fixmatch(0.95, 40),
    "threshold 0.95, 100 rounds of 5 steps of 32": fixmatch(0.95, 5, **ROUNDS),
    "threshold 0.95, 5 steps, parallel": fixmatch(0.95, 5, **PARALLEL),
    "threshold 0.95, 20 steps, parallel": fixmatch(0.95, 20, **PARALLEL),
    "SemiFL, threshold 0.95": semifl(0.95),
    "SemiFL, threshold 0.5": semifl(0.5),
    "FL2, 1 epoch, sharpness": fl2(1, **{"model.rho": 0.1}),
    "FL2, a quarter epoch": fl2(0.25),
    "FL2, half an epoch": fl2(0.5),
    "FL2, 1 epoch": fl2(1),
    "FL2, 3 epochs": fl2(3),
    "FL2, 1 epoch, plain mean": fl2(1, **PLAIN),
    "FL2, 3 epochs, plain mean": fl2(3, **PLAIN),
    "FL2, 3 epochs, 5 server epochs": fl2(3, **EPOCHS),
    "FL2, 3 epochs, plain mean, 5 server epochs": fl2(3, **PLAIN, **EPOCHS),
    "FL2, 1 epoch, plain mean, parallel": fl2(1, **PLAIN, **PARALLEL),
    "FL2, 3 epochs, plain mean, parallel": fl2(3, **PLAIN, **PARALLEL),
    "FL2, 1 epoch, plain mean, parallel, 5 server epochs": fl2(1, **PLAIN, **PARALLEL, **EPOCHS),
    "FL2, 1 epoch, plain mean, parallel, threshold 0.95": fl2(1, **PLAIN, **PARALLEL, **FIXED),
    "FL2, 1 epoch, equal weights": fl2(1, **{"model.status_weighting": False}),
    "FL2, 1 epoch, momentum not kept": fl2(1, **FRESH),
    "FL2, 1 epoch, 100 server steps": fl2(1, **{"model.server_steps": 100}),
    "FL2, 1 epoch, lr 0.01": fl2(1, **{"model.optimizer.init_args.lr": 0.01}),
    "labels alone, learning rate 0.1": {"model": "Supervised", "model.server_steps": 25, **FAST},
    "threshold 0.8, 20 steps, learning rate 0.1": fixmatch(0.8, 20, **FAST),
}
CANDIDATES |= {f"{name}, group norm": {**keys, **GROUP_NORM} for name, keys in CANDIDATES.items()}
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
                found = (100 * scalars.get(f"{of}/accuracy", np.nan) for of in ("bound", "test", "export"))
                seconds = f"{time.process_time() - started:.0f}"
                row = [name, candidate, seed, *(f"{value:.1f}" for value in found), seconds]
                with options.output.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(row)
                print(*row, flush=True)


if __name__ == "__main__":
    main()
