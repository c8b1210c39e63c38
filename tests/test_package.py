from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import lightning_fedssl

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_fedssl"


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def source_files() -> dict[str, Path]:
    """Every module of the package, those in callbacks/ included, with its file."""
    files = {}
    for folder, name in ((ROOT / PACKAGE, PACKAGE), (ROOT / "callbacks", f"{PACKAGE}.callbacks")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            files[".".join((name, *parts)).removesuffix(".__init__")] = path
    return files


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_every_package_is_listed_for_the_wheel() -> None:
    setuptools = pyproject()["tool"]["setuptools"]
    folders = {name for name, path in source_files().items() if path.name == "__init__.py"}
    assert set(setuptools["packages"]) == folders | {f"{PACKAGE}.configs"}
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    assert setuptools["package-dir"][f"{PACKAGE}.callbacks"] == "callbacks"
    assert setuptools["package-dir"][f"{PACKAGE}.configs"] == "configs"


def test_the_type_marker_is_packaged() -> None:
    assert (ROOT / PACKAGE / "py.typed").is_file()
    assert pyproject()["tool"]["setuptools"]["package-data"][PACKAGE] == ["py.typed"]


def test_the_version_is_reported_once_and_in_the_changelog() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_fedssl.__version__)
    assert "version" not in pyproject()["project"]
    assert f"## {lightning_fedssl.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == lightning_fedssl.__version__


def test_the_package_imports_nothing_until_it_is_asked() -> None:
    result = fresh(f"import sys, {PACKAGE}; print(*(m for m in sys.modules if m.startswith(('torch', '{PACKAGE}'))))")
    assert result.stdout.split() == [PACKAGE], result.stderr


STARTS = f"""
import contextlib, io, sys

def imported(names):
    return [name for name in names if name in sys.modules]

def run(*arguments):
    sys.argv = ["lightning-fedssl", *arguments]
    try:
        return main()
    except SystemExit as end:
        return end.code

from {PACKAGE}.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    codes = [run("methods"), run("ft"), run("fit", "--trainer.max_round", "1"), run("fit", "--config", "no_such.yaml")]
    codes += [run("fit", "--trainer.max_rounds", "abc")]
    print(codes, imported(["torch"]), file=sys.__stdout__)
    codes = [run("compare", "--help"), run("partition", "--help"), run("partition", "--data.alpha", "1")]
    codes += [run("partition", "--data.num_clients", "0"), run("partition", "--data.num_clients", "3")]
    print(codes, imported(["lightning", "torchmetrics", "torchvision", "torch._dynamo"]), file=sys.__stdout__)
import lightning.pytorch.cli
before = set(sys.modules)
import {PACKAGE}.cli.lightning_cli, {PACKAGE}.callbacks
added = {{name.partition(".")[0] for name in sys.modules.keys() - before}}
slow = {{"matplotlib", "sklearn", "PIL", "tensorboard", "flwr", "onnx", "timm", "datasets", "callbacks"}}
print(sorted(added & slow))
"""
"""Commands in one process, those that need least first, and what they have imported so far."""


def test_commands_import_only_what_they_need() -> None:
    """Refusals and listings answer without PyTorch; ``partition`` and ``compare --help`` without Lightning.

    ``fit`` needs Lightning; the package adds nothing slow to it, and imports callbacks/ under one name only.
    """
    result = fresh(STARTS)
    assert result.stdout.splitlines() == ["[0, 2, 2, 2, 2] []", "[0, 0, 2, 1, 0] []", "[]"], result.stderr
    assert "callbacks" not in sys.modules


def test_every_public_class_is_offered_at_the_top() -> None:
    names: list[str] = lightning_fedssl.__all__
    for collection in ("models", "data", "callbacks", "algorithms"):
        module = import_module(f"{PACKAGE}.{collection}")
        for name in (n for n in module.__all__ if n[0].isupper()):
            assert name in names
            assert getattr(lightning_fedssl, name) is getattr(module, name)
    assert {"FederatedAlgorithm", "FederatedCallback", "FederatedTrainer", "Cosine"} <= set(names)
    assert all(getattr(lightning_fedssl, name) is not None for name in names)
    assert set(names) <= set(dir(lightning_fedssl))


def test_no_two_packages_offer_the_same_name() -> None:
    names = [n for c in ("models", "data", "callbacks", "algorithms") for n in import_module(f"{PACKAGE}.{c}").__all__]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["SemiFLL", "nothing", "_hidden"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(lightning_fedssl, name)


# What a part of the package may import of the others, for values or types. A part is a module or folder of the root.
VALUES = {"data", "functional", "sampling", "state"}
LAYERS: dict[str, set[str]] = {
    "functional": set(),
    "schedules": set(),
    "metrics": {"functional"},
    "sampling": {"functional"},
    "distributed": {"functional"},
    "storage": {"functional"},
    "system": {"sampling"},
    "models": {"functional"},
    "data": {"functional", "sampling", "storage"},
    "state": {"functional"},
    "federation": {"functional", "state"},
    "local_work": VALUES,
    "keyed_dropout": VALUES,
    "algorithm": {"federation", "local_work", "models", "schedules", "storage", *VALUES},
    "comparison": {"algorithm", "data", "storage"},
    "trainer_interface": {"data", "federation", "system"},
    "export": {"algorithm", "data", "models", "storage"},
    "callback": {"algorithm", "federation", "local_work", "trainer_interface", *VALUES},
    "local_training": {
        "algorithm", "distributed", "federation", "keyed_dropout", "local_work", "metrics", *VALUES,
    },
    "callbacks": {
        "algorithm", "callback", "distributed", "federation", "keyed_dropout", "local_work", "models", "system",
        "trainer_interface", *VALUES,
    },
    "algorithms": {
        "algorithm", "callbacks", "federation", "keyed_dropout", "local_work", "models", "schedules", *VALUES,
    },
    "trainer": {
        "algorithm", "callback", "callbacks", "distributed", "export", "federation", "keyed_dropout", "local_training",
        "local_work", "metrics", "storage", "system", "trainer_interface", *VALUES,
    },
    "deployment": {
        "algorithm", "callbacks", "federation", "local_training", "local_work", "metrics", "storage", "trainer",
        *VALUES,
    },
    "cli": {
        "algorithm", "algorithms", "callbacks", "comparison", "data", "deployment", "export", "models", "schedules",
        "storage", "system", "trainer",
    },
    "__main__": {"cli"},
    "__init__": {
        "algorithm", "algorithms", "callback", "callbacks", "cli", "data", "models", "schedules", "system", "trainer",
    },
}  # fmt: skip
"""A closed list: a part that is not named here is an error."""
MOST_ROOT_MODULES = 12


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imported(module: str, path: Path) -> Iterator[str]:
    """Modules of the package that a module imports, those included that only a type checker sees."""
    parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}."))
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield f"{parent.rsplit('.', node.level - 1)[0]}.{node.module or ''}".rstrip(".")
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            yield from (f"{PACKAGE}.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            # ``from package.folder import name`` imports a module if there is one of that name.
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in found if name in source_files()]
            yield from modules
            if len(modules) < len(found):
                yield str(node.module)


@pytest.mark.parametrize("module", sorted(source_files()))
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    own = part(module)
    for target in imported(module, source_files()[module]):
        assert part(target) in LAYERS[own] | {own}, f"{module} imports {target}"


def test_the_layers_have_an_order() -> None:
    assert list(TopologicalSorter(LAYERS).static_order())


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = source_files()
    graph = {
        module: {t for t in imported(module, path) if t in files and t != module} for module, path in files.items()
    }
    # A package's __init__ gathers its modules' names; a module that imports a name of its own package is no circle.
    for module, targets in graph.items():
        graph[module] = {t for t in targets if not module.startswith(f"{t}.")}
    assert list(TopologicalSorter(graph).static_order())


def test_the_root_holds_the_extension_api_alone() -> None:
    assert set(LAYERS) == {part(module) for module in source_files()}
    assert len(list((ROOT / PACKAGE).glob("*.py"))) <= MOST_ROOT_MODULES


def test_the_trainer_is_its_keys_and_commands() -> None:
    """Everything else belongs to a function of a run, in the other files of trainer/."""
    source = (ROOT / PACKAGE / "trainer" / "trainer.py").read_text()
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == ["FederatedTrainer"]
    assert (classes[0].end_lineno or 0) - classes[0].lineno < 300


def test_the_import_walk_sees_every_form_of_import(tmp_path: Path) -> None:
    path = tmp_path / "probe.py"
    path.write_text(
        f"import {PACKAGE}.cli\nfrom {PACKAGE} import sampling\nfrom {PACKAGE}.data.augment import x\n"
        "from . import a\nfrom .b import y\nfrom ..state import z\n"
        f"if TYPE_CHECKING:\n    from {PACKAGE}.algorithm import T\n"
        f"def late():\n    from {PACKAGE}.models import M\n    from {PACKAGE}.trainer import launch\n"
    )
    found = {name.removeprefix(f"{PACKAGE}.") for name in imported(f"{PACKAGE}.data.probe", path)}
    assert found == {
        "cli",
        "sampling",
        "data.augment",
        "data",
        "data.b",
        "state",
        "algorithm",
        "models",
        "trainer.launch",
    }


def pins() -> dict[str, set[str]]:
    lines = (line.partition(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned: dict[str, set[str]] = {}
    for name, pinned_version in (line.split("==") for line in lines if line and not line.startswith("#")):
        pinned.setdefault(name.lower(), set()).add(pinned_version)
    return pinned


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_a_pinned_version_supports_every_python_that_gets_it(python: str) -> None:
    """Of the pinned packages that are installed: they know the Pythons that they support."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": python, "python_full_version": f"{python}.5"}
    checked = []
    for pin in (pin for pin in pinned if pin.marker is None or pin.marker.evaluate(environment)):
        if is_installed(pin.name) and pin.specifier.contains(version(pin.name)):
            supported = str(metadata(pin.name).json.get("requires_python", ""))
            assert SpecifierSet(supported).contains(f"{python}.5"), f"{pin} needs Python {supported}"
            checked.append(pin.name)
    assert len(checked) > 15


def requirement_names(lines: list[str]) -> set[str]:
    return {match[0].lower() for line in lines if (match := re.match(r"[\w.-]+", line))}


def test_every_tool_and_dependency_is_pinned() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    named = requirement_names(project["dependencies"])
    for extra in ("docs", "flower", "timm", "test", "dev"):
        named |= requirement_names(extras[extra])
    assert named - {"lightning-fedssl"} <= pins().keys()


def test_pinned_versions_can_be_installed_together() -> None:
    """Of the pinned packages that are installed; Flower is no part of the extra ``test``."""
    installed = {name: requires(name) or [] for name in pins() if is_installed(name)}
    assert {"lightning", "torch", "torchmetrics"} <= installed.keys()
    needs = [(name, Requirement(line)) for name, lines in installed.items() for line in lines]
    needs = [(name, need) for name, need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    pinned = [(name, need, pins()[need.name.lower()]) for name, need in needs if need.name.lower() in pins()]
    assert len(pinned) > 20
    assert [(name, str(need)) for name, need, versions in pinned if not any(need.specifier.filter(versions))] == []


def is_installed(name: str) -> bool:
    """Whether a distribution is installed."""
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def test_pre_commit_uses_the_pinned_versions() -> None:
    hooks = [h for r in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for h in r["hooks"]]
    tools = [tool.split("==") for hook in hooks for tool in hook.get("additional_dependencies", [])]
    assert {name for name, _ in tools} == {"ruff"}
    assert all({version} == pins()[name] for name, version in tools)
    assert [hook["entry"] for hook in hooks if hook["id"] == "mypy"] == [".venv/bin/mypy"]


def test_no_file_of_the_tooling_names_a_package_index() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".pre-commit-config.yaml", ".ci/run"):
        assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text()), name
