from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import build_package_page
import pytest
import yaml

import lightning_fedssl

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_fedssl"
COLLECTIONS = ("models", "data", "callbacks", "algorithms")

ORDER = [
    "version", "functional", "task", "sampling", "storage", "report", "metrics", "distributed", "system",
    "models", "state", "round", "data", "local_work", "algorithm", "export", "local_training", "hooks", "run",
    "callback", "comparison", "callbacks", "interop", "algorithms", "updates", "trainer", "deployment", "cli",
    "__init__", "__main__",
]  # fmt: skip
"""The parts of the package: modules and folders of its root. Each imports only from those before it."""


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files() -> dict[str, Path]:
    """Every module of the package with its file."""
    files: dict[str, Path] = {}
    for folder in (ROOT / PACKAGE, ROOT / PACKAGE / "callbacks"):  # a link, which rglob does not follow
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "templates" not in parts:
                files[".".join(parts).removesuffix(".__init__")] = path
    return files


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imported(node: ast.AST, module: str, known: Collection[str]) -> Iterator[str]:
    """Modules of the package that a module's code imports, also those that only a type checker imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        source = f"{module}.{node.module}" if node.level else str(node.module)  # relative ones are in __init__ alone
        names = (f"{source}.{alias.name}" for alias in node.names)
        yield from {name if name in known else source for name in names} & set(known)
    for child in ast.iter_child_nodes(node):
        yield from imported(child, module, known)


def imports() -> dict[str, set[str]]:
    """What every module of the package imports."""
    files = source_files()
    graph = {m: set(imported(ast.parse(path.read_text()), m, files)) - {m} for m, path in files.items()}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(imports()).prepare()  # raises CycleError


def test_imports_go_only_downwards() -> None:
    for module, targets in imports().items():
        above = {t for t in targets if ORDER.index(part(t)) > ORDER.index(part(module))}
        assert not above, f"{module} imports {above}"


def test_no_module_but_the_trainer_s_writes_attributes_of_a_run() -> None:
    """Others call its functions; should_stop is Lightning's way to end a run."""
    written = re.compile(r"(self\.)?(trainer|run)\.(?!should_stop$|algorithm\.)[a-z_.]+")
    for module, path in source_files().items():
        if module != f"{PACKAGE}.run" and not module.startswith(f"{PACKAGE}.trainer."):
            nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
            found = [
                ast.unparse(n) for n in nodes if isinstance(n.ctx, ast.Store) and written.fullmatch(ast.unparse(n))
            ]
            assert not found, f"{module} writes {found}"


def test_every_package_is_listed_for_the_wheel() -> None:
    setuptools = pyproject()["tool"]["setuptools"]
    folders = {name for name, path in source_files().items() if path.name == "__init__.py"}
    configs = {".".join((PACKAGE, *path.parent.relative_to(ROOT).parts)) for path in (ROOT / "configs").rglob("*.yaml")}
    assert set(setuptools["packages"]) == folders | configs | {f"{PACKAGE}.cli.templates"}


@pytest.mark.slow
@pytest.mark.parametrize("links", [True, False])
def test_the_wheel_has_callbacks_and_configurations_once(tmp_path: Path, links: bool) -> None:
    """Git writes a link as a file that names its target where a system, such as Windows, has no links."""
    if find_spec("pip") is None or find_spec("setuptools") is None:
        pytest.skip("needs pip and setuptools")
    for name in (PACKAGE, "callbacks", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, symlinks=True)
    for name in () if links else ("callbacks", "configs"):
        (tmp_path / "checkout" / PACKAGE / name).unlink()
        (tmp_path / "checkout" / PACKAGE / name).write_text(f"../{name}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "checkout")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(tmp_path / "checkout")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    endings = "callbacks/checkpoint.py configs/semifl_digits.yaml presets/images.yaml my_method.yaml py.typed"
    for ending in endings.split():
        assert [name.partition("/")[0] for name in names if name.endswith(ending)] == [PACKAGE]


def test_the_version_is_reported_once_and_in_the_changelog() -> None:
    assert "version" not in pyproject()["project"]
    assert f"## {lightning_fedssl.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == lightning_fedssl.__version__


def test_every_public_class_is_offered_at_the_top() -> None:
    names = [name for collection in COLLECTIONS for name in import_module(f"{PACKAGE}.{collection}").__all__]
    assert len(names) == len(set(names))
    assert set(names) < set(lightning_fedssl.__all__)
    assert all(getattr(lightning_fedssl, name) is not None for name in lightning_fedssl.__all__)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "docs"])
def test_other_folders_of_the_checkout_are_no_part_of_the_package(folder: str) -> None:
    assert find_spec(f"{PACKAGE}.{folder}") is None


def test_dependencies_and_tools_are_pinned() -> None:
    project = pyproject()["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(line for name in ("docs", "flower", "timm", "dev") for line in extras[name])]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower(): line.partition(";")[0].strip() for line in lines if "==" in line}
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in needed}  # type: ignore[index]
    assert names - {"lightning-fedssl"} <= pins.keys()
    hooks = [h for r in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for h in r["hooks"]]
    assert {tool for hook in hooks for tool in hook.get("additional_dependencies", [])} == {pins["ruff"]}


def test_the_page_of_a_package_index_has_links_with_an_address() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    page = build_package_page.package_page(readme, "https://github.com/me/mine", "v1.0.0")
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets
    assert all(target.startswith(("https://", "#")) for target in targets)
    ours = [t.partition("/v1.0.0/")[2].partition("#")[0] for t in targets if "/me/mine/" in t]
    assert len(ours) == len(build_package_page.LINK.findall(readme))
    assert all((ROOT / path).is_file() for path in ours)
    assert tomllib.loads(build_package_page.project_urls("https://github.com/me/mine"))["project"]["urls"]["Source"]


def test_the_recipe_for_conda_needs_what_the_package_needs() -> None:
    text = (ROOT / "recipe/meta.yaml").read_text().replace("{% set", "# {% set")
    assert f'version = "{lightning_fedssl.__version__}"' in text
    recipe = yaml.safe_load(re.sub(r"{{ (\w+) }}", r"\1", text))
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base", "jsonargparse[signatures]": "jsonargparse"}
    needed = set()
    for line in pyproject()["project"]["dependencies"]:
        name, versions = re.fullmatch(r"([\w.\[\]-]+)(.*)", line).groups()  # type: ignore[union-attr]
        needed.add(f"{names.get(name, name.lower())} {versions}")
    run = {line.partition("  #")[0] for line in recipe["requirements"]["run"]}
    assert needed == {line for line in run if not line.startswith(("python ", "docstring_parser", "typeshed-client"))}
