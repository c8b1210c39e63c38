"""The command line in processes of its own that start at once: forked from this one, which has imported everything.

Each command has one test with a fresh interpreter, which costs six seconds of a processor; the others start here. The
child has its own arguments, environment, working folder and standard streams, and ends with its exit code.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.fabric.strategies.launchers import subprocess_script

from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet

LAUNCHERS = ("SLURM_", "LOCAL_RANK", "WORLD_SIZE")
"""Beginnings of variables by which a process would be a rank of a job."""


def own_environment() -> dict[str, str]:
    """The environment without a job of several processes; one thread, as in the tests."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**own, "OMP_NUM_THREADS": "1"}


@functools.cache
def prepare_forks() -> None:
    """Read a configuration and the digits in this process, so that libraries' caches are not filled in every child."""
    with mock.patch.dict(os.environ), quiet():
        FederatedCLI(args=["--config=semifl_digits.yaml"], run=False).datamodule.setup()


class ForkedCommand(subprocess.Popen[str]):
    """A process that runs ``python -m MODULE ARGUMENTS`` or ``python -c CODE ARGUMENTS`` in a fork.

    Ranks that the command starts are forked, too.
    """

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        """Fork where :class:`subprocess.Popen` starts a program; its pipes, waiting and signals are used unchanged."""
        prepare_forks()
        folder, environment = rest[4:6]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[9:15]
        self.pid = os.fork()
        if self.pid == 0:
            _run(args[1:], folder, environment, (p2cread, c2pwrite, errwrite))
        self._child_created = True
        close: Any = self._close_pipe_fds  # type: ignore[attr-defined]
        close(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _run(arguments: Sequence[str], folder: Any, environment: Any, streams: tuple[int, int, int]) -> None:
    """Become the process: streams, folder, environment, arguments; then run, and end with the exit code."""
    code = 1
    try:
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        _log_to(sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        atexit._clear()
        gc.freeze()  # a collection would copy the memory that is shared with the parent
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(folder or ".")
        sys.path.insert(0, os.getcwd())
        vars(subprocess_script)["subprocess"] = types.SimpleNamespace(Popen=ForkedCommand)
        vars(subprocess_script)["_basic_subprocess_cmd"] = lambda: [sys.executable, *arguments]
        sys.argv = [arguments[0], *arguments[2:]]
        code = _call(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def _log_to(stream: Any) -> None:
    """Log as a fresh interpreter does: without pytest's handlers, and Lightning's write to this process's stream."""
    logging.getLogger().handlers.clear()
    logging.getLogger("lightning_fedssl").handlers.clear()
    for name in ("lightning.fabric", "lightning.pytorch"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(stream)


def _call(arguments: Sequence[str]) -> int:
    if arguments[0] == "-c":
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        return 0
    assert arguments[0] == "-m"
    if arguments[1] != "lightning_fedssl":
        runpy.run_module(arguments[1], run_name="__main__")
        return 0
    from lightning_fedssl.cli import main

    return main()


def start(*arguments: str, folder: Path | None = None, **environment: str) -> ForkedCommand:
    """Start ``lightning-fedssl`` with these arguments; what it writes to stdout and stderr is kept apart."""
    return ForkedCommand(
        [sys.executable, "-m", "lightning_fedssl", *arguments], cwd=folder, env={**own_environment(), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
