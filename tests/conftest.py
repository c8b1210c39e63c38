"""What every test starts from: one thread, no trace of an earlier test's seed or of pytest's own arguments."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two ranks and one must sum alike

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what the imports made out of garbage collections, which would search all of it: a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free everything at its end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fedssl"])
    before = {name: value for name, value in os.environ.items() if name.startswith(("PL_", "FEDSSL_"))}
    yield
    for name in [name for name in os.environ if name.startswith(("PL_", "FEDSSL_"))]:
        del os.environ[name]
    os.environ.update(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def _packages_are_searched_once() -> Iterator[None]:
    """Every trainer's Fabric asks all installed packages for callbacks, and they stay the same while tests run."""
    from lightning.fabric.utilities import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", functools.cache(vars(registry)["entry_points"]))
        yield
