"""Hooks of the documentation site: measured tables and pictures outside ``docs/`` become files of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks/results")
"""Its Markdown, CSV and PNG files are linked from the pages as ``../benchmarks/results/...``."""


def on_files(files: Files, config: Any) -> Files:
    """Add the files of ``benchmarks/results`` to the site.

    Args:
        files: The site's files.
        config: The site's configuration.
    """
    for path in sorted(p for p in (ROOT / RESULTS).rglob("*") if p.suffix in (".md", ".csv", ".png")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links of pages point at the files that :func:`on_files` has added.

    In the repository ``benchmarks/`` lies beside ``docs/``, on the site inside it. Links to other files of the
    repository become plain code, because the site does not hold them.

    Args:
        markdown: The text of a page.
        page: The page.
        config: The site's configuration.
        files: The site's files.
    """
    depth = page.file.src_uri.count("/")
    if page.file.src_uri.startswith(RESULTS.as_posix()):
        return re.sub(r"\[([^\]]*)\]\((?:\.\./)+(?!benchmarks)[^)]*\)", r"\1", markdown)
    inside = "../" * (depth + 1) + RESULTS.as_posix()
    markdown = markdown.replace(f"]({inside}", f"]({'../' * depth}{RESULTS.as_posix()}")
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./){{{depth + 1}}}([^)]*)\)", r"`\2`", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show Sphinx roles of docstrings, such as ``:class:`X```, as code.

    Args:
        html: A page's content.
        page: The page.
        config: The site's configuration.
        files: The site's files.
    """
    return re.sub(r":(?:class|func|meth|data|mod|attr|exc):<code>~?([^<]*)</code>", r"<code>\1</code>", html)
