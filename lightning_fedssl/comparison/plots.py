"""The plots of a comparison: final accuracies, accuracy against rounds, bytes and simulated time, and pseudo-labels.

matplotlib is imported only when a plot is drawn, because its import is slow and most commands draw nothing.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedssl.comparison.report import Line
from lightning_fedssl.comparison.results import Result, Spread, spread
from lightning_fedssl.storage.temporary import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#444444")
"""Colours that colour-blind people can distinguish (after Okabe and Ito)."""

_STYLES = ("-", "--", "-.", ":")
_BOUND_STYLES = ("--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)))
_BOUND = "#8a8a8a"
_DPI = 150
_HALF, _WHOLE, _TICK = 38, 75, 44
"""The most characters of a line of a label, in a legend of two columns, of one, and beside an axis: more narrow it."""

_PANEL, _LEGEND_LINE = 3.7, 0.17
"""The height of a panel of curves with its title and axis, and of a line of its legend, in inches."""

FORMATS = (".png", ".svg", ".pdf")
"""The file formats of every plot: a bitmap for web pages, and vector graphics for papers."""


@dataclass(frozen=True)
class Curves:
    """One kind of curve: what its axes show.

    Attributes:
        title: The title of the plot.
        across: The label of the horizontal axis.
        up: The label of the vertical axis, which shows a share in per cent.
        points: The points of a run.
        x: The horizontal coordinate of a point.
        y: The vertical coordinate of a point, from 0 to 1.
    """

    title: str
    across: str
    up: str
    points: Callable[[Result], Sequence[Any]]
    x: Callable[[Any], float]
    y: Callable[[Any], float]

    def of(self, line: Line) -> list[list[tuple[float, float]]]:
        """The points of the seeds that have any, as x and y in per cent, at the rounds in which a seed has a y.

        They end with the shortest run: a callback may have stopped it. What a seed lacks is NaN.
        """
        seeds = [self.points(result) for result in line.results.values()]
        curves = [{p.round: (self.x(p), 100 * self.y(p)) for p in points} for points in seeds if points]
        last = min((max(curve) for curve in curves), default=0)
        known = {n for curve in curves for n, (_, y) in curve.items() if n <= last and math.isfinite(y)}
        return [[curve.get(n, (math.nan, math.nan)) for n in sorted(known)] for curve in curves]


_BY_ROUND = attrgetter("round")
_ACCURACY = "validation accuracy, per cent", attrgetter("curve")
_LABELS = attrgetter("labels")

KINDS = {
    "rounds": Curves("accuracy against round", "round", *_ACCURACY, _BY_ROUND, attrgetter("accuracy")),
    "bytes": Curves(
        "accuracy against megabytes sent by and to the clients", "megabytes sent by and to the clients", *_ACCURACY,
        lambda point: point.bytes / 1e6, attrgetter("accuracy"),
    ),
    "time": Curves(
        "accuracy against simulated seconds", "simulated seconds", *_ACCURACY, attrgetter("seconds"),
        attrgetter("accuracy"),
    ),
    "mask_rate": Curves(
        "confident pseudo-labels", "round", "clients' images with a\nconfident pseudo-label, per cent", _LABELS,
        _BY_ROUND, attrgetter("mask_rate"),
    ),
    "confident_accuracy": Curves(
        "right ones among the confident pseudo-labels", "round", "confident pseudo-labels\nthat are right, per cent",
        _LABELS, _BY_ROUND, attrgetter("confident_accuracy"),
    ),
}  # fmt: skip
"""The curves of a comparison, by the names of their files."""

Groups = dict[str, list[Line]]
"""Entries with their results, by the title of their group."""


def draw(folder: Path, title: str, groups: Groups, target: float | None) -> dict[str, str]:
    """Draw every plot for which there are results.

    Args:
        folder: The folder for the files.
        title: The comparison's title.
        groups: The results.
        target: An accuracy to mark, from 0 to 1.

    Returns:
        The names of the PNG files by their titles; empty without results. The other :data:`FORMATS` are next to them.
    """
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a label may have dollar signs
        return _draw_all(folder, title, groups, target)


def _draw_all(folder: Path, title: str, groups: Groups, target: float | None) -> dict[str, str]:
    tested = _those(groups, lambda line: bool(line.accuracies))
    groups = _those(groups, lambda line: bool(line.results))
    files = {}
    if tested:
        files["test accuracy of every run"] = "final.png"
        _final(folder / "final.png", title, tested)
    for name, kind in KINDS.items():
        if any(_places(line, kind) for lines in groups.values() for line in lines if not line.is_bound):
            draw_curves(folder / f"{name}.png", title, groups, name, target)
            files[kind.title] = f"{name}.png"
    return files


def _those(groups: Groups, chosen: Callable[[Line], bool]) -> Groups:
    """The groups with the chosen ones of their entries; no group without an entry."""
    kept = {name: [line for line in lines if chosen(line)] for name, lines in groups.items()}
    return {name: lines for name, lines in kept.items() if lines}


def _figure(rows: int, columns: int, width: float, height: float, **kwargs: Any) -> tuple[Any, Any]:
    """A figure without a display, and its axes ``(rows, columns)``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def _save(figure: Any, path: Path, title: str, note: str) -> None:
    """Write a figure in every format, with a note that explains its marks."""
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    figure.supxlabel(note, fontsize=8, x=0.01, ha="left", color="#6a6a6a")
    for suffix in FORMATS:
        replace_file(path.with_suffix(suffix), partial(figure.savefig, dpi=_DPI))


def colours_of(lines: Sequence[Line]) -> dict[str, tuple[str, Any]]:
    """A colour and a line style for every method, by its label; bounds are grey."""
    methods = [line.entry.label for line in lines if not line.is_bound]
    bounds = [line.entry.label for line in lines if line.is_bound]
    chosen: dict[str, tuple[str, Any]] = {
        label: (PALETTE[i % len(PALETTE)], _STYLES[i // len(PALETTE) % 4]) for i, label in enumerate(methods)
    }
    return chosen | dict(zip(bounds, ((_BOUND, style) for style in cycle(_BOUND_STYLES)), strict=False))


def _final(path: Path, title: str, groups: Groups) -> None:
    """Draw one row for every entry: a dot per seed, and the mean as a line with its value."""
    sizes = [len(lines) for lines in groups.values()]
    figure, axes = _figure(
        len(groups), 1, 7.6, 0.9 + 0.32 * sum(sizes) + 0.55 * len(sizes), sharex=True,
        gridspec_kw={"height_ratios": [size + 0.6 for size in sizes]},
    )  # fmt: skip
    for place, (name, lines) in zip(axes[:, 0], groups.items(), strict=True):
        _final_group(place, name, lines)
    axes[-1, 0].set_xlabel("test accuracy, per cent")
    shown = [100 * value for lines in groups.values() for line in lines for value in line.accuracies.values()]
    low, high = max(0, 5 * math.floor(min(shown) / 5) - 2), 5 * math.ceil(max(shown) / 5)
    axes[-1, 0].set_xlim(low, high + 0.08 * (high - low))  # room for the numbers
    axes[-1, 0].set_xticks([tick for tick in range(0, 101, 10 if high - low > 30 else 5) if low <= tick <= high])
    _save(
        figure,
        path,
        title,
        "Dots: single seeds. Light bar: lowest to highest seed. Line and number: mean over the seeds.",
    )


def _final_group(axes: Axes, name: str, lines: Sequence[Line]) -> None:
    ordered = sorted(lines, key=lambda line: line.mean)
    colours = colours_of(lines)
    for row, line in enumerate(ordered):
        values = [100 * value for value in line.accuracies.values()]
        colour, _ = colours[line.entry.label]
        mean = spread(values).mean
        axes.plot([min(values), max(values)], [row, row], color=colour, alpha=0.35, linewidth=6, solid_capstyle="round")
        axes.plot(values, [row] * len(values), "o", color=colour, markersize=4, alpha=0.75, markeredgewidth=0)
        axes.plot([mean, mean], [row - 0.32, row + 0.32], color=colour, linewidth=2)
        axes.text(1.0, row, f"{mean:.1f}", transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
    axes.set_yticks(range(len(ordered)), [textwrap.fill(line.entry.label, _TICK) for line in ordered], fontsize=8)
    for label, line in zip(axes.get_yticklabels(), ordered, strict=True):
        if line.is_bound:
            label.set(color="#6a6a6a", style="italic")
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.set_title(name, fontsize=10, loc="left")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw_curves(path: Path, title: str, groups: Groups, name: str, target: float | None) -> None:
    """Draw one panel per group: the mean over seeds as a line, plus and minus one standard deviation as a band.

    Args:
        path: The PNG file; the other :data:`FORMATS` are written next to it.
        title: The figure's title.
        groups: The results by the titles of their groups.
        name: What the curves show, one of :data:`KINDS`.
        target: A validation accuracy to mark, from 0 to 1.
    """
    kind = KINDS[name]
    target = target if kind.up == _ACCURACY[0] else None
    columns = min(2, len(groups))
    rows = math.ceil(len(groups) / columns)
    height = _PANEL + _LEGEND_LINE * max(_legend_lines(lines) for lines in groups.values())
    figure, axes = _figure(rows, columns, 0.8 + 5.6 * columns, height * rows)
    for place, (group, lines) in zip(axes.flat, groups.items(), strict=False):
        _curves_of_group(place, group, lines, kind, target)
        place.set_ylabel(kind.up)
    for unused in axes.flat[len(groups) :]:
        unused.set_visible(False)
    _save(
        figure,
        path,
        title,
        "Line: mean over the seeds. Band: plus and minus one standard deviation. Grey: last value of a bound.",
    )


def _curves_of_group(axes: Axes, name: str, lines: Sequence[Line], kind: Curves, target: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    colours = colours_of(lines)
    for line in lines:
        colour, style = colours[line.entry.label]
        look: dict[str, Any] = {"color": colour, "linestyle": style, "label": line.entry.label}
        if line.is_bound:
            if ends := [curve[-1][1] for curve in kind.of(line) if curve]:
                axes.axhline(statistics.fmean(ends), linewidth=1.3, **look)
        elif places := _places(line, kind):
            curves = [[y for _, y in curve] for curve in kind.of(line)]
            stats = [_spread_of_known(values) for values in zip(*curves, strict=True)]
            marker = "o" if len(places) == 1 else None  # a line through one point is invisible
            axes.plot(places, [s.mean for s in stats], linewidth=1.7, marker=marker, **look)
            if len(curves) > 1:
                low, high = [s.mean - s.std for s in stats], [min(s.mean + s.std, 100.0) for s in stats]
                axes.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
    if target is not None:
        axes.axhline(100 * target, color="#222222", linewidth=0.8, alpha=0.6)
        axes.annotate(f"{target:.0%}", (0, 100 * target), xytext=(3, 2), textcoords="offset points", fontsize=8)
    axes.set(xlabel=kind.across, ylim=(_lowest(lines, kind), 101), xlim=(0, None))
    axes.set_title(name, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if kind.across == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles, [textwrap.fill(label, _WHOLE) for label in labels], fontsize=8, frameon=False, loc="upper left",
        bbox_to_anchor=(0, -0.14), ncols=_legend_columns(labels),
    )  # fmt: skip


def _spread_of_known(values: Sequence[float]) -> Spread:
    """The spread over the seeds that have a value: a round without confident pseudo-labels has no accuracy of them."""
    known = [value for value in values if math.isfinite(value)]
    return spread(known) if known else Spread(math.nan, math.nan, 0)


def _legend_columns(labels: Sequence[str]) -> int:
    return 2 if max(map(len, labels), default=0) <= _HALF else 1


def _legend_lines(lines: Sequence[Line]) -> int:
    """The number of lines of a group's legend."""
    labels = [line.entry.label for line in lines]
    return math.ceil(sum(len(textwrap.wrap(label, _WHOLE)) for label in labels) / _legend_columns(labels))


def _lowest(lines: Sequence[Line], kind: Curves) -> float:
    """The lower limit of the vertical axis in per cent: below every curve, and below the last point of bounds."""
    shown = [
        y
        for line in lines
        for curve in kind.of(line)
        for _, y in (curve[-1:] if line.is_bound else curve)
        if math.isfinite(y)
    ]
    return max(0.0, 5 * math.floor(min(shown, default=0.0) / 5) - 5)


def _places(line: Line, kind: Curves) -> list[float]:
    """The horizontal coordinates of an entry's points, as means over seeds; empty if this kind was not logged."""
    places = [_spread_of_known([x for x, _ in points]).mean for points in zip(*kind.of(line), strict=True)]
    return places if places and math.isfinite(places[-1]) and places[-1] > 0 else []
