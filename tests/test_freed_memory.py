"""Freed memory stays with the process."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from lightning_fedssl.trainer import launch
from lightning_fedssl.trainer.freed_memory import keep_freed_memory
from tests.toy import ToyData, toy_semifl, toy_trainer

glibc = pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
BLOCKS, BYTES, STEPS = 24, 8 << 20, 10
"""The activations of a step, of 8 MiB each, and the number of steps."""


def _page_faults_of_steps(answer: Connection, keep: bool) -> None:
    """Send the page faults of steps after the first ones, which touch the memory for the first time."""
    if keep:
        keep_freed_memory()
    for step in range(STEPS + 2):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(BYTES // 4) for _ in range(BLOCKS)]
        del activations
    answer.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def page_faults(keep: bool) -> int:
    """In a process of its own, as the setting cannot be taken back."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_page_faults_of_steps, args=(sender, keep))
    process.start()
    found: int = receiver.recv()
    process.join()
    return found


@glibc
def test_steps_get_no_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = STEPS * BLOCKS * BYTES // 4096
    assert page_faults(keep=True) < pages / 100
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")  # the user's own setting is left alone
    monkeypatch.setattr("lightning_fedssl.trainer.freed_memory.ctypes.CDLL", lambda _: pytest.fail("it was changed"))
    keep_freed_memory()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_another_c_library_is_left_alone(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def library(name: object) -> object:
        opened.append(name)
        return object()  # without mallopt, as musl

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("lightning_fedssl.trainer.freed_memory.ctypes.CDLL", library)
    keep_freed_memory()
    assert opened == ([None] if platform == "linux" else [])


def test_a_run_on_a_cpu_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: calls.append("kept"))
    toy_trainer(tmp_path, max_rounds=1).fit(toy_semifl(), ToyData())
    assert calls == ["kept"]
    with launch.settings_of(torch.device("meta")):
        assert calls == ["kept"]
