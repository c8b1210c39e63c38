"""Writes the table of docs/settings.md and draws its picture: ``python docs/build_settings.py``.

Both come from benchmarks/results/settings.csv, the ``results.csv`` of ``lightning-fedssl compare settings.yaml``; the
last columns of the table come from settings_cifar10.csv, the same with ``--data.dataset cifar10``.
"""

from __future__ import annotations

import csv
import re
import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

from matplotlib import pyplot as plt

from build_pictures import GREY, INK, bare, save
from build_results import DOCS, RESULTS
from lightning_fedssl.comparison.verdicts import FEWEST, Paired, interval

PAGE = DOCS / "settings.md"
MARKS = "<!-- table of build_settings.py -->"
HEAD = [
    "| | IID | against the labels alone | Dir(0.3) | against the labels alone | CIFAR-10, IID | CIFAR-10, Dir(0.3) |",
    "|---|---|---|---|---|---|---|",
]
SETTINGS = {
    "server": "100 labels at the server",
    "clients": "A tenth of the labels, at 20 clients",
    "full": "Full labels at 2 clients of 20",
    "mismatch": "Class mismatch, labels at 20 clients",
}
SKEWS = ("IID", "Dir(0.3)")
CIFAR = ("CIFAR-10, IID", "CIFAR-10, Dir(0.3)")
PALE = "#7f8ede"
"""The colour of Dir(0.3)."""
REACH = 18
"""Points to either side in the picture."""

Values = dict[int, float]
"""Test accuracies in per cent by seed."""


def measured() -> dict[str, dict[str, dict[str, Values]]]:
    """The accuracies of the finished runs by setting, method and skew; those on CIFAR-10 under the names of CIFAR."""
    found: dict[str, dict[str, dict[str, Values]]] = {name: {} for name in SETTINGS}
    for name in ("settings.csv", "settings_cifar10.csv"):
        with (RESULTS / name).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                method, setting, skew = re.fullmatch(r"(.+) \((\w+), (.+)\)", row["label"]).groups()  # type: ignore[union-attr]
                if row["status"] == "finished":
                    column = f"CIFAR-10, {skew}" if "cifar10" in name else skew
                    values = found[setting].setdefault(method, {}).setdefault(column, {})
                    values[int(row["seed"])] = 100 * float(row["test_accuracy"])
    return found


def against_labels(methods: dict[str, dict[str, Values]], method: str, skew: str) -> Paired | None:
    """The differences of a method to the labels alone of its setting; None without a seed of both."""
    (alone,) = [name for name in methods if name.endswith("labels alone")]
    reference = methods[alone].get(skew, {})
    values = methods[method].get(skew, {}) if method != alone else {}
    differences = [value - reference[seed] for seed, value in values.items() if seed in reference]
    return interval(differences) if differences else None


def cells(methods: dict[str, dict[str, Values]], method: str) -> Iterator[str]:
    """Mean accuracy and difference of a method with each skew; on CIFAR-10 the difference, or that of the labels."""
    for skew in (*SKEWS, *CIFAR):
        values, found = methods[method].get(skew), against_labels(methods, method, skew)
        mean = f"{statistics.mean(values.values()):.1f}" if values else ""
        if skew in SKEWS:
            yield mean
        if found is None:
            yield mean if skew in CIFAR else ""
        elif found.count < FEWEST:
            yield f"{found.mean:+.1f} ({found.count} of 3 seeds)"
        else:
            text = f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
            yield text if found.low < 0 < found.high else f"**{text}**"


def table() -> list[str]:
    """The rows of all settings."""
    rows = list(HEAD)
    for setting, methods in measured().items():
        for method in methods:
            name = f"**{SETTINGS[setting]}**: {method}" if method.endswith("labels alone") else method
            rows.append(f"| {name} | {' | '.join(cells(methods, method))} |")
    return rows


def picture() -> None:
    """The differences to the labels alone with their intervals: a line for IID, and a paler one below for Dir(0.3)."""
    rows = [(name, m) for name, methods in measured().items() for m in methods if "labels" not in m.lower()][::-1]
    figure, axes = plt.subplots(figsize=(3.0, 0.9 + 0.3 * len(rows)))
    for place, (setting, method) in enumerate(rows):
        for skew, color, shift in zip(SKEWS, (INK, PALE), (0.15, -0.17), strict=True):
            _interval(axes, place + shift, against_labels(measured()[setting], method, skew), color)
    for place in (i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]):
        axes.axhline(place - 0.5, color=GREY, lw=0.7)
    axes.axvline(0, color=INK, lw=1)
    axes.set(xlim=(-REACH, REACH), ylim=(-0.6, len(rows) - 0.4), yticks=range(len(rows)))
    axes.set_xlabel("points above the labels alone", color=INK)
    axes.set_yticklabels(
        [textwrap.fill(f"{method} ({setting})", 24) for setting, method in rows], fontsize=8.5, color=INK
    )
    for skew, color, across in zip(SKEWS, (INK, PALE), (0.02, 0.24), strict=True):
        axes.text(across, 1.0, skew, color=color, fontsize=10, weight="bold", transform=axes.transAxes)
    bare(axes)
    save(figure, "settings")


def _interval(axes: Any, place: float, found: Paired | None, color: str) -> None:
    """A mean, and its interval with three seeds; an arrow where the mean is beyond the picture."""
    if found is None:
        return
    if found.count >= FEWEST:
        axes.plot([found.low, found.high], [place, place], color=color, lw=2)
    inside = found.mean > -REACH
    axes.plot(max(found.mean, 0.5 - REACH), place, "o" if inside else "<", color=color, ms=4)


def main() -> None:
    """Replace the table in the page, and draw the picture."""
    text = PAGE.read_text(encoding="utf-8")
    new = "\n".join([MARKS, "", *table(), "", MARKS])
    PAGE.write_text(re.sub(f"{MARKS}.*{MARKS}", lambda _: new, text, flags=re.DOTALL), encoding="utf-8")
    picture()


if __name__ == "__main__":
    main()
