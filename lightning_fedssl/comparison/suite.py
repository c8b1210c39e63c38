"""A suite: which configurations are compared, over which seeds, in which groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class SuiteEntry:
    """One line of a comparison.

    Args:
        label: What tables and plots call it.
        config: A configuration, as for ``fit --config``; of several, the later ones win.
        role: ``method``, or ``bound``: what the methods of its group are read against. The first bound of a group is
            the one whose difference is tabled.
        overrides: Keys that are laid over the configuration, nested or with dots (``data.num_labels: all``).
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
    """Entries that are compared with each other: the methods of a group have one partition per seed.

    Args:
        title: What the group has in common.
        entries: The methods and bounds.
        overrides: Keys that are laid over every entry's configuration, before the entry's own.
        note: What a reader has to know, printed below the table.
    """

    title: str = ""
    entries: list[SuiteEntry] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""


class Suite:
    """A list of configurations and seeds, in groups of like with like.

    Args:
        title: The comparison's title.
        groups: The groups of entries.
        seeds: ``seed_everything`` of the runs of every entry.
        target: An accuracy from 0 to 1: rounds, bytes and simulated seconds until the validation accuracy
            (``val/accuracy``) first reaches it are tabled.
        overrides: Keys that are laid over every configuration, before the groups' own.
        note: What a reader has to know, printed below the title.

    Raises:
        ValueError: If something is missing, doubled or out of range; the message names the place.
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
            yield f"seeds: {seed} stands there twice; give every seed once"
        if any(seed < 0 for seed in self.seeds):
            yield f"seeds: {min(self.seeds)} is below 0; seeds are whole numbers from 0"
        if self.target is not None and not 0 < self.target <= 1:
            yield f"target: {self.target} is no accuracy; give a number above 0, at most 1"
        if not self.groups:
            yield "groups: missing; give a list of groups, each with a title and entries"
        for number, group in enumerate(self.groups, 1):
            yield from _problems_of(group, f"groups, no. {number}")
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
            yield f"{place}, entry no. {number}: label is missing; say what tables and plots shall call it"
        if not entry.files or not all(entry.files):
            yield f"{place}, {entry.label}: config is missing; give a configuration, as for fit --config"


def _doubled(values: list[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]
