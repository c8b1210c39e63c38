"""Hooks of the documentation site: links to files outside ``docs/``, roles of docstrings, labels of table cells."""

from __future__ import annotations

import itertools
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
CSV = re.compile(r"\]\(\.\./(benchmarks/[\w./-]+\.csv)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the CSV files that pages link to as ``../benchmarks/...``."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    for name in sorted({name for text in pages for name in CSV.findall(text)}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to CSV files point into the site, and show other links to the repository as code."""
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)]*)\)", r"`\2`", CSV.sub(r"](\1)", markdown))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show Sphinx roles of docstrings, such as ``:class:`X```, as code, and label the cells of tables."""
    html = re.sub(r":(?:class|func|meth|data|mod|attr|exc):<code>~?([^<]*)</code>", r"<code>\1</code>", html)
    return re.sub(r"<table.*?</table>", _labelled, html, flags=re.DOTALL)


def _labelled(table: re.Match[str]) -> str:
    """A table whose cells name their column: narrow screens show each row as a list (images/site.css)."""
    heads = re.findall(r"<th[ >].*?</th>", table[0], re.DOTALL)
    names = itertools.cycle([escape(unescape(re.sub(r"<[^>]*>", "", head)).strip()) for head in heads] or [""])
    return re.sub(r"<td\b", lambda _: f'<td data-label="{next(names)}"', table[0])
