"""Mutation score: which share of single mistakes in the core do the tests notice?

Draws mutants (a changed operator, constant or condition, or a removed statement) of the methods, the functions that
they use, local training, the loop and checkpointing, with a fixed seed. For each, the tests of the mutated file run on
a copy of the tracked files: those that its path leads to (``tests/FOLDER/test_NAME*.py``, ``tests/test_NAME*.py``), and
:data:`INTEGRATION`. A mutant is killed if a test fails or takes too long. Every result is appended to a CSV file at
once, and a mutant that is in the file is not run again. Tests that fail without a mutation are left out.

    python benchmarks/mutants.py --list
    python benchmarks/mutants.py --limit 10 --results runs/mutants.csv
    python benchmarks/mutants.py --root ../old --tests map.json       # {"algorithms/semifl.py": ["tests/test_a.py"]}
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "lightning_fedssl"
MUTATED = (
    "algorithms/**/*.py", "functional/*.py", "local_training/**/*.py", "trainer/*loop.py", "trainer/federation.py",
    "trainer/checkpoint*.py", "storage/checkpoint*.py",
)  # fmt: skip
"""The files that are mutated, below the package."""
INTEGRATION = ("test_replays.py", "test_resume.py")
"""Names of test files that run for every mutant."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.Pow: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of one place: line and column (in bytes) of its start and end, and the new text."""

    file: str
    kind: str
    place: tuple[int, int, int, int]
    new: str

    def applied(self, source: str) -> str:
        """The source with the change."""
        line, column, end_line, end_column = self.place
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: line - 1])) + column
        end = sum(map(len, lines[: end_line - 1])) + end_column
        return (source.encode()[:start] + self.new.encode() + source.encode()[end:]).decode()


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file, in a fixed order."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        """All nodes but annotations, errors that are raised, imports for type checkers and texts."""
        if (
            isinstance(node, (ast.Raise, ast.JoinedStr))
            or "TYPE_CHECKING" in ast.dump(getattr(node, "test", node))[:30]
        ):
            return
        yield node
        for name, value in ast.iter_fields(node):
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                    yield from walk(inner)

    for node in walk(ast.parse(source)):
        for kind, old, changed in changes(node):
            place = (old.lineno, old.col_offset, old.end_lineno or 0, old.end_col_offset or 0)
            new = ast.unparse(changed)
            yield Mutant(file, kind, place, f"({new})" if isinstance(changed, ast.expr) else new)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """What may replace a node or a part of it: the name of the operator, the part, and the new one."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", node, ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield "arithmetic", node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        yield "arithmetic", node, ast.BoolOp(SWAPS[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield "constant", node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "condition", node.test, ast.UnaryOp(ast.Not(), node.test)
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)) and not is_text:
        yield "statement", node, ast.Pass()


def tests_of(root: Path, file: str, known: dict[str, list[str]]) -> list[str]:
    """The test files of a file of the package, relative to the root."""
    path, tests = Path(file), root / "tests"
    found = [root / name for name in known.get(file, [])]
    for folder in (tests / path.parent, tests / path.parts[0], tests):
        found = found or sorted(folder.glob(f"test_{path.stem}*.py"))
    found = found or sorted((tests / path.parts[0]).rglob("test_*.py"))
    found += [one for name in INTEGRATION for one in sorted(tests.rglob(name))]
    return [one.relative_to(root).as_posix() for one in dict.fromkeys(found)]


def run_tests(
    copy: Path, python: str, tests: list[str], failing: dict[str, list[str]], limit: float
) -> tuple[str, str]:
    """``passed``, ``failed`` or ``timeout``, and the output."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", *tests]
    command += [part for name in tests for one in failing.get(name, ()) for part in ("--deselect", one)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "timeout", ""
    return ("passed" if ended.returncode == 0 else "failed"), ended.stdout


def main() -> None:
    """Run the mutants that the CSV file does not have, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the tests")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--limit", type=int, help="run at most so many mutants now")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of a mutant")
    parser.add_argument("--tests", type=Path, help="JSON: test files by the mutated file, where the path does not tell")
    parser.add_argument("--results", type=Path, default=Path("runs/mutants.csv"))
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and run nothing")
    options = parser.parse_args()
    known = json.loads(options.tests.read_text()) if options.tests else {}
    package = options.root / PACKAGE
    files = sorted({path for pattern in MUTATED for path in package.glob(pattern) if path.name != "__init__.py"})
    everything = [one for path in files for one in mutants_of(path.relative_to(package).as_posix(), path.read_text())]
    drawn = random.Random(0).sample(everything, min(options.count, len(everything)))
    if options.list:
        for number, one in enumerate(drawn):
            print(
                number,
                f"{one.file}:{one.place[0]}",
                one.kind,
                one.new.splitlines()[0],
                tests_of(options.root, one.file, known),
            )
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(options.results.open())) if options.results.is_file() else []
    left = [number for number in range(len(drawn)) if str(number) not in {row["number"] for row in rows}]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        archive = subprocess.run(["git", "-C", str(options.root), "archive", "HEAD"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        before = options.results.with_suffix(".json")  # tests that fail without a mutation, by their file
        failing: dict[str, list[str]] = json.loads(before.read_text()) if before.is_file() else {}
        for number in left[: options.limit]:
            one = drawn[number]
            tests, path = tests_of(copy, one.file, known), copy / PACKAGE / one.file
            for name in tests:
                if name not in failing:
                    _, output = run_tests(copy, options.python, [name], {}, 10 * options.timeout)
                    failing[name] = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                    before.write_text(json.dumps(failing))
            source, began = path.read_text(), time.monotonic()
            path.write_text(one.applied(source))
            how, _ = run_tests(copy, options.python, [*tests, "-x"], failing, options.timeout)
            path.write_text(source)
            row = {
                "number": number, "file": one.file, "line": one.place[0], "kind": one.kind, "new": one.new,
                "result": "survived" if how == "passed" else "killed", "seconds": f"{time.monotonic() - began:.0f}",
            }  # fmt: skip
            with options.results.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if not rows:
                    writer.writeheader()
                writer.writerow(row)
            rows.append({name: str(value) for name, value in row.items()})
            print(*rows[-1].values(), flush=True)
    killed = sum(row["result"] == "killed" for row in rows)
    print(f"{killed} of {len(rows)} killed" + (f", {len(drawn) - len(rows)} left" if len(rows) < len(drawn) else ""))


if __name__ == "__main__":
    main()
