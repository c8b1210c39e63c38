"""Runs a SuperNode or a SuperLink whose task processes do not import PyTorch anew.

Flower starts a program for every message (``flwr-clientapp``) and for every run (``flwr-serverapp``), and each of these
processes imports PyTorch and Lightning, which takes seconds. Here one process imports them once. Flower finds scripts
with the names of its programs first in its path, and each script lets that process fork. So every message still has a
process of its own, which begins without a trace of former messages.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lightning_fedssl.deployment.flower import request_fork

PROGRAMS = ("flwr-clientapp", "flwr-serverapp")
"""The programs that Flower starts by their names."""

_MODULES = (
    "lightning_fedssl.cli.deploy",
    "lightning_fedssl.deployment.flower.server",
    "torchvision",
    "sklearn.datasets",
)
"""What the tasks import."""

_LOOK = 0.5
"""Seconds between two looks at whether the program has ended."""


def run_preloaded(command: Sequence[str]) -> int:
    """Run a program of Flower until it ends.

    Args:
        command: The program and its arguments, such as ``flower-supernode --superlink HOST:PORT``.

    Returns:
        The exit code of the program.

    Raises:
        FileNotFoundError: If there is no such program.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if shutil.which(command[0], path=path) is None:
        raise FileNotFoundError(
            f"there is no program {command[0]!r}: give flower-supernode or flower-superlink, and its options"
        )
    tasks = {found.name: found for found in entry_points(group="console_scripts") if found.name in PROGRAMS}
    for module in (*_MODULES, *(found.module for found in tasks.values())):
        import_module(module)
    gc.freeze()  # garbage collection in a fork would copy the memory that all forks share
    with tempfile.TemporaryDirectory(prefix="fedssl-") as folder, _listen(Path(folder) / "socket") as listener:
        process = subprocess.Popen(command, env=_environment(Path(folder), path))
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program gets it, too, and ends
        _fork_for_requests(listener, process, tasks)
    return process.returncode


def _listen(address: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    listener.listen()
    listener.settimeout(_LOOK)
    return listener


def _environment(folder: Path, path: str) -> dict[str, str]:
    """The environment in which Flower finds scripts in a folder instead of its own programs."""
    for name in PROGRAMS:
        program = shutil.which(name, path=path) or name
        command = [sys.executable, "-I", "-S", request_fork.__file__, str(folder / "socket"), program]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o700)
    return {**os.environ, "PATH": os.pathsep.join([str(folder), path])}


def _fork_for_requests(
    listener: socket.socket, process: subprocess.Popen[bytes], tasks: Mapping[str, EntryPoint]
) -> None:
    """Fork for every request, until the program has ended."""
    forks: set[int] = set()
    while process.poll() is None:
        forks -= {fork for fork in forks if os.waitpid(fork, os.WNOHANG)[0]}
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            fork = os.fork()
            if not fork:
                _run_task(connection, tasks)
            forks.add(fork)


def _run_task(connection: socket.socket, tasks: Mapping[str, EntryPoint]) -> NoReturn:
    """Run a program of Flower in this process, which was forked for it, and end the process."""
    code: Any = 1
    try:
        request = _receive(connection)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        np.random.seed()  # forks would share this generator, from which Flower's differential privacy draws its noise
        sys.argv = [request["program"], *request["arguments"]]
        code = tasks[Path(request["program"]).name].load()()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))  # what is left belongs to the first process


def _receive(connection: socket.socket) -> dict[str, Any]:
    """The request of a script; its output becomes that of this process."""
    _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
    for output, own in zip(outputs, (1, 2), strict=True):
        os.dup2(output, own)
        os.close(output)
    with connection.makefile("rb") as file:
        request: dict[str, Any] = json.load(file)
    return request
