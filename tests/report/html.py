"""Reads pages as a browser does."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

EVIL = "<script>alert('1')</script>"


class Page(HTMLParser):
    """What a browser makes of a page: tags, text and addresses."""

    def __init__(self, folder: Any) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(Path(str(folder), "report.html").read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "hr", "br", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "path" or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def live(self) -> bool:
        return "loads itself again" in self.text
