"""Hooks of the documentation site: pages of the API, notebooks, links to files outside ``docs/``, roles of docstrings,
labels of table cells.
"""

from __future__ import annotations

import itertools
import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import api_pages
import notebooks

ROOT = Path(__file__).resolve().parent.parent
CSV = re.compile(r"\]\(\.\./(benchmarks/[\w./-]+\.csv)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the CSV files that pages link to as ``../benchmarks/...``, the pages of the API and the notebooks."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    for name in sorted({name for text in pages for name in CSV.findall(text)}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    menu = []
    for title, address, text in api_pages.pages():
        files.append(File.generated(config, address, content=text))
        menu.append({title: address})
    config.nav[-1]["Reference"].append({"API": menu})
    for name in notebooks.PAGES:
        content = json.dumps(notebooks.notebook(name), indent=1)
        files.append(File.generated(config, f"notebooks/{name}.ipynb", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to CSV files point into the site, show other links to the repository as code, and link the notebook."""
    for name, (address, section) in notebooks.PAGES.items():
        if page.file.src_uri == address:
            heading = f"## {section}" if section else markdown.partition("\n")[0]
            markdown = markdown.replace(f"{heading}\n", f"{heading}\n\n{_notebook_links(name, config)}\n", 1)
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)]*)\)", r"`\2`", CSV.sub(r"](\1)", markdown))


def _notebook_links(name: str, config: Any) -> str:
    """Where this text can be had as a notebook: a file, and Colab, which opens the branch ``notebooks`` at GitHub."""
    links = f"[As a notebook](notebooks/{name}.ipynb){{download}}"
    if config.repo_url:
        repository = config.repo_url.removeprefix("https://github.com/")
        links += (
            f" · [Open in Colab](https://colab.research.google.com/github/{repository}/blob/notebooks/{name}.ipynb)"
        )
    return links


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show Sphinx roles of docstrings, such as ``:class:`X```, as code, and label the cells of tables."""
    html = re.sub(r":(?:class|func|meth|data|mod|attr|exc):<code>~?([^<]*)</code>", r"<code>\1</code>", html)
    return re.sub(r"<table.*?</table>", _labelled, html, flags=re.DOTALL)


def _labelled(table: re.Match[str]) -> str:
    """A table whose cells name their column: narrow screens show each row as a list (images/site.css)."""
    heads = re.findall(r"<th[ >].*?</th>", table[0], re.DOTALL)
    names = itertools.cycle([escape(unescape(re.sub(r"<[^>]*>", "", head)).strip()) for head in heads] or [""])
    return re.sub(r"<td\b", lambda _: f'<td data-label="{next(names)}"', table[0])
