"""A suite: the configurations to compare, their seeds and their groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class SuiteEntry:
    """One row of a comparison's tables.

    Args:
        label: Its name in tables and plots.
        config: A configuration, as for ``fit --config``, or several, of which later ones override earlier ones.
        role: ``method``, or ``bound``: a lower or upper bound for the methods of its group. The tables show the
            difference to the first bound of a group.
        overrides: Keys that override the configuration, nested or with dots (``data.num_labels: all``).
    """

    label: str = ""
    config: str | list[str] = ""
    role: Literal["method", "bound"] = "method"
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The configurations in order."""
        return [self.config] if isinstance(self.config, str) else list(self.config)


@dataclass
class SuiteGroup:
    """Entries that are compared with each other: for each seed, all methods of a group have the same partition.

    Args:
        title: What the entries have in common, such as the labels and the partition.
        entries: The methods and bounds.
        overrides: Keys that override every entry's configuration; the entry's own overrides win over them.
        note: An explanation for readers, printed below the table.
    """

    title: str = ""
    entries: list[SuiteEntry] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""


class Suite:
    """Configurations in groups, and the seeds with which each of them is run.

    Args:
        title: The comparison's title.
        groups: The groups of entries.
        seeds: ``seed_everything`` of the runs of every entry.
        target: An accuracy from 0 to 1. The tables show the rounds, bytes and simulated seconds until the validation
            accuracy (``val/accuracy``) first reaches it.
        overrides: Keys that override every configuration; the overrides of groups and entries win over them.
        note: An explanation for readers, printed below the title.

    Raises:
        ValueError: A value is missing, duplicated or out of range; the message names the key.
    """

    def __init__(
        self,
        title: str = "",
        groups: list[SuiteGroup] | None = None,
        seeds: list[int] | None = None,
        target: float | None = None,
        overrides: dict[str, Any] | None = None,
        note: str = "",
    ) -> None:
        self.title = title
        self.groups = groups or []
        self.seeds = [0] if seeds is None else seeds
        self.target = target
        self.overrides = overrides or {}
        self.note = note
        for problem in self._problems():
            raise ValueError(problem)

    @property
    def entries(self) -> list[SuiteEntry]:
        """The entries of all groups."""
        return [entry for group in self.groups for entry in group.entries]

    def _problems(self) -> Iterator[str]:
        if not self.title:
            yield "title: missing; say what is compared"
        if not self.seeds:
            yield "seeds: empty; give at least one, such as [0]"
        for seed in _doubled(self.seeds):
            yield f"seeds: {seed} is listed twice; give every seed once"
        if any(seed < 0 for seed in self.seeds):
            yield f"seeds: {min(self.seeds)} is below 0; seeds are whole numbers from 0"
        if self.target is not None and not 0 < self.target <= 1:
            yield f"target: {self.target} is not an accuracy; give a number above 0, at most 1"
        if not self.groups:
            yield "groups: missing; give a list of groups, each with a title and entries"
        for number, group in enumerate(self.groups, 1):
            yield from _problems_of(group, f"groups, no. {number}")
        for title in _doubled([group.title for group in self.groups]):
            yield f"groups: two groups have the title {title!r}; give each its own"
        for label in _doubled([entry.label for entry in self.entries]):
            yield f"groups: two entries have the label {label!r}; give each its own"


def _problems_of(group: SuiteGroup, place: str) -> Iterator[str]:
    if not group.title:
        yield f"{place}: title is missing; say what its entries have in common"
    place = f"{place} ({group.title})"
    if not group.entries:
        yield f"{place}: entries are missing; give a list of them, each with a label and a config"
    for number, entry in enumerate(group.entries, 1):
        if not entry.label:
            yield f"{place}, entry no. {number}: label is missing; give the name for tables and plots"
        if not entry.files or not all(entry.files):
            yield f"{place}, {entry.label}: config is missing; give a configuration, as for fit --config"


def _doubled(values: list[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]
