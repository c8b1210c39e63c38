"""From a suite to its runs: resolved configurations, identical partitions and initial weights, and a name per run.

A run's name holds hashes of all that its result depends on: the resolved configuration with every default filled in,
seed, the partition, the initial weights, the code (the package's modules that a run of that method reads, without
comments) and the versions of torch, torchvision and NumPy. What changes none of a run's numbers is left out: folders,
data.root, download and the progress bar.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.comparison.code_version import code_version
from lightning_fedssl.comparison.records import rounds, unfinished
from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.datamodule import FederatedDataModule

NO_EFFECT = ("trainer.default_root_dir", "trainer.enable_progress_bar", "data.root", "data.download", "seed_everything")
"""Keys that change no number of a run; the seed is hashed by itself."""

NOT_IN_THE_PARTITION = (
    "root", "download", "server_batch_size", "client_batch_size", "eval_batch_size", "weak", "strong", "normalize",
    "max_test_images",
)  # fmt: skip
"""Keys of data that the partition does not depend on."""

EVALUATION = ("dataset", "validation", "max_train_images", "max_test_images", "image_size")
"""Keys of data that say on which images a model is judged: one for a group."""


@dataclass(frozen=True)
class Resolved:
    """A configuration with every default filled in, and the objects that it describes.

    Attributes:
        text: The configuration as YAML, to be given to ``fit --config``.
        config: The same as nested mappings.
        model: The algorithm, its network not yet built.
        datamodule: The data, not yet loaded.
    """

    text: str
    config: dict[str, Any]
    model: FederatedAlgorithm
    datamodule: FederatedDataModule


Resolve = Callable[[SuiteEntry, Sequence[dict[str, Any]]], Resolved]
"""Reads an entry's configurations with mappings of keys over them; raises ValueError, naming the entry."""


@dataclass(frozen=True)
class Start:
    """What a run begins with, as hashes.

    Attributes:
        partition: Of the partition: the ``hash`` of its ``partition.json``.
        weights: Of the initial weights of the network, by name.
    """

    partition: str
    weights: dict[str, str]

    @property
    def weights_hash(self) -> str:
        """One hash for all weights."""
        return hashlib.sha256(json.dumps(self.weights).encode()).hexdigest()


@dataclass(frozen=True)
class Run:
    """One seed of one entry.

    Attributes:
        group: Its group.
        entry: Its entry.
        seed: ``seed_everything``.
        resolved: The entry's configuration.
        start: What the run begins with.
        code: A hash of the code that it reads.
        folder: Its ``default_root_dir``; the last part ends with the hashes of its settings and of its code.
    """

    group: SuiteGroup
    entry: SuiteEntry
    seed: int
    resolved: Resolved
    start: Start
    code: str
    folder: Path

    @property
    def name(self) -> str:
        """The run as it is told on the terminal."""
        return f"{self.entry.label}, seed {self.seed}"


def plan(suite: Suite, resolve: Resolve, folder: Path, any_code: bool = False) -> list[Run]:
    """The runs of a suite, seed by seed, so that a table over the first seeds is there early.

    Args:
        suite: What to compare.
        resolve: Reads configurations.
        folder: Where the runs are written.
        any_code: Take finished runs of the same settings as they are, whatever the code that made them.

    Raises:
        ValueError: If an entry's configuration is wrong, or a group compares unlike with unlike.
    """
    places = [(group, entry) for group in suite.groups for entry in group.entries]
    resolved = [resolve(entry, [suite.overrides, group.overrides, entry.overrides]) for group, entry in places]
    starts = _Starts()
    runs = [
        _run(group, entry, seed, one, starts.of(one, seed), folder)
        for seed in suite.seeds
        for (group, entry), one in zip(places, resolved, strict=True)
    ]
    for group in suite.groups:
        for seed in suite.seeds:
            check_alike([run for run in runs if run.group is group and run.seed == seed])
    return [_latest_of_any_code(run) for run in runs] if any_code else runs


def check_alike(runs: Sequence[Run]) -> None:
    """Refuse a group of one seed whose runs do not begin alike.

    Methods need one partition, and so does every pair of runs with the same settings of the partition. Runs with the
    same network need the same initial weights. All need the same images to be judged on.

    Raises:
        ValueError: Naming two entries and the keys that differ.
    """
    for other in runs[1:]:
        _check_pair(runs[0], other, EVALUATION, "are judged on other images")
    methods = [run for run in runs if run.entry.role == "method"]
    for other in methods[1:]:
        if other.start.partition != methods[0].start.partition:
            keys = sorted({*_data(other), *_data(methods[0])} - {*NOT_IN_THE_PARTITION})
            _check_pair(methods[0], other, keys, "have other partitions")
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
        remedy = "set them alike in the group's overrides, or put the entries into groups of their own"
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
    """Whether weights of the same name are equal; a method may have more than the network's."""
    return all(weights[name] == others[name] for name in weights.keys() & others.keys())


def _partition_keys(run: Run) -> str:
    return partition_key(_data(run))


def partition_key(data: dict[str, Any]) -> str:
    """The settings of data that a partition is a function of, as text."""
    return json.dumps({k: v for k, v in data.items() if k not in NOT_IN_THE_PARTITION}, sort_keys=True, default=str)


class _Starts:
    """Draws partitions and initial weights; each once."""

    def __init__(self) -> None:
        self._partitions: dict[tuple[str, int], str] = {}

    def of(self, resolved: Resolved, seed: int) -> Start:
        """What a run of this seed begins with."""
        with _global_seed(seed):
            return Start(self._partition(resolved, seed), initial_weights(resolved.model))

    def _partition(self, resolved: Resolved, seed: int) -> str:
        key = (partition_key(resolved.config["data"]), seed)
        if key not in self._partitions:
            resolved.datamodule.prepare_data()
            resolved.datamodule.setup("fit")
            self._partitions[key] = resolved.datamodule.split.hash
        return self._partitions[key]


def initial_weights(model: FederatedAlgorithm) -> dict[str, str]:
    """Hashes of the weights that a model's network begins with under the present seed; the model is left as it is."""
    model = copy.deepcopy(model)
    model.configure_model()
    return {
        name: hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, weight in model.network.named_parameters()
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
    parts = [_canonical(resolved.config), seed, start.partition, start.weights_hash]
    settings = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    code = code_version(resolved.config)
    name = f"seed_{seed}_{settings[:12]}_{code[:8]}"
    return Run(group, entry, seed, resolved, start, code, folder / slug(entry.label) / name)


def _latest_of_any_code(run: Run) -> Run:
    """The run, or the newest finished one that differs from it in code alone."""
    settings = run.folder.name.rpartition("_")[0]
    folders = sorted(run.folder.parent.glob(f"{settings}_*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    finished = [folder for folder in (run.folder, *folders) if not unfinished(rounds(folder))]
    return replace(run, folder=finished[0], code=finished[0].name.rpartition("_")[2]) if finished else run


def _canonical(config: dict[str, Any]) -> str:
    """The configuration without keys that change no number."""
    kept = copy.deepcopy(config)
    for key in NO_EFFECT:
        group, _, name = key.rpartition(".")
        (kept.get(group, {}) if group else kept).pop(name, None)
    return json.dumps(kept, sort_keys=True, default=str)


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unnamed"
