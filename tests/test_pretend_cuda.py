"""The pretend CUDA device obeys CUDA's rules: each is broken once. Runs in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretend_cuda.process import run_tests


def test_every_rule_catches_its_fault(pretend_driver: Path) -> None:
    run_tests(pretend_driver, "tests/pretend_cuda/device_rules.py")


def test_a_fault_on_the_device_is_reported(pretend_driver: Path, tmp_path: Path) -> None:
    """By a file of its own, outside of the folder of tests, so that nothing is imported for it."""
    path = tmp_path / "test_faulty.py"
    path.write_text("def test_it():\n    assert not 'a fault'\n")
    with pytest.raises(AssertionError, match="deselected"):
        run_tests(pretend_driver, str(path), "-k", "nothing_of_this_name")
    with pytest.raises(AssertionError, match="1 failed"):
        run_tests(pretend_driver, str(path))
