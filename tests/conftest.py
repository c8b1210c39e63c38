"""What every test starts from: one thread, no trace of an earlier test's seed or of pytest's own arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two ranks and one must sum alike

import pytest
import torch

from tests.pretend_cuda.process import build_driver

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fedssl"])
    before = {name: value for name, value in os.environ.items() if name.startswith(("PL_", "FEDSSL_"))}
    yield
    for name in [name for name in os.environ if name.startswith(("PL_", "FEDSSL_"))]:
        del os.environ[name]
    os.environ.update(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def pretend_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that answers for the CUDA driver on a machine without one."""
    return build_driver(tmp_path_factory.mktemp("driver"))
