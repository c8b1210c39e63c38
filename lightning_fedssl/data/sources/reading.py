"""What was read: one short report, from which a person sees what was read wrongly."""

from __future__ import annotations

import logging
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit, plural, shortened
from lightning_fedssl.functional.frozen import listed

MISSING = frozenset(
    ["", "NA", "na", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NAN", "NULL", "null", "None"]
)
"""Cells of a table that hold no value."""

UNKNOWN = MISSING | {"?"}
"""Words that name no client."""

NO_LABEL = UNKNOWN | {"-1", "-1.0"}
"""Words that stand for no label."""

FILE_NAME = "data.txt"
"""The report's file in the folder of a run."""

_MOST_LINES = 8
_LONGEST_NAME = 30
_BY_CHANCE = math.log(1e-6)
"""The logarithm of the probability below which something is not a coincidence."""

_MOST_COMPARED = 1000
"""Samples of each part of which the values are compared."""

_MOST_COLUMNS = 200
"""Features of which each is compared with the labels."""

_FEWEST_ROWS = 10
"""Fewer rows are not compared."""

_SPREAD = (0.01, 0.05, 0.5, 0.95, 0.99)
"""The quantiles that say where the values of a feature are; first and last those of all."""

_FAR = 10
"""A spread or distance of this multiple of another is not due to the choice of samples."""

_SAME_ORDER = 0.999
"""The smallest correlation between the ranks of a number and those of the same in another unit."""

_STEPS = 100
"""The smallest number of steps of a 32-bit number in the deviation of a feature."""

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
        splits = {part: split for part, split in parts.items() if split is not None}
        sizes = ", ".join(f"{len(split.labels):,} {part}" for part, split in splits.items())
        data = f"{spec.name}, {sizes} {spec.noun}s of shape {tuple(spec.in_shape)}"
        common = {"data": data, "classes": _classes(spec, splits)}
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
        for k, name in enumerate(names if labels.dim() == 2 else ()):
            of_class = labels[:, k]
            if (of_class == k).any() and not (of_class == len(names)).any():
                self.warn(
                    f"no training sample is without the class {cut(name)!r}: 0 says that a class "
                    "is absent, -1 that it is not known"
                )
        self.warn_of_names("classes", names)

    def warn_of_names(self, what: str, names: Iterable[str]) -> None:
        """Say which names differ in case, blanks, the form of a letter or a final ``.0`` alone.

        Args:
            what: What the names are of, such as ``classes``.
            names: The names, each of which counts as another one.
        """
        first: dict[str, str] = {}
        for name in names:
            other = first.setdefault(_plain_name(name), name)
            if other != name:
                self.warn(f"the {what} {cut(other)!a} and {cut(name)!a} may be one, spelled twice")
                return

    def warn_of_column(self, name: str, values: Any, labels: Any) -> None:
        """Say that a column decides the label of every row, as the label in other words does.

        Args:
            name: The column.
            values: Words or numbers ``(rows,)``; NaN and empty words are missing.
            labels: Class numbers ``(rows,)``, or one column ``(rows, outputs)`` for each label or
                number to predict; -1 and NaN are missing.
        """
        for of_one in labels.reshape(len(labels), -1).T:
            missing = np.isnan(values) if values.dtype.kind == "f" else values == ""
            labeled = ~missing & (of_one == of_one) & (of_one != -1)
            if _decides(values[labeled], of_one[labeled]):
                self.warn(
                    f"{cut(name)} decides the label in all of {labeled.sum()} rows: leave it out, "
                    f"by ignore: [{name}] of a table, if it is the label in other words"
                )
                return

    def cast(self, parts: dict[str, Tensor], names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Numbers in 32 bits; in 64 bits where the differences within a feature need them.

        Views standardise before they go on in 32 bits.

        Args:
            parts: 8-bit images, or numbers ``(N, ...)``, by the names of the parts.
            names: The names of the first features.
        """
        wide = []
        for feature, values in enumerate(_features_of(next(iter(parts.values())))):
            step = values.abs().max() * torch.finfo(torch.float32).eps
            if 0 < values.std(correction=0) < _STEPS * step:
                wide.append(names[feature] if feature < len(names) else f"feature {feature}")
        if wide:
            self.warn(
                f"{listed(wide)}: large numbers with small differences, kept in 64 bits until they "
                "are standardised; subtract a constant from them in the file, if you export a "
                "model, which takes 32 bits"
            )
        to = torch.float64 if wide else torch.float32
        return {
            name: part if part.dtype == torch.uint8 else part.to(to) for name, part in parts.items()
        }

    def compare(
        self, train: ImageSplit, unlabeled: Tensor, others: Mapping[str, ImageSplit | None]
    ) -> None:
        """Compare the parts of the data, and the features with the labels.

        Args:
            train: The training samples, those without a label among them.
            unlabeled: Which of them have no label, ``(N,)``.
            others: The test and the validation samples, by part; None for none.
        """
        labeled = train.images[~unlabeled]
        parts = {"unlabeled": train.images[unlabeled]}
        parts |= {part: split.images for part, split in others.items() if split is not None}
        for part, images in parts.items():
            if min(len(images), len(labeled)) >= _FEWEST_ROWS:
                self._warn_of_scale(part, _features_of(images), _features_of(labeled))
        columns = train.images.T if train.images.dim() == 2 else ()
        if "columns" not in self.facts:  # of a table its reader compares them
            for feature, values in enumerate(columns[:_MOST_COLUMNS]):
                self.warn_of_column(
                    f"feature {feature}", values.double().numpy(), train.labels.numpy()
                )
        if (test := others["test"]) is not None:
            self._warn_of_leak(train, test)

    def _warn_of_scale(self, part: str, values: Tensor, known: Tensor) -> None:
        """Name a feature whose values ``(features, n)`` lie far outside those of training samples,
        or the reverse.
        """
        least, low, middle, high, most = np.quantile(values, _SPREAD, axis=1)
        known_least, known_low, known_middle, known_high, known_most = np.quantile(
            known, _SPREAD, axis=1
        )
        one = high - low
        other = known_high - known_low
        far = (abs(middle - known_middle) > _FAR * (one + other)) & (one + other > 0)
        # Of a feature that is mostly zero, the spread of most values may be small by chance.
        wider = (one > _FAR * (known_most - known_least)) | (other > _FAR * (most - least))
        far |= wider & (one * other > 0)
        if far.any():
            k = far.argmax()
            self.warn(
                f"most values of {part} samples lie far outside those of the training samples, or "
                f"the reverse (of feature or channel {k}: {low[k]:.3g} to {high[k]:.3g}, in "
                f"training {known_low[k]:.3g} to {known_high[k]:.3g}): prepare all parts in the "
                "same way"
            )

    def _warn_of_leak(self, train: ImageSplit, test: ImageSplit) -> None:
        """Say how many test samples have the same content as a training sample, and which training
        samples, the first two of them, have it with different labels.
        """
        if train.images.ndim == 2 and _equal_by_chance(train.images, len(test.images)):
            return
        contents = _contents(train.images)
        training = set(contents)
        labels = train.labels.tolist() if train.labels.ndim == 1 else []
        first: dict[int, int] = {}
        for row, label in enumerate(labels):
            other = first.setdefault(contents[row], row) if label >= 0 else row
            if labels[other] != label:
                pair = f"{_named(train, other)} and {_named(train, row)}"
                self.warn(f"{pair} are the same with different labels: remove one")
                break
        same = [row for row, content in enumerate(_contents(test.images)) if content in training]
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
    samples = (train.client_ids, train.client_ids[train.labels >= 0])
    each = _with_counts(names, [_counts(owners, len(names)) for owners in samples])
    return f"{len(each)}: {listed(each)} ({spec.noun}s/with a label)"


def _plain_name(name: str) -> str:
    """A name without what people spell in several ways."""
    text = unicodedata.normalize("NFKC", name).casefold()
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    return " ".join(text.split()).removesuffix(".0")


def _decides(values: Any, labels: Any) -> bool:
    """Whether values decide the labels, and not by coincidence."""
    rows = len(labels)
    counts = Counter(labels.tolist())
    if rows < _FEWEST_ROWS or len(counts) < 2:
        return False
    if 2 * len(counts) > rows:  # numbers to predict; in another unit they may be rounded
        ranks = [part.argsort().argsort() for part in (values, labels)]
        return bool(abs(np.corrcoef(*ranks)[0, 1]) > _SAME_ORDER) and values.dtype.kind == "f"
    different = len({*values.tolist()})
    pairs = len({*zip(values.tolist(), labels.tolist(), strict=True)})
    chance = (rows - different) * math.log(max(counts.values()) / rows)
    # Where most values are different, whole rows stand several times, as those of a rare class may.
    return pairs == different and chance < _BY_CHANCE and 2 * different < rows


def _features_of(samples: Tensor) -> Tensor:
    """The values of some samples by their first dimension, ``(features, n)`` in 64 bits."""
    some = samples[:: max(1, len(samples) // _MOST_COMPARED)].detach().cpu()
    return some.transpose(0, 1).flatten(1).double()


def _equal_by_chance(rows: Tensor, others: int) -> bool:
    """Whether one of some more rows may equal a row ``(N, features)`` by chance: where few features
    have few values.
    """
    expected = math.log(len(rows)) + math.log(others)
    for column in rows.T:
        counts = column.unique(return_counts=True)[1].double()
        expected += math.log(float((counts / len(rows)).square().sum()))
    return expected > math.log(0.1)


def _named(split: ImageSplit, row: int) -> str:
    return repr(split.files[row]) if split.files else f"number {row}"


def _with_counts(names: Sequence[str], counts: Sequence[list[int]]) -> list[str]:
    """Each name with its place in every list of counts: ``a 30/10``."""
    rows = zip(names, *counts, strict=False)
    return [f"{cut(name)} {'/'.join(map(str, numbers))}" for name, *numbers in rows]


def _counts(numbers: Tensor, num_names: int) -> list[int]:
    return torch.bincount(numbers[numbers >= 0], minlength=num_names).tolist()


def _contents(images: Tensor) -> list[int]:
    return [hash(image.tobytes()) for image in images.cpu().numpy()]
