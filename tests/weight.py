"""Weigh the project: logic nodes and code lines by folder, and what makes code hard to maintain.

Part of ``make lint``:

    python tests/weight.py            # the table
    python tests/weight.py --check    # exits with 1 where a limit is passed

Logic nodes are those of Python's own syntax tree that a reader has to think about: docstrings, imports, annotations
and the texts of errors, warnings and logs do not count, so that a type that is written out and a message that names
the remedy cost nothing. Code lines hold code: no blank lines, comments and docstrings. A limit is raised only with a
reason in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "logic nodes of package and callbacks": 126_310,
    "logic nodes of the core": 21_650,
    "comprehensions per 1,000 lines": 35,
    "functional spellings per 1,000 lines": 8,
    "lines over 100 characters": 0,
    "tests": 21_570,
    "benchmarks": 2_800,
    "lines of Markdown": 3_600,
    "lines of README.md": 100,
    "arguments of FederatedTrainer": 20,
    "private names of torch and Lightning": 0,
    "modules that read code": 0,
}
CORE = {"trainer", "local_training"}  # and the modules in the package's root
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._(?!foreach_)[a-z]\w*|_execution_engine"
    r"|from (?:torch|lightning)(?:\.[\w.]*)? import [^\n]*(?<![\w.])_(?!BatchNorm\b)[A-Za-z]\w*"
)
SPELLINGS = {"map", "filter", "partial", "itemgetter", "chain"}
LOGS = {"debug", "info", "warning", "warn", "error", "rank_zero_warn", "require"}
READS_CODE = re.compile(r"^\s*(?:import|from) (?:ast|dis|tokenize)\b|getsource|co_names", re.MULTILINE)


def code_lines(source: str) -> int:
    """The lines of a module that hold code."""
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr) and _is_text(n.value)]
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - {line for text in strings for line in range(text.lineno, (text.end_lineno or 0) + 1)})


def logic_nodes(source: str) -> tuple[int, int, int]:
    """The logic nodes of a module, its comprehensions, and its calls of ``map``, ``filter`` and their like."""
    nodes = list(ast.walk(ast.parse(source)))
    left_out: set[ast.AST] = set()
    for node in nodes:
        for part in _weightless(node):
            left_out.update(ast.walk(part))
    comprehensions = sum(isinstance(n, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)) for n in nodes)
    spellings = sum(isinstance(n, ast.Call) and _called(n) in SPELLINGS and isinstance(n.func, ast.Name) for n in nodes)
    return sum(node not in left_out for node in nodes), comprehensions, spellings


def _weightless(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that cost nothing: texts, types and imports."""
    if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Expr) and _is_text(node.value)):
        return [node]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.returns] if node.returns else []
    if isinstance(node, (ast.arg, ast.AnnAssign)):
        return [node.annotation] if node.annotation else []
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return list(node.exc.args)
    return list(node.args) if isinstance(node, ast.Call) and _called(node) in LOGS else []


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def trainer_arguments(source: str) -> int:
    """The number of arguments of the trainer's constructor."""
    (trainer,) = (
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef) and n.name == "FederatedTrainer"
    )
    (init,) = (n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return len(init.args.args) + len(init.args.kwonlyargs) - 1


def files() -> Iterator[tuple[str, str]]:
    """The Python files of the project by their paths, and their texts; a linked folder is not followed."""
    for folder in ("lightning_fedssl", "callbacks", "tests", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def weigh() -> Counter[str]:
    """Every number by its name."""
    weight: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
    for path, source in files():
        folder, lines = path.partition("/")[0], code_lines(source)
        weight[folder] += lines
        if folder in ("lightning_fedssl", "callbacks"):
            nodes, comprehensions, spellings = logic_nodes(source)
            parts = path.split("/")
            weight["code lines of package and callbacks"] += lines
            weight["logic nodes of package and callbacks"] += nodes
            weight["comprehensions per 1,000 lines"] += 1000 * comprehensions
            weight["functional spellings per 1,000 lines"] += 1000 * spellings
            weight["lines over 100 characters"] += sum(len(line) > 100 for line in source.splitlines())
            if folder == "lightning_fedssl" and (len(parts) == 2 or parts[1] in CORE):
                weight["logic nodes of the core"] += nodes
            weight[path.rpartition("/")[0]] += lines if "/" in path.partition("/")[2] else 0
            weight["private names of torch and Lightning"] += len(PRIVATE.findall(source))
            weight["modules that read code"] += bool(READS_CODE.search(source))
        if path == "lightning_fedssl/trainer/trainer.py":
            weight["arguments of FederatedTrainer"] = trainer_arguments(source)
    for name in ("comprehensions per 1,000 lines", "functional spellings per 1,000 lines"):
        weight[name] //= max(1, weight["code lines of package and callbacks"])
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    weight["lines of Markdown"] = sum(path.read_text(encoding="utf-8").count("\n") for path in pages)
    weight["lines of README.md"] = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    return weight


def main() -> int:
    """Print the table; with ``--check`` only the limits that are passed."""
    weight = weigh()
    passed = [name for name, limit in LIMITS.items() if weight[name] > limit]
    shown = passed if "--check" in sys.argv else sorted(weight, key=lambda name: (name not in LIMITS, name))
    for name in shown:
        print(f"{weight[name]:7,d}  {name}" + (f"  (limit {LIMITS[name]:,})" if name in LIMITS else ""))
    return int("--check" in sys.argv and bool(passed))


if __name__ == "__main__":
    sys.exit(main())
