"""Runs a simulator round by round, so that several simulators can take turns on one machine.

A worker is a process that calls :meth:`Pacer.pause` before its first round and after every round. There it waits for a
line on its standard input: ``rounds N`` runs N rounds and then reports their CPU and wall seconds, ``loss`` reports the
loss of the global model, and the end of the input ends the process. Only lines that begin with the mark are reports;
other output, of libraries, is ignored.

While a worker waits, its child processes are stopped: those of Ray take 7 % of a core when nothing is to be done, which
would slow down whoever has the turn, and most of all a contender that uses both cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

MARK = "@report "


class Pacer:
    """Waits between rounds.

    Args:
        loss: The loss of the global model as it is, over all images.
        output: Where reports go, if the simulator's standard output is redirected.
    """

    def __init__(self, loss: Callable[[], float], output: IO[str] | None = None) -> None:
        self._loss = loss
        self._output = output
        self._left = 0
        self._asked = False
        self._own = self._below = self._wall = 0.0
        self._root = os.getpid()
        self._commands = os.fdopen(os.dup(sys.stdin.fileno()))  # forked ranks, of which the first waits, have no stdin

    def pause(self) -> None:
        """Called before the first round and after every round."""
        self._left -= 1
        if self._left > 0:
            return
        own, wall = time.process_time() - self._own, time.perf_counter() - self._wall  # before looking at the others
        children = _cpu_seconds_by_process(self._root)
        _send(children, signal.SIGSTOP)
        if self._asked:
            self._report({"cpu": own + sum(children.values()) - self._below, "wall": wall})
        else:
            self._report({"ready": 1.0})
        self._wait(children)

    def _wait(self, children: Iterable[int]) -> None:
        for line in self._commands:
            command, _, number = line.strip().partition(" ")
            if command == "loss":
                self._report({"loss": self._loss()})
                continue
            self._asked, self._left = True, int(number)
            self._below = sum(_cpu_seconds_by_process(self._root).values())
            _send(children, signal.SIGCONT)
            self._own, self._wall = time.process_time(), time.perf_counter()
            return
        _send(children, signal.SIGCONT)
        sys.stdout.flush()
        os._exit(0)  # some simulators have threads and processes that would continue to run

    def _report(self, values: dict[str, float]) -> None:
        print(MARK + json.dumps(values), file=self._output, flush=True)


def network_argument() -> str:
    """``--network`` of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", required=True, help="lr or cnn")
    return str(parser.parse_known_args()[0].network)


def _cpu_seconds_by_process(root: int) -> dict[int, float]:
    """CPU seconds of each other process below one, with a resolution of 10 ms; empty without /proc."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    me = os.getpid()
    return {pid: seconds[pid] for pid in parents if pid != me and _is_below(pid, root, parents)}


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)
