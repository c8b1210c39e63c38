"""Derives runs from a suite: resolved configurations, identical partitions and initial weights, and
a folder per run.

The name of a run's folder contains a hash of what its result depends on: the resolved configuration
with all defaults, the seed, the partition, samples of own data, the initial weights, the version of
this package, and its commit in a checkout. Settings that do not affect the result are left out:
folders, data.root, data.download and the progress bar.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.comparison.suite import Keys, Suite, SuiteEntry, SuiteGroup
from lightning_fedssl.functional.dictionaries import exclude, select
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.task import Task

NO_EFFECT = (
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "data.root",
    "data.download",
    "seed_everything",
)
"""Keys that do not affect the result of a run, and the seed, which is hashed separately."""

LONGEST = 100
"""The most characters of a label in a file name."""

NOT_IN_THE_PARTITION = (
    "root",
    "download",
    "server_batch_size",
    "client_batch_size",
    "eval_batch_size",
    "weak",
    "strong",
    "normalize",
    "max_test_images",
)
"""Keys of ``data`` that the partition does not depend on."""

EVALUATION = ("dataset", "validation", "max_train_images", "max_test_images", "image_size")
"""Keys of ``data`` that determine the evaluation images, with ``root`` of image folders; equal
within a group."""


@dataclass(frozen=True)
class Resolved:
    """A configuration with all defaults, and the objects that it describes.

    Attributes:
        text: The configuration as YAML, for ``fit --config``.
        config: The configuration as nested mappings.
        model: The algorithm, whose network is not built yet.
        datamodule: The data, which are not loaded yet.
        refuse: Raises ValueError if the algorithm cannot train on data that are set up.
    """

    text: str
    config: Keys
    model: FederatedAlgorithm
    datamodule: FederatedDataModule
    refuse: Callable[[FederatedDataModule], None]


Resolve = Callable[[SuiteEntry, Sequence[Keys]], Resolved]
"""Reads the configurations of an entry and applies mappings of overrides; raises ValueError that
names the entry."""

Drawn = dict[tuple[str, ...], tuple[str, str]]
"""Hash of the partition and hash of the samples, by the keys that both depend on."""


@dataclass(frozen=True)
class Run:
    """One seed of one entry.

    Attributes:
        group: The group of its entry.
        entry: Its entry.
        seed: ``seed_everything``.
        resolved: The entry's configuration.
        partition: Hash of its partition, as in ``partition.json``.
        weights: Hashes of its network's initial weights, by name.
        folder: Its ``default_root_dir``.
        task: What its model predicts.
    """

    group: SuiteGroup
    entry: SuiteEntry
    seed: int
    resolved: Resolved
    partition: str
    weights: dict[str, str]
    folder: Path
    task: Task

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.entry.label}, seed {self.seed}"

    @property
    def max_rounds(self) -> int:
        """Its length in rounds."""
        return int(self.resolved.config["trainer"]["max_rounds"])

    @property
    def data(self) -> Keys:
        """The keys of ``data``."""
        keys: Keys = self.resolved.config["data"]
        return keys


def plan(suite: Suite, resolve: Resolve, folder: Path) -> list[Run]:
    """The runs of a suite, ordered by seed, so that the first seeds of all entries have results
    early.

    Args:
        suite: The suite to compare.
        resolve: Reads configurations.
        folder: The folder for the runs.

    Raises:
        ValueError: If an entry's configuration is wrong, or the runs of a group cannot be compared.
    """
    resolved = []
    tasks = {}
    for group in suite.groups:
        for entry in group.entries:
            one = resolve(entry, [suite.overrides, group.overrides, entry.overrides])
            resolved.append((group, entry, one))
            tasks[entry.label] = one.datamodule.task
    check_metric(suite, tasks)
    drawn: Drawn = {}
    latest: dict[tuple[str, ...], FederatedDataModule] = {}
    runs = []
    for seed in suite.seeds:
        for group, entry, one in resolved:
            runs.append(_run(group, entry, seed, one, drawn, latest, folder))
    for group in suite.groups:
        for seed in suite.seeds:
            check_alike([run for run in runs if run.group is group and run.seed == seed])
    return runs


def check_metric(suite: Suite, tasks: dict[str, Task]) -> None:
    """Check that a suite has one metric, and that its target is a value of it.

    Args:
        suite: The suite.
        tasks: What each entry predicts, by its label.

    Raises:
        ValueError: Names the entries, or the target.
    """
    (first, task), *others = tasks.items()
    for label, other in others:
        if other.monitor != task.monitor:
            kinds = " and ".join(type(one).__name__ for one in (task, other))
            raise ValueError(
                f"{first} and {label} have different metrics (data.task {kinds}): give each task "
                "a suite of its own"
            )
    if suite.target is not None and task.is_share and suite.target > 1:
        raise ValueError(
            f"target: {suite.target} is above the largest {task.monitor}; give 1 or less"
        )


def check_alike(runs: Sequence[Run]) -> None:
    """Check that the runs of one group and seed can be compared.

    All runs must be evaluated on the same images. All methods must have the same partition, and so
    must every pair of runs with the same partition settings. Runs with the same network must have
    the same initial weights.

    Args:
        runs: The runs of one group and seed.

    Raises:
        ValueError: Two runs differ; the message names their entries and the keys that differ.
    """
    for first, other in combinations(runs, 2):
        two = (
            f"{first.group.title}: {first.entry.label} and {other.entry.label} (seed {first.seed})"
        )
        # Where named data sets lie has no effect.
        keys = (*EVALUATION, "root") if first.data.get("image_size") else EVALUATION
        if differing := _differing(first, other, keys):
            raise ValueError(f"{two} are evaluated on different data: {differing}")
        if first.partition != other.partition:
            of_partition = sorted({*first.data, *other.data} - {*NOT_IN_THE_PARTITION})
            differing = _differing(first, other, of_partition)
            if not differing:
                raise ValueError(
                    f"{two}: the partitions differ though the settings of data are the same"
                )
            if first.entry.role == other.entry.role == "method":
                raise ValueError(f"{two} have different partitions: {differing}")
        # A method may have weights in addition to those of the network.
        same = select(first.weights, other.weights) == select(other.weights, first.weights)
        if _network(first) == _network(other) and not same:
            raise ValueError(f"{two}: the initial weights differ though the network is the same")


def _differing(first: Run, other: Run, keys: Sequence[str]) -> str:
    """The keys of ``data`` that differ, with their values and the remedy; empty if none does."""
    found = ""
    for key in keys:
        one, another = first.data.get(key), other.data.get(key)
        if one != another:
            found += f"data.{key} is {one} and {another}; "
    remedy = (
        "set the same value in the group's overrides, or move one of the entries to another group"
    )
    return found and found + remedy


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """The keys that several entries of a group have with different values, with these values.

    A key of one entry alone is none, and folders and seeds do not count.

    Args:
        runs: The runs of the group.
    """
    values: dict[str, dict[str, list[str]]] = {}
    for run in {run.entry.label: run for run in runs}.values():
        for key, value in flat("", json.loads(_canonical(run.resolved.config))):
            if key.endswith("model.class_path"):
                continue
            values.setdefault(key, {}).setdefault(str(value), []).append(run.entry.label)
    found = []
    for key, labels in sorted(values.items()):
        if len(labels) > 1:
            each = (f"{value} ({', '.join(named)})" for value, named in labels.items())
            found.append(f"{key}: {'; '.join(each)}")
    return found


def flat(prefix: str, config: Any) -> Iterator[tuple[str, Any]]:
    """The plain values of nested mappings with their dotted keys, without ``init_args``."""
    if not isinstance(config, dict):
        yield prefix, config
        return
    for name, value in config.items():
        key = prefix if name == "init_args" else f"{prefix}.{name}".lstrip(".")
        yield from flat(key, value)


def _network(run: Run) -> Any:
    return run.resolved.config["model"]["init_args"].get("network")


def partition_key(data: Keys) -> str:
    """The keys of ``data`` that the partition depends on, with their values, as JSON; a class with
    empty ``init_args`` is the same as one without.
    """
    kept = dict(flat("", exclude(data, NOT_IN_THE_PARTITION)))
    return json.dumps(kept, sort_keys=True, default=str)


def _run(
    group: SuiteGroup,
    entry: SuiteEntry,
    seed: int,
    resolved: Resolved,
    drawn: Drawn,
    latest: dict[tuple[str, ...], FederatedDataModule],
    folder: Path,
) -> Run:
    """A run; each partition is drawn once, and its samples are hashed once and kept until the next
    one is drawn, to refuse methods that cannot train on them.
    """
    data = resolved.config["data"]
    key = (partition_key(data), str(data.get("root")), str(data.get("max_test_images")), str(seed))
    os.environ["PL_GLOBAL_SEED"] = str(seed)  # as Lightning's seed_everything does
    if key not in drawn:
        datamodule = copy.copy(resolved.datamodule)  # its images are not kept
        datamodule.prepare_data()
        datamodule.setup("fit")
        drawn[key] = datamodule.split.hash, datamodule.own_data_hash()
        latest.clear()
        latest[key] = datamodule
    partition, samples = drawn[key]
    weights = initial_weights(resolved.model)
    if key in latest:
        try:
            resolved.refuse(latest[key])
        except ValueError as error:
            raise ValueError(f"{entry.label}: {error}") from error
    config = _canonical(resolved.config)
    parts = [config, seed, partition + samples, hash_of(weights), code_version()]
    path = folder / slug(entry.label) / f"seed_{seed}_{hash_of(parts)[:16]}"
    return Run(group, entry, seed, resolved, partition, weights, path, resolved.datamodule.task)


def initial_weights(model: FederatedAlgorithm) -> dict[str, str]:
    """Hashes of the initial weights of a model's network under the current seed, by name.

    The model is not changed.

    Buffers, such as running statistics, count if a file gives them (``model.init_from``): another
    file of the same path makes another run.
    """
    model = copy.deepcopy(model)
    model.configure_model()
    buffers = model.network.named_buffers() if model.init_from is not None else ()
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in (*model.network.named_parameters(), *buffers)
    }


def hash_of(values: Any) -> str:
    """One hash of plain values, such as the hashes of all initial weights."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@cache
def code_version() -> str:
    """The version of this package; in a checkout with its commit, and a mark if files were changed
    since.
    """
    folder = Path(__file__).parent.parent.parent
    commit = ""
    if (folder / ".git").exists():
        git = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
        found = subprocess.run(git, cwd=folder, capture_output=True, text=True, check=False)
        commit = found.stdout.strip()
    return "+".join(filter(None, [__version__, commit]))


def _canonical(config: Keys) -> str:
    """The configuration without :data:`NO_EFFECT`, as JSON."""
    kept = copy.deepcopy(config)
    for key in NO_EFFECT:
        group, _, name = key.rpartition(".")
        (kept.get(group, {}) if group else kept).pop(name, None)
    return json.dumps(kept, sort_keys=True, default=str)


def slug(text: str) -> str:
    """The beginning of a text in lower-case letters, digits and underscores, for use in a file
    name.
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:LONGEST].strip("_") or "unnamed"
