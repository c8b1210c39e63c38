"""A plugin of pytest with which every test runs on the pretend CUDA device: those marked ``gpu`` are not skipped.

As on a machine where nothing may be installed, there is no jsonargparse.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.pretend_cuda.bare import hide_packages
from tests.pretend_cuda.device import pretend_cuda

_device = contextlib.ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Before test files are imported, which ask whether there is a device."""
    hide_packages("jsonargparse")
    _device.enter_context(pretend_cuda())


def pytest_unconfigure(config: pytest.Config) -> None:
    """The device goes."""
    _device.close()
