"""A suite: the configurations to compare, their seeds and their groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Keys = dict[str, Any]
"""Keys of a configuration with their values, nested or with dots."""

TAKEN = {"seed_everything": "seeds", "trainer.default_root_dir": "--output"}
"""Keys that the comparison sets for every run, and what to use instead."""


@dataclass
class SuiteEntry:
    """One row of a comparison's tables.

    Args:
        label: Its name in tables and curves.
        config: A configuration, as for ``fit --config``, or several; later ones override earlier
            ones.
        role: ``method``, or ``bound``: a lower or upper bound for the methods of its group. The
            tables show the difference to the first bound of a group.
        overrides: Keys that override the configuration, nested or with dots (``data.num_labels:
            all``).
    """

    label: str
    config: str | list[str]
    role: Literal["method", "bound"] = "method"
    overrides: Keys = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The configurations in order."""
        return [self.config] if isinstance(self.config, str) else list(self.config)


@dataclass
class SuiteGroup:
    """Entries that are compared with each other: for each seed, all methods of a group have the
    same partition.

    Args:
        title: What the entries have in common, such as the labels and the partition.
        entries: The methods and bounds.
        overrides: Keys that override every entry's configuration; the entry's own overrides win
            over them.
        note: An explanation for readers, printed below the table.
    """

    title: str
    entries: list[SuiteEntry]
    overrides: Keys = field(default_factory=dict)
    note: str = ""


@dataclass
class Suite:
    """A comparison of configurations over seeds.

    Args:
        title: What is compared.
        groups: The groups of entries.
        seeds: Values of ``seed_everything``; each entry is run with every seed.
        target: A value of the task's first metric, such as an accuracy from 0 to 1; the tables
            show rounds, bytes and simulated seconds until the model is first as good on the
            validation images (``val/accuracy``).
        overrides: Keys that override every configuration; the overrides of groups and entries win
            over them.
        note: An explanation for readers, printed below the title.

    Raises:
        ValueError: A value is duplicated or out of range; the message names the key.
    """

    title: str
    groups: list[SuiteGroup]
    seeds: list[int] = field(default_factory=lambda: [0])
    target: float | None = None
    overrides: Keys = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(problem)

    @property
    def entries(self) -> list[SuiteEntry]:
        """The entries of all groups."""
        return [entry for group in self.groups for entry in group.entries]

    def _problems(self) -> Iterator[str]:
        if not self.seeds or min(self.seeds) < 0:
            yield f"seeds: {self.seeds}: give at least one whole number from 0, such as [0]"
        if self.target is not None and self.target <= 0:
            yield f"target: {self.target}: give a number above 0, such as an accuracy of 0.9"
        named: dict[str, list[Any]] = {
            "seeds": [*self.seeds],
            "groups, titles": [group.title for group in self.groups],
            "groups, labels": [entry.label for entry in self.entries],
        }
        for place, values in named.items():
            if doubled := [value for value, count in Counter(values).items() if count > 1]:
                yield f"{place}: {doubled[0]!r} is there twice; give each its own"
        parts: list[Any] = [self, *self.groups, *self.entries]
        for part in parts:
            for key, remedy in TAKEN.items():
                if _has(part.overrides, key):
                    yield (
                        f"{getattr(part, 'label', 'overrides')}: the comparison sets {key} for "
                        f"every run; leave it out, and give {remedy}"
                    )


def _has(overrides: Keys, key: str) -> bool:
    """Whether overrides have a key, nested or with dots."""
    parent, _, rest = key.partition(".")
    inner = overrides.get(parent)
    return key in overrides or (bool(rest) and isinstance(inner, dict) and _has(inner, rest))
