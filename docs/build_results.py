"""Writes docs/results_tables.md from the CSVs in benchmarks/results: ``python docs/build_results.py``.

Only the papers' own numbers are typed by hand. A cell without a finished run says *not run*, and a run that was stopped
says after how many rounds. ``--check`` compares the page with the CSVs and writes nothing; a test does the same.

To add a table: add a function that returns a :class:`Table` (its rows from :func:`read`, its cells from
:func:`accuracy`), and put it into :data:`TABLES`. A comparison by ``lightning-fedssl compare`` needs one line in
:data:`SUITES`.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "results_tables.md"
Row = dict[str, str]
"""A row of a CSV by its columns."""

TOLERANCE = 2.0
"""A cell of a paper is met if ours is at most this many points below it."""

INTRODUCTION = """\
# Results in tables

Test accuracy in per cent: mean ± standard deviation over the seeds, whose number is in brackets. It is that of the
sample for `compare`, and that of the population for the other tables, as in [Results](results.md), which has the
interpretations of the papers, the trials and the explanations. *Met* says that ours is at most 2 points below the
paper. A script writes this page from the CSVs (`python docs/build_results.py`), and a test compares them.
"""


@dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
        title: Its heading.
        command: The command that made the CSV.
        source: The CSV below benchmarks/results.
        columns: Names of the columns.
        rows: The cells.
    """

    title: str
    command: str
    source: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]

    def text(self) -> str:
        """The table in Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        link = f"[{self.source}](../benchmarks/results/{self.source})"
        return f"## {self.title}\n\n    {self.command}\n\n{cells}\n\nRuns: {link}.\n"


def read(source: str) -> list[Row]:
    """The rows of a CSV below benchmarks/results."""
    with (RESULTS / source).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def accuracy(
    rows: Iterable[Row],
    column: str = "accuracy",
    scale: float = 1.0,
    deviation: Callable[[Sequence[float]], float] = statistics.pstdev,
) -> str:
    """Mean, spread and number of seeds of finished runs, then the stopped ones; *not run* if there is none.

    Args:
        rows: The runs of a cell, one of each seed.
        column: The accuracy's column.
        scale: What turns it into per cent.
        deviation: The spread over two seeds or more.
    """
    found = list(rows)
    finished = [row for row in found if row.get("status", "finished") == "finished" and row[column]]
    values = [scale * float(row[column]) for row in finished]
    spread = f" ± {deviation(values):.1f}" if len(values) > 1 else ""
    parts = [f"{statistics.mean(values):.1f}{spread} ({len(values)})"] if values else []
    parts += [f"seed {row['seed']}: {row['status']} after {row['rounds']}" for row in found if row not in finished]
    return "; ".join(parts) or "not run"


def met(cell: str, paper: float | None) -> str:
    """Whether a cell reaches the paper's number; empty where one of the two is missing."""
    number = cell.partition(" ")[0]
    if paper is None or not number[0].isdigit():
        return ""
    below = paper - float(number)
    return "yes" if below <= TOLERANCE else f"no, {below:.1f} below"


# Fed-SHVR: Table I of the paper. Rows: name, the CSV's cell, and the paper's numbers at T = 1 and T = 100.
_SHVR: list[tuple[str, str, dict[int, tuple[float, float]]]] = [
    ("FedAvg, 600 labels", "fedavg 600", {1: (58.5, 37.8), 100: (88.0, 87.5)}),
    ("FedAvg, 60,000 labels", "fedavg 60000", {1: (94.4, 94.3)}),
    ("Fed-SHVR (0, 0)", "fedshvr 0 0", {1: (81.4, 34.7), 100: (92.5, 92.4)}),
    ("Fed-SHVR (0.75, 0)", "fedshvr 0.75 0", {1: (83.5, 74.4)}),
    ("Fed-SHVR (0, 0.1)", "fedshvr 0 0.1", {1: (83.1, 72.9), 100: (95.2, 95.4)}),
    ("Fed-SHVR (0.75, 0.1)", "fedshvr 0.75 0.1", {1: (83.6, 82.2), 100: (96.6, 95.5)}),
    ("*control:* FedAvg, 600 labels, Fed-SHVR's steps", "fedavg 600 tau", {}),
]


def fed_shvr(rounds: int, hidden: int) -> Table:
    """Table I after some rounds, with a number of hidden units."""
    wanted = (str(rounds), str(hidden), "60000")
    found = [r for r in read("fed_shvr_table1.csv") if (r["rounds"], r["hidden"], r["images"]) == wanted]

    def cells(name: str, cell: str, papers: dict[int, tuple[float, float]]) -> list[str]:
        line = [name]
        for split, paper in zip(("iid", "noniid"), papers.get(rounds, (None, None)), strict=True):
            runs = [r for r in found if (r["cell"], r["split"]) == (cell, split) and r["reading"] in ("-", "default")]
            ours = accuracy(runs)
            line += ["" if paper is None else f"{paper}", ours, met(ours, paper)]
        return line

    return Table(
        f"Fed-SHVR, Table I, T = {rounds}, {hidden:,} hidden units",
        f"OMP_NUM_THREADS=1 python benchmarks/fed_shvr_table1.py --root data --rounds {rounds} --hidden {hidden}",
        "fed_shvr_table1.csv",
        ("cell", "paper, IID", "ours, IID", "met", "paper, not IID", "ours, not IID", "met"),
        [cells(*row) for row in _SHVR],
    )


SUITES = {
    "digits": "All methods on the handwritten digits",
    "mnist": "SemiFL, Semi-SFL, Fed-SHVR and baselines on MNIST",
    "cifar10_500": "CIFAR-10, 500 labels, ResNet-9 of width 8",
    "fashionmnist": "Fashion-MNIST, 200 labels",
}
"""Suites of ``compare`` whose results.csv is stored, with the heading of their table."""


_COLLAPSED = "; withdrawn: its groups had collapsed into one class"

WITHDRAWN = {
    ("digits", "FedRGD"): _COLLAPSED,
    ("fedrgd", "grouping, S = 3"): _COLLAPSED,
}
"""What is added to cells whose runs must not be read as results, by table and method."""


def suite(name: str) -> Table:
    """A comparison: one row for each method and group."""
    rows = read(f"compare_{name}/results.csv")
    names = dict.fromkeys((row["group"], row["label"], row["role"]) for row in rows)

    def runs(group: str, label: str) -> list[Row]:
        return [row for row in rows if (row["group"], row["label"]) == (group, label)]

    def cell(group: str, label: str) -> str:
        ours = accuracy(runs(group, label), "test_accuracy", 100, statistics.stdev)
        return ours + WITHDRAWN.get((name, label), "")

    return Table(
        SUITES[name],
        f"lightning-fedssl compare {name}.yaml",
        f"compare_{name}/results.csv",
        ("setting", "method", "role", "rounds", "test accuracy"),
        [(group, label, role, runs(group, label)[0]["rounds"], cell(group, label)) for group, label, role in names],
    )


def fedrgd() -> Table:
    """FedRGD's claims on small data."""
    rows = read("fedrgd_claims.csv")
    keys = ("claim", "dataset", "clients", "rounds", "lr", "variant")
    names = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    cells = [
        (
            *name,
            accuracy([row for row in rows if tuple(row[key] for key in keys) == name], scale=100)
            + WITHDRAWN.get(("fedrgd", name[-1]), ""),
        )
        for name in names
    ]
    return Table(
        "FedRGD: claims on small data",
        "python benchmarks/fedrgd_claims.py --root data",
        "fedrgd_claims.csv",
        (*keys, "test accuracy"),
        cells,
    )


def semi_sfl() -> Table:
    """Semi-SFL's comparison: the last round of every run, which may lie before the end of the longest one."""
    last: dict[tuple[str, ...], Row] = {}
    for row in read("semi_sfl.csv"):
        last[row["dataset"], row["partition"], row["method"], row["seed"]] = row
    longest: dict[str, int] = {}
    for (dataset, *_), row in last.items():
        longest[dataset] = max(longest.get(dataset, 0), int(row["round"]))
    names = dict.fromkeys(key[:3] for key in last)

    def cell(name: tuple[str, ...]) -> str:
        runs = [row for key, row in last.items() if key[:3] == name]
        marked = [
            {
                **row,
                "rounds": row["round"],
                "status": "finished" if int(row["round"]) == longest[name[0]] else "stopped",
            }
            for row in runs
        ]
        return accuracy(marked, scale=100)

    return Table(
        "Semi-SFL: claims on small data",
        "python benchmarks/semi_sfl.py --root data",
        "semi_sfl.csv",
        ("data set", "partition", "method", "rounds", "accuracy in the last round"),
        [(*name, str(longest[name[0]]), cell(name)) for name in names],
    )


TABLES: list[Callable[[], Table]] = [
    lambda: fed_shvr(1, 5000),
    lambda: fed_shvr(100, 200),
    *((lambda name=name: suite(name)) for name in SUITES),
    fedrgd,
    semi_sfl,
]
"""The tables in the order of the page."""


def page() -> str:
    """The text of the page."""
    return "\n".join([INTRODUCTION, *(table().text() for table in TABLES)])


def main() -> int:
    """Write the page; with ``--check`` return 1 if it differs from the CSVs."""
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.read_text(encoding="utf-8") == text
        sys.stdout.write("" if same else f"{PAGE.name} differs from the CSVs: run python docs/build_results.py\n")
        return int(not same)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
