"""Freed memory stays with the process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from lightning_fedssl.trainer import freed_memory, launch
from tests.toy import ToyData, toy_semifl, toy_trainer

glibc = pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
BLOCKS, BYTES, STEPS = 24, 8 << 20, 10
"""The activations of a step, of 8 MiB each, and the number of steps."""


def page_faults_of_steps() -> int:
    """Page faults of steps after the first ones, which touch the memory for the first time."""
    for step in range(STEPS + 2):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(BYTES // 4) for _ in range(BLOCKS)]
        del activations
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _returning_and_keeping(answer: Connection) -> None:
    """Send the page faults with glibc's initial settings, which an earlier run may have changed, and without them."""
    library = ctypes.CDLL(None)
    for setting in (freed_memory._TRIM_THRESHOLD, freed_memory._MMAP_THRESHOLD):
        library.mallopt(setting, 128 << 10)
    returning = page_faults_of_steps()
    freed_memory.keep_freed_memory()
    answer.send((returning, page_faults_of_steps()))


@glibc
def test_steps_get_no_new_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which leaves the settings of this one as they are."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_returning_and_keeping, args=(sender,))
    process.start()
    returning, keeping = receiver.recv()
    process.join()
    pages = STEPS * BLOCKS * BYTES // resource.getpagesize()
    assert returning > pages / 2
    assert keeping < pages / 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_user_s_own_settings_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr("lightning_fedssl.trainer.freed_memory.ctypes.CDLL", opened.append)
    monkeypatch.setenv(name, "131072")
    freed_memory.keep_freed_memory()
    assert opened == []


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_another_c_library_is_left_alone(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []

    def library(name: object) -> object:
        opened.append(name)
        return object()  # without mallopt, as musl

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("lightning_fedssl.trainer.freed_memory.ctypes.CDLL", library)
    freed_memory.keep_freed_memory()
    assert opened == ([None] if platform == "linux" else [])


def test_a_run_on_a_cpu_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: calls.append("kept"))
    toy_trainer(tmp_path, max_rounds=1).fit(toy_semifl(), ToyData())
    assert calls == ["kept"]
    with launch.settings_of(torch.device("meta")):
        assert calls == ["kept"]
