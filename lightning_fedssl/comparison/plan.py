"""Derives runs from a suite: resolved configurations, identical partitions and initial weights, and a name per run.

The name of a run contains hashes of everything that its result depends on: the resolved configuration with all
defaults, the seed, the partition, the initial weights, the code (the modules that a run of that method uses, without
comments) and the versions of torch, torchvision and NumPy; for data of the user's own, their content. The hashes do not
cover settings that do not affect the result: folders, data.root, data.download and the progress bar.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lightning_fedssl.comparison.code_version import code_version
from lightning_fedssl.comparison.records import rounds, unfinished
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.datamodule import FederatedDataModule

NO_EFFECT = ("trainer.default_root_dir", "trainer.enable_progress_bar", "data.root", "data.download", "seed_everything")
"""Keys that do not affect the result of a run, and the seed, which is hashed separately."""

LONGEST = 100
"""The most characters of a label in a file name."""

NOT_IN_THE_PARTITION = (
    "root", "download", "server_batch_size", "client_batch_size", "eval_batch_size", "weak", "strong", "normalize",
    "max_test_images",
)  # fmt: skip
"""Keys of ``data`` that the partition does not depend on."""

EVALUATION = ("dataset", "validation", "max_train_images", "max_test_images", "image_size")
"""Keys of ``data`` that determine the evaluation images; they must be equal within a group."""


@dataclass(frozen=True)
class Resolved:
    """A configuration with all defaults, and the objects that it describes.

    Attributes:
        text: The configuration as YAML, for ``fit --config``.
        config: The configuration as nested mappings.
        model: The algorithm, whose network is not built yet.
        datamodule: The data, which are not loaded yet.
    """

    text: str
    config: dict[str, Any]
    model: FederatedAlgorithm
    datamodule: FederatedDataModule


_Item = TypeVar("_Item")


class Shown(Protocol):
    """Goes through items and shows the progress under a title."""

    def __call__(self, items: Sequence[_Item], title: str) -> Iterable[_Item]: ...  # noqa: D102


Resolve = Callable[[SuiteEntry, Sequence[dict[str, Any]]], Resolved]
"""Reads the configurations of an entry and applies mappings of overrides; raises ValueError that names the entry."""


@dataclass(frozen=True)
class Start:
    """Hashes of a run's partition, initial weights and data.

    Attributes:
        partition: Hash of the partition, as in ``partition.json``.
        weights: Hashes of the network's initial weights, by name.
        data: Hash of data of the user's own; empty for a data set that is known by its name.
    """

    partition: str
    weights: dict[str, str]
    data: str = ""

    @property
    def weights_hash(self) -> str:
        """One hash of all initial weights."""
        return hashlib.sha256(json.dumps(self.weights).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """One seed of one entry.

    Attributes:
        group: The group of its entry.
        entry: Its entry.
        seed: ``seed_everything``.
        resolved: The entry's configuration.
        start: Hashes of its partition and initial weights.
        code: Hash of the code that it uses.
        folder: Its ``default_root_dir``; the folder's name ends with the hashes of its settings and of its code.
    """

    group: SuiteGroup
    entry: SuiteEntry
    seed: int
    resolved: Resolved
    start: Start
    code: str
    folder: Path

    @property
    def key(self) -> tuple[str, int]:
        """The label of its entry and its seed, which no other run of the suite has."""
        return self.entry.label, self.seed

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.entry.label}, seed {self.seed}"


def _silently(items: Sequence[_Item], title: str) -> Iterable[_Item]:
    return items


def plan(suite: Suite, resolve: Resolve, folder: Path, any_code: bool = False, shown: Shown = _silently) -> list[Run]:
    """The runs of a suite, ordered by seed, so that the first seeds of all entries have results early.

    Args:
        suite: The suite to compare.
        resolve: Reads configurations.
        folder: The folder for the runs.
        any_code: Reuse finished runs of the same settings even if other code made them.
        shown: Goes through items and shows the progress.

    Raises:
        ValueError: If an entry's configuration is wrong, or the runs of a group cannot be compared.
    """
    places = [(group, entry) for group in suite.groups for entry in group.entries]
    resolved = [
        (group, entry, resolve(entry, [suite.overrides, group.overrides, entry.overrides]))
        for group, entry in shown(places, "reading configurations")
    ]
    starts = _Starts()
    runs = [
        _run(group, entry, seed, one, starts.of(one, seed), folder)
        for seed, (group, entry, one) in shown(list(product(suite.seeds, resolved)), "drawing partitions and weights")
    ]
    for group in suite.groups:
        for seed in suite.seeds:
            check_alike([run for run in runs if run.group is group and run.seed == seed])
    return [_latest_of_any_code(run) for run in runs] if any_code else runs


def check_alike(runs: Sequence[Run]) -> None:
    """Check that the runs of one group and seed can be compared.

    All methods must have the same partition, and so must every pair of runs with the same partition settings. Runs
    with the same network must have the same initial weights. All runs must be evaluated on the same images.

    Args:
        runs: The runs of one group and seed.

    Raises:
        ValueError: Two runs differ; the message names their entries and the keys that differ.
    """
    for other in runs[1:]:
        _check_pair(runs[0], other, EVALUATION, "are evaluated on different data")
        if runs[0].start.data != other.start.data:
            remedy = "give them the same data.dataset and data.root"
            raise ValueError(_of_two(runs[0], other, f"read different data; {remedy}"))
    methods = [run for run in runs if run.entry.role == "method"]
    for other in methods[1:]:
        if other.start.partition != methods[0].start.partition:
            keys = sorted({*_data(other), *_data(methods[0])} - {*NOT_IN_THE_PARTITION})
            _check_pair(methods[0], other, keys, "have different partitions")
    for first, other in ((a, b) for i, a in enumerate(runs) for b in runs[i + 1 :]):
        if _partition_keys(first) == _partition_keys(other) and first.start.partition != other.start.partition:
            raise ValueError(_of_two(first, other, "the partitions differ though the settings of data are the same"))
        if _network(first) == _network(other) and not _begin_alike(first.start.weights, other.start.weights):
            raise ValueError(_of_two(first, other, "the initial weights differ though the network is the same"))


def _check_pair(first: Run, other: Run, keys: Sequence[str], what: str) -> None:
    a, b = _data(first), _data(other)
    differing = [key for key in keys if a.get(key) != b.get(key)]
    if differing:
        values = "; ".join(f"data.{key} is {_brief(a.get(key))} and {_brief(b.get(key))}" for key in differing)
        remedy = "set the same value in the group's overrides, or move one of the entries to another group"
        raise ValueError(_of_two(first, other, f"{what}: {values}; {remedy}"))


def _of_two(first: Run, other: Run, problem: str) -> str:
    return f"{first.group.title}: {first.entry.label} and {other.entry.label} (seed {first.seed}) {problem}"


def _brief(value: Any) -> str:
    if isinstance(value, dict) and "class_path" in value:
        arguments = ", ".join(f"{k}={v}" for k, v in value.get("init_args", {}).items())
        return f"{value['class_path'].rpartition('.')[2]}({arguments})"
    return str(value)


def _data(run: Run) -> dict[str, Any]:
    data: dict[str, Any] = run.resolved.config["data"]
    return data


def _network(run: Run) -> Any:
    return run.resolved.config["model"]["init_args"].get("network")


def _begin_alike(weights: dict[str, str], others: dict[str, str]) -> bool:
    """Whether weights of the same name are equal; a method may have weights in addition to those of the network."""
    return all(weights[name] == others[name] for name in weights.keys() & others.keys())


def _partition_keys(run: Run) -> str:
    return partition_key(_data(run))


def partition_key(data: dict[str, Any]) -> str:
    """The keys of ``data`` that the partition depends on, with their values, as JSON."""
    return json.dumps({k: v for k, v in data.items() if k not in NOT_IN_THE_PARTITION}, sort_keys=True, default=str)


class _Starts:
    """Draws partitions and initial weights; each partition is drawn once."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[str, str, int], tuple[str, str]] = {}

    def of(self, resolved: Resolved, seed: int) -> Start:
        """The hashes of a run with this seed."""
        with _global_seed(seed):
            partition, data = self._draw(resolved, seed)
            return Start(partition, initial_weights(resolved.model), data)

    def _draw(self, resolved: Resolved, seed: int) -> tuple[str, str]:
        """Hashes of the partition and of the data."""
        data = resolved.config["data"]
        key = (partition_key(data), f"{resolved.datamodule.root} {data.get('max_test_images')}", seed)
        if key not in self._drawn:
            resolved.datamodule.prepare_data()
            resolved.datamodule.setup("fit")
            self._drawn[key] = resolved.datamodule.split.hash, resolved.datamodule.own_data_hash()
        return self._drawn[key]


def initial_weights(model: FederatedAlgorithm) -> dict[str, str]:
    """Hashes of the initial weights of a model's network under the current seed, by name; the model is not changed.

    Buffers, such as running statistics, count if a file gives them (``model.init_from``): another file of the same path
    makes another run. Otherwise code and seed determine them, which a run's name contains already.
    """
    model = copy.deepcopy(model)
    model.configure_model()
    buffers = model.network.named_buffers() if model.init_from is not None else ()
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in (*model.network.named_parameters(), *buffers)
    }


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    before = os.environ.get("PL_GLOBAL_SEED")
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    try:
        yield
    finally:
        del os.environ["PL_GLOBAL_SEED"]
        if before is not None:
            os.environ["PL_GLOBAL_SEED"] = before


def _run(group: SuiteGroup, entry: SuiteEntry, seed: int, resolved: Resolved, start: Start, folder: Path) -> Run:
    parts = [_canonical(resolved.config), seed, start.partition, start.weights_hash, *filter(None, [start.data])]
    settings = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    code = code_version(resolved.config, type(resolved.datamodule))
    name = f"seed_{seed}_{settings[:12]}_{code[:8]}"
    return Run(group, entry, seed, resolved, start, code, folder / slug(entry.label) / name)


def _latest_of_any_code(run: Run) -> Run:
    """The run if it is finished, else the newest finished run that differs from it only in the code."""
    settings = run.folder.name.rpartition("_")[0]
    folders = sorted(run.folder.parent.glob(f"{settings}_*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    finished = [folder for folder in (run.folder, *folders) if not unfinished(rounds(folder))]
    return replace(run, folder=finished[0], code=finished[0].name.rpartition("_")[2]) if finished else run


def _canonical(config: dict[str, Any]) -> str:
    """The configuration without :data:`NO_EFFECT`, as JSON."""
    kept = copy.deepcopy(config)
    for key in NO_EFFECT:
        group, _, name = key.rpartition(".")
        (kept.get(group, {}) if group else kept).pop(name, None)
    return json.dumps(kept, sort_keys=True, default=str)


def slug(text: str) -> str:
    """The beginning of a text in lower-case letters, digits and underscores, for use in a file name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:LONGEST].strip("_") or "unnamed"
