"""The plots of a comparison, drawn from its CSV files: accuracy against rounds and bytes.

matplotlib is imported only when a plot is drawn, because its import is slow and most commands draw
nothing.
"""

from __future__ import annotations

import csv
import math
import statistics
import textwrap
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.storage.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#444444")
"""Colours that colour-blind people can distinguish (after Okabe and Ito)."""

_STYLES = ("-", "--", "-.", ":")
_BOUND = "#8a8a8a"
_DPI = 100
_LABEL = 44
"""The most characters of a line of a label."""

Row = dict[str, str]
Group = dict[str, list[Row]]
"""Finished runs of a group by their label, bounds first."""
Curves = dict[tuple[str, str], list[Row]]
"""The evaluations of a run by label and seed."""


def draw(folder: Path, title: str, without: Collection[str] = ()) -> list[str]:
    """Draw ``rounds.png`` and ``bytes.png`` from ``results.csv`` and ``curves.csv``.

    Args:
        folder: The folder of the files.
        title: The comparison's title.
        without: Labels to leave out.

    Returns:
        The names of the pictures; there is none without a run that was validated.
    """
    import matplotlib

    curves: Curves = {}
    for row in _read(folder / "curves.csv"):
        curves.setdefault((row["label"], row["seed"]), []).append(row)
    groups: dict[str, Group] = {}
    for row in sorted(_read(folder / "results.csv"), key=lambda row: row["role"] != "bound"):
        if (row["label"], row["seed"]) in curves and row["label"] not in without:
            groups.setdefault(row["group"], {}).setdefault(row["label"], []).append(row)
    with matplotlib.rc_context({"text.parse_math": False}):  # a label may have dollar signs
        for name, (across, x_of) in KINDS.items() if groups else ():
            _draw(folder / name, title, groups, curves, across, x_of)
    return [*KINDS] if groups else []


KINDS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "rounds.png": ("round", lambda row: float(row["round"])),
    "bytes.png": ("megabytes sent by and to the clients", lambda row: float(row["bytes"]) / 1e6),
}
"""The plots: the label of the horizontal axis, and the place of a point on it."""


def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def looks_of(group: Group) -> dict[str, tuple[str, str]]:
    """A colour and a line style for every label of a group; bounds are grey."""
    bounds = [label for label, runs in group.items() if runs[0]["role"] == "bound"]
    methods = [label for label in group if label not in bounds]
    found = {
        label: (PALETTE[i % len(PALETTE)], _STYLES[i // len(PALETTE) % 4])
        for i, label in enumerate(methods)
    }
    return found | {label: (_BOUND, _STYLES[1 + i % 3]) for i, label in enumerate(bounds)}


def _draw(
    path: Path,
    title: str,
    groups: dict[str, Group],
    curves: Curves,
    across: str,
    x_of: Callable[[Row], float],
) -> None:
    """Draw one panel per group: the mean over seeds as a line, plus and minus one standard
    deviation as a band.
    """
    from matplotlib.figure import Figure

    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    lines = max(math.ceil(sum(map(_lines, group)) / 2) for group in groups.values())
    figure = Figure(
        figsize=(0.8 + 5.6 * columns, (3.7 + 0.17 * lines) * rows), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False)
    for place, (name, group) in zip(axes.flat, groups.items(), strict=False):
        looks = looks_of(group)
        for label, runs in group.items():
            colour, style = looks[label]
            seeds = [curves[label, run["seed"]] for run in runs]
            look = {"color": colour, "linestyle": style, "label": textwrap.fill(label, _LABEL)}
            if runs[0]["role"] == "bound":
                place.axhline(
                    statistics.fmean(100 * float(curve[-1]["accuracy"]) for curve in seeds), **look
                )
            else:
                _band(place, seeds, x_of, **look)
        _finish(place, name, across)
    for unused in axes.flat[len(groups) :]:
        unused.set_visible(False)
    note = (
        "Line: mean over the seeds. Band: plus and minus one standard deviation. Grey: "
        "last value of a bound."
    )
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    figure.supxlabel(note, fontsize=8, x=0.01, ha="left", color="#6a6a6a")
    replace_file(path, partial(figure.savefig, dpi=_DPI))


def _lines(label: str) -> int:
    return len(textwrap.wrap(label, _LABEL))


def _band(axes: Axes, seeds: list[list[Row]], x_of: Callable[[Row], float], **look: Any) -> None:
    """Draw the mean and the deviation over seeds, up to the end of the shortest run."""
    points = list(zip(*seeds, strict=False))
    places = [statistics.fmean(map(x_of, rows)) for rows in points]
    values = [[100 * float(row["accuracy"]) for row in rows] for rows in points]
    means = [statistics.fmean(found) for found in values]
    axes.plot(places, means, linewidth=1.7, marker="o" if len(places) == 1 else None, **look)
    if len(seeds) > 1:
        deviations = [statistics.stdev(found) for found in values]
        low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
        high = [
            min(mean + deviation, 100.0) for mean, deviation in zip(means, deviations, strict=True)
        ]
        axes.fill_between(places, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _finish(axes: Axes, name: str, across: str) -> None:
    """Titles, grid and legend of a panel of curves."""
    axes.set(xlabel=across, ylabel="validation accuracy, per cent", xlim=(0, None))
    axes.set_title(name, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)
