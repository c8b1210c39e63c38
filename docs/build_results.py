"""Writes docs/results.md, docs/leaderboard.md and benchmarks/results/claims.csv: ``python docs/build_results.py``.

All come from docs/claims.yaml, which says what the papers claim and where our runs are, and from the CSVs in
benchmarks/results. The page has the claims with the key ``show``; claims.csv has every one.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_fedssl.comparison import verdicts

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
IN_PER_CENT = ("fed_shvr_table1.csv", "fed_shvr_table1_gpu.csv", "fed_shvr_readings.csv")
"""Files whose accuracies are in per cent; the others have them from 0 to 1."""

REPRODUCED = "reproduced"
"""The verdict of a paper's number that is at most a point from the mean of at least three of our seeds."""
CLAIMS = "| claim | the paper says | ours | verdict | above the best labels alone | command |"
LEADERBOARD = "| method | ours, mean of the seeds | above *{bound}* | seeds | {last} |"

RUN = ("group", "label", "claim", "dataset", "partition", "method", "cell", "split", "variant", "run", "seed")
"""Columns that tell runs apart in a file with a row for each round."""


def cells_of(claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of a claim, each of which extends it; a claim without cells is its only one."""
    return [{**claim, **cell} for cell in claim.get("cells", [{}])]


def accuracies(source: str, where: Mapping[str, Any], rounds: int | None = None) -> dict[str, float]:
    """The test accuracy of every finished run by its seed, in per cent.

    Args:
        source: The file below benchmarks/results. If it has a row for each round, a run is its last row.
        where: Values by column; a list names several.
        rounds: The planned number of rounds: a run that ended earlier does not count.
    """
    with (RESULTS / source).open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if all(_has(row, *item) for item in where.items())]
    last = {tuple(row.get(column) for column in RUN): row for row in found} if found and "round" in found[0] else found
    rows = last.values() if isinstance(last, dict) else last
    factor = 1 if source in IN_PER_CENT else 100
    return {
        row.get("seed", "0"): factor * float(row.get("test_accuracy") or row["accuracy"])
        for row in rows
        if row.get("status", "finished") == "finished"
        and (row.get("test_accuracy") or row.get("accuracy"))
        and int(row.get("round") or rounds or 0) >= (rounds or 0)
    }


def _has(row: Mapping[str, str], column: str, value: Any) -> bool:
    return row[column] in (list(map(str, value)) if isinstance(value, list) else [str(value)])


def values_of(cell: Mapping[str, Any]) -> dict[str, float]:
    """Our values of a claim by seed: accuracies, or the differences of two kinds of runs with the same seed."""
    if "runs" not in cell:
        return {}
    source, rounds = cell["runs"]["csv"], cell.get("rounds")
    where = {**cell["runs"]["where"], **cell.get("where", {})}
    ours = accuracies(source, where, rounds)
    for seed, (mine, other) in cell.get("trials", {}).items():  # runs of a seed that the suite does not have
        (ours[seed],) = accuracies("evidence_trials.csv", {"dataset": "cifar10", "run": mine}).values()
        (trial,) = accuracies("evidence_trials.csv", {"dataset": "cifar10", "run": other}).values()
        ours[seed] -= trial
    if "minus" not in cell:
        return ours
    theirs = accuracies(source, {**where, **cell["minus"]}, rounds)
    seeds = {*theirs, *cell.get("trials", {})}
    return {seed: value - theirs.get(seed, 0) for seed, value in ours.items() if seed in seeds}


def best_alone(cell: Mapping[str, Any]) -> tuple[str, list[float]] | None:
    """The best labels alone of a cell's file, and what its method is above them, seed by seed.

    Candidates train on as many labels as the method, at the same place, and without images of clients: whatever their
    network, length and rate. A claim names them by ``alone`` where its file does not tell how many labels a run has.
    """
    if "runs" not in cell:
        return None
    if "trials" in cell:  # whose other run is the best of the labels alone
        return cell["minus"]["label"], [*values_of(cell).values()]
    source, where = cell["runs"]["csv"], {**cell["runs"]["where"], **cell.get("where", {})}
    own = accuracies(source, where, cell.get("rounds"))
    above = {}
    for bound in cell.get("alone", _bounds_in(source, where.get("label", "")) if "minus" in cell else []):
        theirs = accuracies(source, {**where, **bound} if "alone" in cell else bound)
        seeds = own.keys() & theirs.keys()
        if theirs != own and seeds and (own.keys() <= theirs.keys() or "alone" in cell):
            above[" ".join(bound.values())] = [own[seed] - theirs[seed] for seed in sorted(seeds)]
    return min(above.items(), key=lambda item: statistics.mean(item[1])) if above else None


def _bounds_in(source: str, method: str) -> list[dict[str, str]]:
    """The labels alone of a file of ``compare`` with as many labels as a method, at the same place."""
    with (RESULTS / source).open(newline="", encoding="utf-8") as file:
        kinds = {row["label"]: _labels_of(row["group"], source) for row in csv.DictReader(file) if "group" in row}
    own = kinds.get(method, ("", False))
    alone = [label for label, kind in kinds.items() if kind == own and re.search(r"labels alone|without its ", label)]
    return [{"label": label} for label in alone if own[0]]


def _labels_of(group: str, source: str) -> tuple[str, bool]:
    """How many labels a group has, by its title or the file's name, and whether clients hold them."""
    number = re.search(r"([\d,]+) labels", group) or re.search(r"_(\d+)/", source)
    return number[1].replace(",", "") if number else "", bool(re.search(r"labels at \d+ clients", group))


def verdict(cell: Mapping[str, Any], values: Sequence[float]) -> str:
    """What a reader may conclude of a claim."""
    for key in ("withdrawn", "untestable"):
        if values and key in cell:
            return f"{'withdrawn' if key == 'withdrawn' else 'undecided'}: {cell[key]}"
    if not values:
        return str(cell.get("met", "no result" if "found" in cell else "not run"))
    if "minus" not in cell and len(values) >= verdicts.FEWEST:
        off = statistics.mean(values) - float(cell["paper"])
        return REPRODUCED if abs(off) <= 1 else f"{abs(off):.1f} {'below' if off < 0 else 'above'}"
    return verdicts.verdict(values)


def row_of(paper: str, claim: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, str]:
    """A claim as a row of claims.csv."""
    values = list(values_of(cell).values())
    found = verdicts.interval(values) if len(values) >= verdicts.FEWEST else None
    alone = best_alone(cell)
    return {
        "paper": paper,
        "claim": claim["claim"],
        "cell": cell.get("cell", ""),
        "published": str(cell.get("paper", "")),
        "ours": f"{statistics.mean(values):{'+' * ('minus' in cell)}.1f}" if values else cell.get("found", ""),
        "low": f"{found.low:.1f}" if found else "",
        "high": f"{found.high:.1f}" if found else "",
        "seeds": str(len(values) or ""),
        "verdict": verdict(cell, values),
        "against_best_alone": difference(alone[1]) if alone else "",
        "best_alone": alone[0] if alone else "",
        "setting": cell.get("setting", "") or (f"GPU hours: {cell['gpu_hours']}" if "gpu_hours" in cell else ""),
        "command": cell.get("command", ""),
        "csv": cell["runs"]["csv"] if "runs" in cell else "",
    }


def difference(values: Sequence[float]) -> str:
    """The mean of differences with its interval and verdict."""
    text = f"{statistics.mean(values):+.1f}"
    if len(values) < verdicts.FEWEST:
        return text
    found = verdicts.interval(values)
    return f"{text} ({found.low:.1f} to {found.high:.1f}), {verdicts.verdict(values)}"


def shown(cell: Mapping[str, Any], row: Mapping[str, str]) -> str:
    """A claim as a row of the page's table."""
    ours = row["ours"] + (" points" if "minus" in cell else " %")
    if row["low"]:
        ours += f" ({row['low']} to {row['high']}; {row['seeds']} seeds)"
    published = row["published"] if "minus" not in cell else "above"
    met = row["verdict"].split(":")[0]
    command = re.sub("^lightning-fedssl | --(data.)?root data", "", cell.get("short", row["command"]))
    met = "**met**" if met == "met" else met
    return f"| {cell['show']} | {published} | {ours} | {met} | {row['against_best_alone']} | `{command}` |"


def counted(paper: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> str:
    """How many cells of each of a paper's tables are reproduced, and what differs from the print there."""
    lines = []
    for table in paper.get("tables", []):
        cells = [row for row in rows if row["claim"] in table["claims"]]
        count = sum(row["verdict"] == REPRODUCED for row in cells)
        lines.append(f"* **{table['title']}: {count} of {len(cells)} cells reproduced.** {table['differs']}\n")
    return "".join(lines)


def by_reading(readings: Mapping[str, Any]) -> str:
    """A paper's cells by the reading of its text, the closest on average first: means, and the number of seeds."""
    names, published = [*readings["cells"]], [*readings["cells"].values()]
    table = []
    for source, size in readings["csv"].items():
        for reading, of_reading in readings["readings"].items():
            for split, of_split in readings["splits"].items():
                where = {**readings["where"][source], "reading": reading, "split": split}
                found = [[*accuracies(source, {**where, "cell": name}).values()] for name in names]
                if all(found):
                    means = [statistics.mean(values) for values in found]
                    off = statistics.mean(abs(mean - of) for mean, of in zip(means, published, strict=True))
                    seeds = sorted({len(values) for values in found})
                    columns = [of_reading, of_split, size, *(f"{mean:.0f}" for mean in means), f"{off:.1f}"]
                    table.append((off, [*columns, " to ".join(map(str, seeds))]))
    columns = ["*the paper*", "", "", *map(str, published), "", "5"]
    lines = [columns, *(columns for _, columns in sorted(table, key=lambda item: item[0]))]
    head = f"| labels | split | network | {' | '.join(readings['titles'])} | off, mean | seeds |"
    return "\n".join([head, "|---" * (len(names) + 5) + "|", *(f"| {' | '.join(line)} |" for line in lines)])


def sections(claims: Sequence[Mapping[str, Any]], rows: list[dict[str, str]]) -> Iterator[str]:
    """The page's sections, one for each paper; ``rows`` receives the rows of claims.csv."""
    for paper in claims:
        table = [CLAIMS, "|---" * 6 + "|"]
        for claim in paper["claims"]:
            for cell in cells_of(claim):
                rows.append(row_of(paper["paper"], claim, cell))
                if "show" in cell:
                    table.append(shown(cell, rows[-1]))
        name = paper["paper"].lower().replace("-", "_")
        picture = f"![Our differences with 95 % intervals, {paper['paper']}](images/results_{name}.svg)"
        own = [row for row in rows if row["paper"] == paper["paper"]]
        text = f"{paper['source']}. {paper['outcome'].replace('COUNTED', counted(paper, own).strip()).strip()}"
        tried = f"*Settings tried: {paper['tried']}*"
        parts = [f"## {paper['paper']}", text, "\n".join(table), f"{picture}<br>\n{tried}"]
        if "by_reading" in paper:
            parts += [paper["by_reading"]["text"].strip(), by_reading(paper["by_reading"])]
        yield "\n\n".join(parts)


def standings(board: Mapping[str, Any]) -> list[str]:
    """The table of a setting of the leaderboard, best method first; bounds are in italics.

    Differences are taken from ``bound``, or, where a setting names none, from the first bound of an entry's group; they
    have no verdict where the steps on labels differ by more than a tenth from the bound's, as in ``compare``. The
    last column is what was published, or, with the head ``last``, the mean of the CSV's column ``shown``.
    """
    with (RESULTS / board["csv"]).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    entries = {row["label"]: row for row in rows}
    bounds = {row["group"]: row["label"] for row in reversed(rows) if row["role"] == "bound"}
    found = {label: accuracies(board["csv"], {"label": label}) for label in entries}
    table = []
    for label, values in sorted(found.items(), key=lambda item: -statistics.mean(item[1].values())):
        bound = board.get("bound", bounds[entries[label]["group"]])
        above = [value - found[bound][seed] for seed, value in values.items() if seed in found[bound]]
        name = f"*{label}*" if entries[label]["role"] == "bound" else label
        last = board.get("published", {}).get(label, "")
        if "shown" in board:
            last = f"{statistics.mean(float(row[board['shown']]) for row in rows if row['label'] == label):.2f}"
        gain = difference(above) if label != bound else ""
        steps, usual = (float(entries[name].get("steps") or 0) for name in (label, bound))
        if abs(steps - usual) > 0.1 * usual:
            gain = gain.split(", ")[0]
        table.append(f"| {name} | {statistics.mean(values.values()):.1f} | {gain} | {len(values)} | {last} |")
    head = LEADERBOARD.format(bound=board.get("bound", "its labels alone"), last=board.get("last", "published"))
    return [head, "|---" * 5 + "|", *table]


def write_leaderboard(page: Path) -> None:
    """Write the page of the leaderboard.

    Args:
        page: Its file.
    """
    content = yaml.safe_load((DOCS / "claims.yaml").read_text(encoding="utf-8"))["leaderboard"]
    parts = [content["introduction"]]
    for board in content["settings"]:
        table = standings(board)
        if board.get("short"):  # one paragraph instead of a table
            entries = []
            for line in table[2:]:
                name, mean, gain, _, last = (cell.strip() for cell in line.strip("|").split("|"))
                entries.append(", ".join(filter(None, [f"{name} {mean}", gain, last and f"{board['last']} {last}"])))
            listed = "; ".join(entries)
            parts.append(f"**{board['title']}.** {board['text'].strip()} {listed}. {board['after'].strip()}")
        else:
            parts += [f"## {board['title']}", board["text"], "\n".join(table), board["after"]]
    text = "\n\n".join(part.strip() for part in [*parts, content["how"]])
    text = re.sub(r"(?<=[^\n|])\n *(?=[^\n|\d])", " ", text)  # a line for each paragraph
    page.write_text(f"{text}\n", encoding="utf-8")


def write(page: Path, table: Path) -> None:
    """Write the page and the CSV.

    Args:
        page: The file of the page.
        table: The file of all claims.
    """
    content = yaml.safe_load((DOCS / "claims.yaml").read_text(encoding="utf-8"))
    rows: list[dict[str, str]] = []
    parts = [content["introduction"], *sections(content["papers"], rows), content["not_run"]]
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n", encoding="utf-8")
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write(DOCS / "results.md", RESULTS / "claims.csv")
    write_leaderboard(DOCS / "leaderboard.md")
