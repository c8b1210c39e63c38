"""What was read: one short report, from which a person sees what was read wrongly."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit, plural, shortened
from lightning_fedssl.functional.frozen import listed

MISSING = frozenset(
    ["", "NA", "na", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NAN", "NULL", "null", "None"]
)
"""Cells of a table that hold no value."""

NO_LABEL = MISSING | {"?", "-1", "-1.0"}
"""Words that stand for no label."""

FILE_NAME = "data.txt"
"""The report's file in the folder of a run."""

_MOST_LINES = 8
_LONGEST_NAME = 30
_DISTINCT = 0.99
"""Rows of a table may be equal by chance; if more than this share of them differ, they are not."""

_log = logging.getLogger(__name__)


class Reading:
    """The report of a reader, which :class:`~lightning_fedssl.data.sources.base.DataSource` fills.

    ``fit`` and ``partition`` print it, and it is the file ``data.txt`` in the folder of a run.

    Args:
        key: What a warning in the log begins with.

    Attributes:
        facts: Lines by their topics, such as ``classes``.
        warnings: What is probably wrong: row, column or file, and the remedy.
    """

    def __init__(self, key: str = "data.dataset") -> None:
        self.key = key
        self.facts: dict[str, str] = {}
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Add a warning, and log it; one that is known already changes nothing.

        Args:
            text: What is wrong, where, and the remedy.
        """
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("%s: %s", self.key, text)

    def lines(self) -> list[str]:
        """All lines; warnings begin with ``!``."""
        facts = [f"{topic}: {text}" for topic, text in self.facts.items()]
        return facts + [f"! {text}" for text in self.warnings]

    def summary(self) -> str:
        """At most eight lines, warnings cut; the file of the run has all of them."""
        lines = [shortened(line) if line[0] == "!" else line for line in self.lines()]
        if len(lines) > _MOST_LINES:
            hidden = len(lines) - _MOST_LINES + 1
            lines[-hidden:] = [f"! more warnings ({hidden}): see the log, or {FILE_NAME} of a run"]
        return "\n".join(lines)

    def inspect(
        self,
        spec: DatasetSpec,
        train: ImageSplit,
        test: ImageSplit,
        validation: ImageSplit | None = None,
    ) -> None:
        """Complete the report by what all readers have in common.

        Args:
            spec: Shape, classes and clients.
            train: The training samples.
            test: The test samples.
            validation: The validation samples, if the data have some.
        """
        parts = {"training": train, "validation": validation, "test": test}
        given = {part: split for part, split in parts.items() if split is not None}
        sizes = ", ".join(f"{len(split.labels):,} {part}" for part, split in given.items())
        data = f"{spec.name}, {sizes} {spec.noun}s of shape {tuple(spec.in_shape)}"
        common = {"data": data, "classes": _classes(spec, given)}
        if spec.client_names:
            common["clients"] = _clients(spec, train)
        self.facts = common | self.facts | common  # these first, and as they are now
        if spec.pixels and train.images.max() < 64:
            self.warn(
                "no pixel is above 63 of 255: multiply values of few bits (12 in a 16-bit file, "
                "by 16)"
            )

    def warn_of_classes(self, names: Sequence[str], labels: Tensor) -> None:
        """Name the classes that no training sample has, and those that differ in spelling only.

        Args:
            names: All classes.
            labels: Labels of the training samples, -1 for none; ``(N, classes)`` of several.
        """
        counts = _counts(labels, len(names))
        counted = names[0] == "0" and labels.dim() != 2
        if empty := [cut(name) for name, count in zip(names, counts, strict=False) if not count]:
            numbers = "labels are numbered from 0 without gaps; subtract 1 if yours begin at 1"
            self.warn(
                f"no training sample has the class {listed(empty)} ({len(empty)} of {len(names)} "
                f"classes): {numbers if counted else 'it cannot be learned'}"
            )
        spelled: dict[str, str] = {}
        for name in names:
            key = " ".join(name.casefold().removesuffix(".0").split())
            if key in spelled:
                self.warn(
                    f"the classes {cut(spelled[key])!r} and {cut(name)!r} may be one, spelled twice"
                )
            spelled.setdefault(key, name)

    def warn_of_leak(self, train: ImageSplit, test: ImageSplit) -> None:
        """Say how many test samples have the same content as a training sample, and which training
        samples, the first two of them, have it with different labels.

        Rows of a table count only where rows hardly ever are equal by chance.

        Args:
            train: The training samples.
            test: The test samples.
        """
        contents = _contents(train.images)
        known = set(contents)
        if train.images.ndim == 2 and len(known) < _DISTINCT * len(train.images):
            return
        labels = train.labels.tolist() if train.labels.ndim == 1 else []
        first: dict[int, int] = {}
        for row, label in enumerate(labels):
            other = first.setdefault(contents[row], row) if label >= 0 else row
            if labels[other] != label:
                pair = f"{_named(train, other)} and {_named(train, row)}"
                self.warn(f"{pair} are the same with different labels: remove one")
                break
        same = [row for row, content in enumerate(_contents(test.images)) if content in known]
        if same:
            self.warn(
                f"{len(same)} of {len(test.images)} test samples have the content of a training "
                f"sample (the first is {_named(test, same[0])}): remove them from one of the parts"
            )


def cut(name: str) -> str:
    """A name as a report shows it: its first characters."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _classes(spec: DatasetSpec, parts: Mapping[str, ImageSplit]) -> str:
    """The classes with their counts in each part."""
    names = spec.class_names
    each = _with_counts(names, [_counts(split.labels, len(names)) for split in parts.values()])
    unknown = plural(int((parts["training"].labels < 0).sum()), f"training {spec.noun}")
    return f"{listed(each)} ({'/'.join(parts)}); {unknown} without a label"


def _clients(spec: DatasetSpec, train: ImageSplit) -> str:
    """The clients with their sizes, and how many of their samples have a label."""
    assert train.client_ids is not None  # of every source that names clients
    names = spec.client_names
    held = (train.client_ids, train.client_ids[train.labels >= 0])
    each = _with_counts(names, [_counts(owners, len(names)) for owners in held])
    return f"{len(each)}: {listed(each)} ({spec.noun}s/with a label)"


def _named(split: ImageSplit, row: int) -> str:
    return repr(split.files[row]) if split.files else f"number {row}"


def _with_counts(names: Sequence[str], counts: Sequence[list[int]]) -> list[str]:
    """Each name with its place in every list of counts: ``a 30/10``."""
    rows = zip(names, *counts, strict=False)
    return [f"{cut(name)} {'/'.join(map(str, numbers))}" for name, *numbers in rows]


def _counts(numbers: Tensor, most: int) -> list[int]:
    return torch.bincount(numbers[numbers >= 0], minlength=most).tolist()


def _contents(images: Tensor) -> list[int]:
    return [hash(image.tobytes()) for image in images.cpu().numpy()]
