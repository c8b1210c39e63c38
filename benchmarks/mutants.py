"""Mutation score: which share of single mistakes in the core do the tests notice?

Draws mutants (a changed operator, constant or condition, or a removed statement) of the methods, the functions that
they use, local training, the loop and checkpointing, with a fixed seed. For each, the tests of the mutated file run on
a copy of the tracked files: those that its path leads to (``tests/FOLDER/test_NAME*.py``, ``tests/test_NAME*.py``), and
:data:`INTEGRATION`. A mutant is killed if a test fails or takes too long. Every result is appended to a CSV file at
once, and a mutant that is in the file is not run again. Slow tests and those that fail without a mutation are left out.

    python benchmarks/mutants.py --list
    python benchmarks/mutants.py --limit 10 --results runs/mutants.csv
"""

from __future__ import annotations

import argparse
import ast
import compileall
import csv
import importlib
import multiprocessing
import os
import py_compile
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "lightning_fedssl"
MUTATED = (
    "algorithms/**/*.py", "functional/*.py", "local_training/**/*.py", "trainer/*loop.py", "trainer/federation.py",
    "trainer/checkpoint*.py", "storage/checkpoint*.py",
)  # fmt: skip
"""The files that are mutated, below the package."""
INTEGRATION = ("test_replays.py", "test_every_method.py", "test_trainer.py", "test_launch.py", "test_export.py")
"""Names of test files that run for every mutant; for one of a method, only its tests if there are any."""
LIBRARIES = ("lightning.pytorch.cli", "torchvision")
"""What is imported once; each run of the tests is a fork of this process."""
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
        test = ast.dump(getattr(node, "test", node))
        if isinstance(node, (ast.Raise, ast.JoinedStr)) or "TYPE_CHECKING" in test[:30]:
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


def tests_of(root: Path, file: str) -> list[str]:
    """The test files of a file of the package, relative to the root."""
    path, tests = Path(file), root / "tests"
    found: list[Path] = []
    for folder in (tests / path.parent, tests / path.parts[0], tests):
        found = found or sorted(folder.glob(f"test_{path.stem}*.py"))
    found = found or sorted((tests / path.parts[0]).rglob("test_*.py"))
    found += [one for name in INTEGRATION for one in sorted(tests.rglob(name))]
    return [one.relative_to(root).as_posix() for one in dict.fromkeys(found)]


class Failures:
    """A plugin of pytest that notes the tests that fail, and leaves some out.

    Args:
        left_out: The tests to leave out.
        method: Of the tests in :data:`INTEGRATION`, those with this name are enough, if there are any, as
            ``FedAvg`` for ``fed_avg``.
    """

    def __init__(self, left_out: set[str], method: str) -> None:
        self.left_out = left_out
        self.method = method.lower().replace("_", "")
        self.found: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave tests out."""
        whole = [item for item in items if item.path.name in INTEGRATION]
        of_method = [item for item in whole if self.method in item.name.lower().replace("_", "")]
        others = set(whole) - set(of_method) if of_method else set()
        items[:] = [item for item in items if item.nodeid not in self.left_out and item not in others]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self.found.append(report.nodeid)


def run_tests(copy: Path, method: str, tests: list[str], left_out: set[str], limit: float) -> tuple[bool, list[str]]:
    """Whether all tests pass in time, and those that fail. They run in a fork of this process, which is a new session.

    Args:
        copy: The folder of the project.
        method: The name of the mutated module of a method; else empty.
        tests: Files of tests, or single tests.
        left_out: Tests that are left out.
        limit: Seconds until the fork is killed.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        os.setsid()
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ["PYTHONPATH"], sys.dont_write_bytecode = str(copy), True
        failures = Failures(left_out, method)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            options = ["-q", "-x", "-p", "no:cacheprovider", "--assert=plain", "-m", "not slow"]
            code = pytest.main([*options, *tests], plugins=[failures])
        sender.send((code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), failures.found))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(limit)
    if process.pid and process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return receiver.recv() if receiver.poll() else (False, [])


def is_killed(copy: Path, one: Mutant, tests: list[str], left_out: set[str], sound: set[str], limit: float) -> bool:
    """Whether the tests notice a mutant.

    Args:
        copy: The folder of the project.
        one: The mutant.
        tests: The files of tests.
        left_out: Tests that fail without a mutation; those that are found are added.
        sound: Tests that pass without a mutation; those that are found are added.
        limit: Seconds for all tests.
    """
    path = copy / PACKAGE / one.file
    source, method = path.read_text(), path.stem if one.file.startswith("algorithms/") else ""
    while True:
        path.write_text(one.applied(source))
        passed, failed = run_tests(copy, method, tests, left_out, limit)
        path.write_text(source)
        for name in failed:
            if name not in sound:
                (sound if run_tests(copy, method, [name], set(), limit)[0] else left_out).add(name)
        if passed or not left_out.intersection(failed):
            return not passed


def main() -> None:
    """Run the mutants that the CSV file does not have, and print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the checkout")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="run at most so many mutants now")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of a mutant")
    parser.add_argument("--results", type=Path, default=Path("runs/mutants.csv"))
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, and run nothing")
    options = parser.parse_args()
    package = options.root / PACKAGE
    files = sorted({path for pattern in MUTATED for path in package.glob(pattern) if path.name != "__init__.py"})
    everything = [one for path in files for one in mutants_of(path.relative_to(package).as_posix(), path.read_text())]
    drawn = random.Random(options.seed).sample(everything, min(options.count, len(everything)))
    if options.list:
        for number, one in enumerate(drawn):
            where, new = f"{one.file}:{one.place[0]}", one.new.splitlines()[0]
            print(number, where, one.kind, new, tests_of(options.root, one.file))
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(options.results.open())) if options.results.is_file() else []
    left = [number for number in range(len(drawn)) if str(number) not in {row["number"] for row in rows}]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)
    left_out, sound = set[str](), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        archive = subprocess.run(["git", "-C", str(options.root), "archive", "HEAD"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        compileall.compile_dir(folder, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        for number in left[: options.limit]:
            one, began = drawn[number], time.monotonic()
            killed = is_killed(copy, one, tests_of(copy, one.file), left_out, sound, options.timeout)
            row = {
                "number": number, "file": one.file, "line": one.place[0], "kind": one.kind, "new": one.new,
                "result": "killed" if killed else "survived", "seconds": f"{time.monotonic() - began:.0f}",
            }  # fmt: skip
            with options.results.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if not rows:
                    writer.writeheader()
                writer.writerow(row)
            rows.append({name: str(value) for name, value in row.items()})
            print(*rows[-1].values(), flush=True)
    total = sum(row["result"] == "killed" for row in rows)
    print(f"{total} of {len(rows)} killed" + (f", {len(drawn) - len(rows)} left" if len(rows) < len(drawn) else ""))


if __name__ == "__main__":
    main()
