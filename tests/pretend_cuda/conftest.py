"""Parts of the tests of this folder, which two processes run side by side."""

from __future__ import annotations

import pytest

from tests.pretend_cuda.federations import CONFIGS


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part 0/2``: every second configuration, from the first on, and the tests that name none."""
    parser.addoption("--part", default="0/1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other parts. Tests of one configuration share their runs, so they stay together."""
    part, parts = map(int, str(config.getoption("--part")).split("/"))
    chosen = [item for item in items if _number_of(item) % parts == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _number_of(item: pytest.Item) -> int:
    """The number of the configuration that a test names."""
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("name") if callspec else None
    return list(CONFIGS).index(name) if name in CONFIGS else 0
