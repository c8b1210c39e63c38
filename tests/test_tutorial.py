"""The notebook docs/tutorial.ipynb runs, shows what its text says, and its page in the site has the same cells."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """docs/build_tutorial.py as a module."""
    spec = importlib.util.spec_from_file_location("build_tutorial", DOCS / "build_tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
    return content


def printed(notebook: dict[str, Any]) -> str:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return "".join("".join(output["text"]) for output in outputs if "text" in output)


def test_the_cells_run_in_order_and_show_what_the_text_says(
    tmp_path: Path, script: ModuleType, stored: dict[str, Any]
) -> None:
    """Two rounds instead of twelve. The partition is that of the stored outputs; accuracies depend on the machine."""
    notebook = json.loads(
        json.dumps(stored).replace("max_rounds=12", "max_rounds=2").replace("range(1, 13)", "range(1, 3)")
    )
    before = Path.cwd()
    found = script.execute(notebook, tmp_path)
    assert Path.cwd() == before
    assert found["data"].statistics.hash[:12] in printed(stored)
    assert len(found["values"]) == len(found["bound_values"]) == 2
    assert found["guessed"].labels.shape == found["true"].shape == found["indices"].shape
    assert found["logits"].shape == (4, 10)
    assert found["own_run"].callback_metrics["test/accuracy"] > 0.5
    assert [len(c["outputs"]) for c in notebook["cells"] if c["cell_type"] == "code"] == [
        len(c["outputs"]) for c in stored["cells"] if c["cell_type"] == "code"
    ]


def test_the_stored_outputs_show_semifl_above_its_bound(stored: dict[str, Any]) -> None:
    lines = [line for line in printed(stored).splitlines() if ": test accuracy" in line]
    bound, semifl = (float(line.split()[-2]) for line in lines)
    assert semifl > bound + 1
    pictures = [o["data"]["image/png"] for c in stored["cells"] for o in c.get("outputs", []) if "data" in o]
    assert len(pictures) == 3
    assert os.path.getsize(DOCS / "tutorial.ipynb") < 200_000


def test_the_page_has_the_cells_and_outputs_of_the_notebook(
    tmp_path: Path, script: ModuleType, stored: dict[str, Any]
) -> None:
    (tmp_path / "images").mkdir()
    assert script.page(stored, tmp_path / "images") == (DOCS / "tutorial.md").read_text(encoding="utf-8")
    for picture in (tmp_path / "images").iterdir():
        assert picture.read_bytes() == (DOCS / "images" / picture.name).read_bytes()
