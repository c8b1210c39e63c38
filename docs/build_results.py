"""Fills the results pages from the CSVs in benchmarks/results: ``python docs/build_results.py``.

* docs/results.md is written as a whole: the claims of docs/claims.yaml, and the trials of
  benchmarks/results/trials.csv.
* In docs/results/*.md, the part between ``<!-- table: NAME -->`` and ``<!-- end -->`` is replaced by the table of that
  name from docs/measured_tables.py. The text around it is written by hand.

Missing and stopped runs show as such. ``--check`` compares the pages with the CSVs and writes nothing; a test does the
same.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measured_tables
import yaml
from measurements import Row, cell, difference, finished, number_of, runs, spread, table, unfinished

DOCS = Path(__file__).resolve().parent
CLAIMS = DOCS / "claims.yaml"

TOLERANCE = 2.0
"""A number of a paper is met if ours is at most this many points below it."""

INTRODUCTION = """\
<!-- Written by docs/build_results.py from docs/claims.yaml and the CSVs in benchmarks/results: change those. -->

# Results

One table for each paper: what it claims, what our runs show, and the command that repeats them. Accuracies are on test
images, in per cent: mean ± standard deviation (n - 1) over the seeds, whose number is in brackets. Differences are
taken seed by seed, on the same partition and initial weights. A number links to its runs.

* *Met*: ours is at most 2 points below the paper's number, or the difference has the claimed sign with every seed.
* *Met (small)*, *not met (small)*: the same for runs that are smaller than the paper's.
* *Not testable at this size*: the paper's claim is about much longer runs, so that ours decide neither way.
* *Control*: a comparison that the paper does not make.
* *Clients alike* are IID clients: each has a uniformly drawn share of the images.
* *Not run*: the command exists, and tests build its configurations; nobody has run it here. The hours are estimates for
  one seed on one GPU, from the networks' operations at 20 TFLOP/s or 5 ms for each sequential step.

Settings that papers leave open, trials and pictures have a page for each paper: [SemiFL](results/semifl.md),
[FedRGD](results/fedrgd.md), [Fed-SHVR](results/fed_shvr.md), [Semi-SFL](results/semi_sfl.md). All methods on the same
partitions are compared on three more: [digits](results/digits.md), [MNIST](results/mnist.md) and
[Fashion-MNIST](results/fashionmnist.md).
"""

COLUMNS = ("claim or cell", "paper", "ours (seeds; setting)", "met?", "command")


def cells_of(claim: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of a claim, each of which extends it; a claim without cells is its only one."""
    return [{**claim, **cell_} for cell_ in claim.get("cells", [{}])]


def rows_of(claim: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of a claim in the table of its paper; above several cells a row says what they have in common."""
    if "cells" not in claim:
        yield row(claim, claim["claim"], claim)
        return
    yield [f"**{claim['claim']}**", _paper(claim), "", "", _command(claim)]
    for own, cell_ in zip(claim["cells"], cells_of(claim), strict=True):
        yield row(cell_, cell_["cell"], own)


def row(claim: dict[str, Any], name: str, shown: dict[str, Any]) -> list[str]:
    """A row of the table of a paper.

    Args:
        claim: The claim, or a cell with what its claim has.
        name: What the first column says.
        shown: The paper's number and the command to show.
    """
    ours, met = judged(claim)
    if ours and "runs" in claim:
        ours = f"[{ours}](../benchmarks/results/{claim['runs']['csv']})"
    return [name, _paper(shown), ours, met, _command(shown)]


def _paper(claim: dict[str, Any]) -> str:
    return f"{claim['paper']}" if "paper" in claim else ""


def _command(claim: dict[str, Any]) -> str:
    return _COMMAND.sub(r"`\1`\2", claim.get("command", ""))


_COMMAND = re.compile(r"^((?:lightning-fedssl|python|make) .*?)((?:; |, and | \().*)?$")
"""A command, and remarks after it."""


def judged(claim: dict[str, Any]) -> tuple[str, str]:
    """Our result of a claim, and whether it is met."""
    if "found" in claim:
        return claim["found"], claim.get("met", "")
    if "runs" not in claim:
        return "", not_run(claim)
    found = _runs(claim, {})
    if "minus" in claim:
        ours, met = _difference(claim, found, _runs(claim, claim["minus"]))
    else:
        ours, met = cell(found, claim.get("seeds")), _against(claim.get("paper"), finished(found))
    if not met:
        return "" if ours == "not run" else ours, not_run(claim)
    setting = f"; {claim['setting']})" if "setting" in claim else ")"
    return ours.replace(")", setting, 1), _verdict(claim, met)


def _verdict(claim: dict[str, Any], met: str) -> str:
    """What the column "met?" says of a claim with finished runs."""
    if "withdrawn" in claim:
        return f"withdrawn: {claim['withdrawn']}"
    if "untestable" in claim:
        return f"not testable at this size: {claim['untestable']}"
    return "control" if claim.get("control") else f"{met}{' (small)' * claim.get('smaller', 0)}"


def not_run(claim: dict[str, Any]) -> str:
    """What a claim without a finished run would need."""
    hours = str(claim.get("gpu_hours", ""))
    unit = " GPU hours" if hours[-1:].isdigit() else ""
    return f"not run ({hours}{unit})" if hours else "not run"


def _runs(claim: dict[str, Any], changed: dict[str, Any]) -> list[Row]:
    where = {**claim["runs"]["where"], **claim.get("where", {}), **changed}
    return runs(claim["runs"]["csv"], where, claim.get("rounds"))


def _against(paper: Any, values: dict[str, float]) -> str:
    """Whether the mean reaches a number of a paper; empty without a finished run."""
    if not values:
        return ""
    if not isinstance(paper, (int, float)):
        raise ValueError(f"docs/claims.yaml: the paper's {paper!r} is no number: add minus to the claim")
    below = paper - float(spread(list(values.values())).partition(" ")[0])
    return "met" if round(below, 1) <= TOLERANCE else f"not met, {below:.1f} below"


def _difference(claim: dict[str, Any], ours: list[Row], reference: list[Row]) -> tuple[str, str]:
    """The difference to other runs, and whether every seed has more than the goal."""
    found = difference(ours, reference)
    if not found:
        return "; ".join(unfinished(ours)), ""
    goal = claim.get("goal", 0)
    reached = [value > 0 and value >= goal for value in found.values()]
    met = "met" if all(reached) else f"not met, {sum(reached)} of {len(reached)} seeds"
    text = f"{spread(list(found.values()), '+')} points ({number_of(found, claim.get('seeds'))})"
    return "; ".join([text, *unfinished(ours)]), met


def claims_page() -> str:
    """The text of docs/results.md."""
    parts = [INTRODUCTION]
    for paper in yaml.safe_load(CLAIMS.read_text(encoding="utf-8")):
        details = f"[Settings, trials and pictures](results/{paper['details']}.md)."
        rows = table(COLUMNS, (line for claim in paper["claims"] for line in rows_of(claim)))
        findings = "".join(f"* {finding}\n" for finding in paper.get("findings", ()))
        text = f"{paper['source']}. **{paper['outcome'].strip()}**"
        text += f"\n\n{findings}\n{details}" if findings else f" {details}"
        parts.append(f"## {paper['paper']}\n\n{text}\n\n{rows}\n")
    return "\n".join([*parts, measured_tables.trials()])


_BLOCK = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page whose tables are those of the CSVs."""

    def replacement(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}\n{measured_tables.TABLES[name](*arguments)}\n\n{match[3]}"

    return _BLOCK.sub(replacement, text)


def pages() -> dict[Path, str]:
    """The text of every results page by its file."""
    written = {path: filled(path.read_text(encoding="utf-8")) for path in sorted((DOCS / "results").glob("*.md"))}
    return {DOCS / "results.md": claims_page(), **written}


def main() -> int:
    """Write the pages; with ``--check`` return 1 if one differs from the CSVs."""
    changed = {path: text for path, text in pages().items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in changed.items():
        if "--check" in sys.argv[1:]:
            sys.stdout.write(f"{path.name} differs from the CSVs: run python docs/build_results.py\n")
        else:
            path.write_text(text, encoding="utf-8")
    return int(bool(changed) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
