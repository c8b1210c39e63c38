"""The examples in the docstrings of public classes give what they say."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

import pytest

import lightning_fedssl

CLASSES = [getattr(lightning_fedssl, name) for name in lightning_fedssl.__all__]
WITH_EXAMPLE = [c for c in CLASSES if ">>>" in (c.__doc__ or "")]


def test_the_most_used_classes_have_an_example() -> None:
    assert len(WITH_EXAMPLE) >= 20


@pytest.mark.parametrize("documented", WITH_EXAMPLE, ids=lambda c: c.__name__)
def test_an_example_gives_what_it_says(
    documented: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = dict(vars(sys.modules[documented.__module__]))
    (example,) = doctest.DocTestFinder(recurse=False).find(documented, documented.__name__, globs=names)
    found = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert found.attempted
    assert not found.failed, capsys.readouterr().out
