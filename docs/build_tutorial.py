"""Runs docs/tutorial.ipynb and stores its outputs: ``python docs/build_tutorial.py``, two minutes on two cores.

The notebook is the source. The script executes its cells in order, writes text and pictures into the notebook, and
writes the page docs/tutorial.md with the same cells and outputs for the site. It needs no Jupyter.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl

DOCS = Path(__file__).resolve().parent
NOTEBOOK = DOCS / "tutorial.ipynb"
Notebook = dict[str, Any]
"""A notebook as its file has it (nbformat 4)."""


def execute(notebook: Notebook, folder: Path) -> dict[str, Any]:
    """Run the code cells in one namespace and store their outputs in the notebook, in place.

    Args:
        notebook: The notebook.
        folder: The working folder of the cells.

    Returns:
        The namespace after the last cell.
    """
    mpl.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with contextlib.chdir(folder) if sys.version_info >= (3, 11) else _chdir(folder):
        for number, cell in enumerate(cells, start=1):
            cell["outputs"], cell["execution_count"] = _run("".join(cell["source"]), namespace), number
    return namespace


@contextlib.contextmanager
def _chdir(folder: Path) -> Any:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell: printed text, the value of a last expression, and figures."""
    from matplotlib import pyplot as plt

    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    text = printed.getvalue() + ("" if value is None else f"{value}\n")
    outputs = [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []
    for figure in map(plt.figure, plt.get_fignums()):
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None})
        picture = {"image/png": base64.b64encode(content.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": picture, "metadata": {}})
    plt.close("all")
    return outputs


def page(notebook: Notebook, images: Path) -> str:
    """The notebook as a page of the site.

    Args:
        notebook: The notebook with outputs.
        images: The folder for the pictures, beside the page.
    """
    parts, number = [], 0
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append("".join(f"    {line}" for line in output["text"]).rstrip())
            else:
                number += 1
                path = images / f"tutorial_{number}.png"
                path.write_bytes(base64.b64decode(output["data"]["image/png"]))
                parts.append(f"![The figure of the cell above]({images.name}/{path.name})")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Execute the notebook, and write it and the page."""
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (DOCS / "tutorial.md").write_text(page(notebook, DOCS / "images"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
