"""The documentation site builds without warnings and without a network; its Python examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fedssl
import lightning_fedssl.models
from tests.forked_command import ForkedCommand, own_environment

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=_without_advice())
    assert result.returncode == 0, result.stderr
    return folder


def _without_advice() -> dict[str, str]:
    return {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


def test_every_page_is_built_and_listed_in_the_navigation(site: Path) -> None:
    listed = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == set(PAGES)
    for page in PAGES:
        built = site / ("index.html" if page == "index.md" else f"{page.removesuffix('.md')}/index.html")
        assert built.is_file(), page


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    loaded = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["'](?:https?:)?//([^/"']+)""")
    for path in site.rglob("*.html"):
        assert loaded.findall(path.read_text(encoding="utf-8")) == [], path


def test_links_to_measurements_lead_to_files_of_the_site(site: Path) -> None:
    for page in (site / "results", site / "results" / "fed_shvr"):
        links = re.findall(r'(?:src|href)="((?:\.\./)+benchmarks/[^"#]+)', (page / "index.html").read_text("utf-8"))
        assert len(links) > 5
        assert all((page / link).resolve().exists() for link in links)


def test_docstrings_show_no_markup_of_another_tool(site: Path) -> None:
    text = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert ":class:" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert "FederatedTrainer" in text


def test_the_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = [*lightning_fedssl.__all__, *lightning_fedssl.models.__all__]
    assert len(names) > 90
    assert [name for name in names if not re.search(rf"[.`]{name}\b", text)] == []


def python_of(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_shows_executed_examples_in_less_than_150_lines() -> None:
    """The quickstart's is executed below, those on export in tests/test_metrics_and_export_pages.py."""
    first, second = python_of("README.md")
    assert python_of("docs/index.md")[0].startswith(first)
    assert second in python_of("docs/export.md")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", ["docs/index.md", "docs/data.md"])
def test_the_example_of_a_page_runs(tmp_path: Path, page: str) -> None:
    code = python_of(page)[0].replace("max_rounds=5", "max_rounds=1, enable_progress_bar=False")
    process = ForkedCommand(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=own_environment(),
    )  # fmt: skip
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert 0.1 < float(re.findall(r"tensor\(([\d.]+)", printed)[-1]) <= 1
