"""The page of a comparison."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from lightning_fedssl.comparison.page import write_page
from tests.comparison.helpers import comparison
from tests.report.html import EVIL, Page


def test_the_page_of_a_suite_has_tables_curves_and_links_and_escapes_names(tmp_path: Path) -> None:
    suite, outcomes = comparison()
    suite.title = EVIL
    placed = [
        replace(one, run=replace(one.run, folder=tmp_path / "runs" / f"{one.run.entry.label} {one.run.seed}"))
        for one in outcomes
    ]
    for one in placed[:3]:  # the bound, one value of which is no number
        one.rows[1]["val/accuracy"] = math.inf
        for row in one.rows:
            row["communication/upload_bytes"] = 0
    version = placed[-1].run.folder / "lightning_logs/version_0"
    version.mkdir(parents=True)
    (version / "report.html").touch()
    runs = [one.run for one in placed]
    write_page(tmp_path, suite, runs, placed, "the command", live=True)
    page = Page(tmp_path)
    assert "script" not in page.tags
    assert EVIL in page.text
    assert page.live
    said = "G: Good is better than Bound by +13.0 points (+6.4 to +19.6). 7 of 9 runs have finished."
    assert said in " ".join(page.text.split())
    assert page.tags.count("b") == 3 + 2 + 1  # legends, and the difference of the entry that has three seeds
    assert page.tags.count("path") == 2 * (3 + 2)  # means and ranges; over bytes not those of the bound
    (address,) = page.addresses
    assert address.endswith("/lightning_logs/version_0/report.html")
    assert " " not in address
