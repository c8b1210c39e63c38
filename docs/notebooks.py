"""Pages as notebooks, which need no tool but Jupyter or Colab. `site_hooks.py` adds them to the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGES = {"quickstart": ("quickstart.md", ""), "own_images": ("data.md", "Folders of images")}
"""Page, and its only section that the notebook takes; without one all but the installation, which a cell does."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
SECTION = r"^## {}\n.*?(?=^## |\Z)"
INSTALL = "%pip install --quiet lightning-fedssl  # not needed where it is installed, such as in a checkout"


def notebook(name: str) -> dict[str, Any]:
    """The notebook of a name in :data:`PAGES`, in Jupyter's format 4."""
    cells = [{"id": f"cell-{number}", "metadata": {}, **cell} for number, cell in enumerate(_cells(name))]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}


def _cells(name: str) -> Iterator[dict[str, Any]]:
    page, section = PAGES[name]
    text = (DOCS / page).read_text(encoding="utf-8")
    flags = re.MULTILINE | re.DOTALL
    found = re.search(SECTION.format(section), text, flags)
    text = found[0] if found else re.sub(SECTION.format("Install"), "", text, flags=flags)
    yield _code(INSTALL)
    start = 0
    for block in BLOCK.finditer(text):
        kind, title, code = block.groups()
        if title or kind in ("bash", "python"):
            yield from _prose(text[start : block.start()])
            yield _code(f"%%writefile {title}\n{code}" if title else code if kind == "python" else _shell(code))
            start = block.end()
    yield from _prose(text[start:])


def _code(source: str) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": None, "outputs": [], "source": source.strip()}


def _prose(text: str) -> Iterator[dict[str, Any]]:
    """A cell of text; links to other pages have no place in a file that one downloads."""
    if text := re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text).strip():
        yield {"cell_type": "markdown", "source": text}


def _shell(code: str) -> str:
    """Commands as IPython takes them; TensorBoard, which would not end, as its extension."""
    lines = re.sub(r"^(?=\S)", "!", code, flags=re.MULTILINE)
    return lines.replace("!tensorboard", "%load_ext tensorboard\n%tensorboard")
