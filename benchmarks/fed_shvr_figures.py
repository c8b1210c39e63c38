"""Draws Fed-SHVR's Figs. 2 and 4 from the curves that ``fed_shvr_table1.py --every`` has written.

python benchmarks/fed_shvr_figures.py --hidden 200 --variants default literal
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import RESULTS, new_figure
from watch import rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = {
    "fedshvr 0.75 0.1": "Fed-SHVR",
    "fedshvr 0 0": "Fed-SHVR, alpha1 = alpha2 = 0",
    "fedmt": "Fed-MT",
    "fedpseudo": "Fed-Pseudo",
    "fedavg 600 tau": "FedAvg, 600 labels, steps of Fed-SHVR",
    "fedavg 600": "FedAvg, 600 labels",
    "fedavg 60000": "FedAvg, 60,000 labels",
}
"""The lines of Fig. 2 and the bounds."""

ABLATIONS = {"fedshvr 0.75 0.1": "Fed-SHVR", "fedsh 0.75 0.1": "Fed-SH", "fedsvr 0.75 0.1": "Fed-SVR"}
"""The lines of Fig. 4."""

Curves = dict[int, dict[int, dict[str, str]]]
"""Rows by seed and round."""


def main() -> None:
    """Draw the figures from the rows of the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", default="5000", help="width of the hidden layer")
    parser.add_argument("--images", default="60000", help="training images")
    parser.add_argument(
        "--variants",
        "--readings",
        dest="variants",
        nargs="+",
        default=["default"],
        help="variants of Fed-SHVR, as in the CSV; one line each",
    )
    parser.add_argument("--curves", type=Path, default=RESULTS / "fed_shvr_curves.csv", help="the CSV")
    arguments = parser.parse_args()
    scale = f"{arguments.hidden} hidden units, {arguments.images} images"
    for split, name in (("iid", "IID"), ("noniid", "not IID")):
        figure, axes = new_figure(f"MNIST, {name}, {scale}", "test accuracy, per cent")
        for label, found in lines(arguments, METHODS, split):
            line(axes, found, "accuracy", label)
        save(figure, axes, f"fed_shvr_fig2_{split}.png")
    for column, what in (("client_loss", "training loss of the clients"), ("accuracy", "std over seeds, points")):
        figure, axes = new_figure(f"MNIST, not IID, {scale}", what)
        for label, found in lines(arguments, ABLATIONS, "noniid"):
            line(axes, found, column, label, spread=column == "accuracy")
        save(figure, axes, f"fed_shvr_fig4_{'loss' if column == 'client_loss' else 'std'}.png")


def save(figure: Figure, axes: Axes, name: str) -> None:
    """Write a figure if it has at least one line."""
    if axes.lines:
        axes.legend(loc="best", fontsize=8)
        figure.savefig(RESULTS / name, dpi=120)
        print(RESULTS / name)


def lines(arguments: argparse.Namespace, cells: dict[str, str], split: str) -> Iterator[tuple[str, Curves]]:
    """Every line of a figure with its label; Fed-SHVR has one for each variant."""
    for cell, label in cells.items():
        several = cell.startswith(("fedshvr", "fedsh ", "fedsvr")) and len(arguments.variants) > 1
        for variant in arguments.variants if several else arguments.variants[:1]:
            yield (f"{label}, {variant}" if several else label), curves(arguments, cell, split, variant)


def curves(arguments: argparse.Namespace, cell: str, split: str, variant: str) -> Curves:
    """The rows of a cell; for a round that was repeated, the later row."""
    found: Curves = {}
    for row in rows(arguments.curves):
        wanted = (cell, split, arguments.hidden, arguments.images)
        of_cell = (row["cell"], row["split"], row["hidden"], row["images"]) == wanted
        if of_cell and row["reading"] in (variant, "-"):
            found.setdefault(int(row["seed"]), {})[int(row["round"])] = row
    return found


def line(axes: Axes, found: Curves, column: str, label: str, spread: bool = False) -> None:
    """The mean over seeds, at rounds that all of them have, with the range; or the population deviation."""
    if not found:
        return
    steps = sorted(set.intersection(*(set(seed) for seed in found.values())))
    values = [[float(seed[step][column]) for seed in found.values()] for step in steps]
    if spread:
        axes.plot(steps, [statistics.pstdev(v) for v in values], label=f"{label} ({len(found)} seeds)")
        return
    (drawn,) = axes.plot(steps, [statistics.mean(v) for v in values], label=f"{label} ({len(found)})")
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.2, color=drawn.get_color())


if __name__ == "__main__":
    main()
