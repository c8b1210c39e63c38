"""Freed memory stays with the process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fedssl.trainer import freed_memory, launch
from tests.toy import ToyData, toy_semifl, toy_trainer

glibc = pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
BLOCKS, BYTES, STEPS = 24, 8 << 20, 10
"""The activations of a step, of 8 MiB each, and the number of steps."""


STEPS_OF_A_PROCESS = """
import ctypes, resource, runpy, sys

keep_freed_memory = runpy.run_path(sys.argv[1])["keep_freed_memory"]
blocks, size, steps = map(int, sys.argv[2:])
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]

def page_faults_of_steps():
    for step in range(steps + 2):  # the first two touch the memory for the first time
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [library.malloc(size) for _ in range(blocks)]
        for block in activations:
            ctypes.memset(block, 1, size)
        for block in activations:
            library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returning = page_faults_of_steps()
keep_freed_memory()
print(returning, page_faults_of_steps())
"""
"""Prints the page faults with glibc's defaults, and with freed memory kept."""


@glibc
def test_steps_get_no_new_pages() -> None:
    """In a new process: in one that has trained, or in its fork, the steps could use memory that others have freed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    sizes = map(str, (BLOCKS, BYTES, STEPS))
    command = [sys.executable, "-c", STEPS_OF_A_PROCESS, freed_memory.__file__, *sizes]
    result = subprocess.run(command, env=own, text=True, capture_output=True, check=True)
    returning, keeping = map(int, result.stdout.split())
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
