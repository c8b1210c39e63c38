"""The plots of a comparison, drawn from its CSV files: the task's first metric against
rounds and bytes.

matplotlib is imported only when a plot is drawn, because its import is slow and most commands draw
nothing.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fedssl.storage.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightning_fedssl.task import Task

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#444444")
"""Colours that colour-blind people can distinguish (after Okabe and Ito)."""

_STYLES = ("-", "--", "-.", ":")
_BOUND = "#8a8a8a"
_NOTE = (
    "Line: mean over the seeds. Band: plus and minus one standard deviation. Grey: last value of a "
    "bound."
)

Row = dict[str, str]
Group = dict[str, list[Row]]
"""Finished runs of a group by their label, bounds first."""
Curves = dict[tuple[str, str], list[Row]]
"""The evaluations of a run by label and seed."""


def draw(folder: Path, title: str, task: Task) -> list[str]:
    """Draw the plots; returns the names of the files, none without a curve.

    Args:
        folder: Folder with ``results.csv`` and ``curves.csv``; the plots are written into it.
        title: The comparison's title.
        task: What the models predict.
    """
    import matplotlib

    curves: Curves = {}
    for row in _read(folder / "curves.csv"):
        curves.setdefault((row["label"], row["seed"]), []).append(row)
    groups: dict[str, Group] = {}
    for row in sorted(_read(folder / "results.csv"), key=lambda row: row["role"] != "bound"):
        if (row["label"], row["seed"]) in curves:
            groups.setdefault(row["group"], {}).setdefault(row["label"], []).append(row)
    if not groups:
        return []
    with matplotlib.rc_context({"text.parse_math": False}):  # a label may have dollar signs
        for name, (across, x_of) in KINDS.items():
            _draw(folder / name, title, groups, curves, across, x_of, task)
    return [*KINDS]


KINDS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "rounds.png": ("round", lambda row: float(row["round"])),
    "bytes.png": ("megabytes sent by and to the clients", lambda row: float(row["bytes"]) / 1e6),
}
"""The plots: the label of the horizontal axis, and the place of a point on it."""


def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def looks_of(group: Group) -> dict[str, tuple[str, str]]:
    """The colour and line style of every label; bounds are grey, and only methods count colours.

    Args:
        group: The runs of a group.
    """
    methods = cycle((colour, style) for style, colour in product(_STYLES, PALETTE))
    bounds = cycle((_BOUND, style) for style in _STYLES[1:])
    looks = {}
    for label, runs in group.items():
        looks[label] = next(bounds if runs[0]["role"] == "bound" else methods)
    return looks


def _draw(
    path: Path,
    title: str,
    groups: dict[str, Group],
    curves: Curves,
    across: str,
    x_of: Callable[[Row], float],
    task: Task,
) -> None:
    """Draw one panel per group: the mean over seeds as a line, plus and minus one standard
    deviation as a band.
    """
    from matplotlib.figure import Figure

    unit = 100 if task.is_share else 1
    label = f"validation {task.monitor}{', per cent' if task.is_share else ''}"
    figure = Figure(figsize=(9, 0.8 + 4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), squeeze=False)
    for panel, (name, group) in zip(panels.flat, groups.items(), strict=True):
        looks = looks_of(group)
        for label, runs in group.items():
            colour, style = looks[label]
            look = {"color": colour, "linestyle": style, "label": textwrap.fill(label, 30)}
            seeds = [curves[label, run["seed"]] for run in runs]
            if runs[0]["role"] == "bound":
                last = [unit * float(curve[-1][task.monitor]) for curve in seeds]
                panel.axhline(np.mean(last), **look)
            else:
                _band(panel, seeds, x_of, task, **look)
        panel.set(xlabel=across, ylabel=label, xlim=(0, None), title=name)
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title, weight="bold")
    figure.supxlabel(_NOTE, fontsize=8, color="#6a6a6a")
    replace_file(path, partial(figure.savefig, dpi=100))


def _band(
    axes: Axes, seeds: list[list[Row]], x_of: Callable[[Row], float], task: Task, **look: Any
) -> None:
    """Draw the mean and the spread over the seeds, as far as all of them have evaluations."""
    points = list(zip(*seeds, strict=False))
    places = [np.mean(list(map(x_of, rows))) for rows in points]
    values = np.array([[float(row[task.monitor]) for row in rows] for rows in points])
    values *= 100 if task.is_share else 1
    mean = values.mean(axis=1)
    axes.plot(places, mean, linewidth=1.7, marker="o" if len(places) == 1 else None, **look)
    if len(seeds) > 1:
        spread = values.std(axis=1, ddof=1)
        high = np.minimum(mean + spread, 100 if task.is_share else np.inf)
        axes.fill_between(places, mean - spread, high, color=look["color"], alpha=0.12)
