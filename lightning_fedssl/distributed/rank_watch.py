"""Ranks that die: the others end within seconds, with one message that names them, instead of waiting for ever."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
from lightning.fabric import Fabric

from lightning_fedssl.distributed import collectives

POLL_SECONDS = 0.5
"""Seconds between two checks of the processes of the other ranks."""

GRACE_SECONDS = 10.0
"""For the main thread to notice a dead rank itself; afterwards the process is ended: it hangs in a collective."""

STAYING_SECONDS = 1.0
"""Rank 0, which counts the ranks that fail, stays so long for those that fail at the same time."""

DYING_SECONDS = 5.0
"""Seconds in which a process whose connections are closed must end."""

_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|Timed out waiting .*ms for \w+ op"
)
_RESUME = "resume with --ckpt_path last"


class LostRankError(ConnectionError):
    """Another rank has ended in the middle of a command."""


class RankWatch:
    """A context in which every rank watches the processes of the other ranks on its machine.

    A collective fails soon after a rank has died; the error is raised as :class:`LostRankError`. A rank that does not
    come to a collective, or hangs in one, is ended by a thread. Any error that leaves the context gets an attribute
    ``reports``: whether this rank is the one that prints its message, so that the user reads one line.

    Args:
        fabric: The ranks, which communicate already.

    Raises:
        LostRankError: At the end of the context.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._others: dict[int, int] = {}
        self._first_to_fail: bool | None = None
        self._counting = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> RankWatch:
        if self.fabric.world_size > 1:
            own = (socket.gethostname(), os.getpid())
            ranks = enumerate(collectives.gather(self.fabric, own))
            self._others = {rank: pid for rank, (host, pid) in ranks if host == own[0] and pid != own[1]}
            _stop_lightnings_observer()
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.fabric.world_size > 1:
                self.fabric.barrier()  # a rank that has finished is not dead
        except RuntimeError as failure:
            error = failure
        finally:
            self._ended.set()
        if error is None or self.fabric.world_size == 1:
            return
        lost = is_lost_connection(error)
        if lost:
            self._await_a_death()
        raised = LostRankError(self.message()) if lost else error
        vars(raised)["reports"] = self._reports()
        if self.fabric.global_rank == 0:
            self._await_other_failures()
        if lost:
            raise raised from error

    def dead(self) -> list[int]:
        """The ranks of this machine that have died, in ascending order."""
        return sorted(rank for rank, pid in self._others.items() if not is_alive(pid))

    def _await_a_death(self) -> None:
        """Wait until the process has ended: its connections close a moment before."""
        deadline = time.monotonic() + DYING_SECONDS
        while self._others and not self.dead() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _await_other_failures(self) -> None:
        """Wait until all ranks have failed or the others are dead: without rank 0, each would print the message."""
        deadline, ranks = time.monotonic() + STAYING_SECONDS, self.fabric.world_size
        while len(self.dead()) < ranks - 1 and (_count_failure(0) or 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.01)

    def message(self) -> str:
        """The message: which rank died, and what to do."""
        dead = self.dead()
        if not dead:
            return (
                "the connection to another rank was lost: that process was killed, ran out of memory or failed (its "
                f"own message comes first, if it could write one); {_RESUME}"
            )
        names = f"rank {dead[0]}" if len(dead) == 1 else "ranks " + ", ".join(map(str, dead))
        return (
            f"{names} died: killed, out of memory, or failed with a message of its own; {_RESUME} (or start again if "
            "there is no checkpoint yet)"
        )

    def _reports(self) -> bool:
        """Whether no other rank has failed before this one.

        Both the main thread and the watching thread ask; a rank must count as one failure, or neither would report.
        """
        with self._counting:
            if self._first_to_fail is None:
                self._first_to_fail = self._fails_first()
            return self._first_to_fail

    def _fails_first(self) -> bool:
        """Count this rank's failure; where rank 0 can no longer say, the ranks below it must be dead."""
        if (failed := _count_failure()) is not None:
            return failed == 1
        dead = self.dead()
        return all(rank in dead for rank in self._others if rank < self.fabric.global_rank)

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            if self.dead():
                message, reports = self.message(), self._reports()
                if not self._ended.wait(GRACE_SECONDS):
                    self._end_process(message, reports)
                return

    def _end_process(self, message: str, reports: bool) -> None:
        """End this process, which does not return from what it does, with one message.

        A forked rank sends its error to rank 0 instead of printing it, so rank 0 prints it here.
        """
        sent: Callable[[], str | None] = getattr(self.fabric.strategy, "sent_error", lambda: None)
        if (text := sent()) is not None:
            sys.stderr.write(f"{text}\nerror: {message}\n")
        elif reports:
            sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
        os._exit(1)


def _count_failure(failures: int = 1) -> int | None:
    """Count a rank that fails, at rank 0, and return the number of failed ranks; None if rank 0 does not answer."""
    with suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        return int(store.add("lightning_fedssl/failed", failures))
    return None


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a collective means that another rank is gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not asked for its exit code does not."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path("/proc").is_dir()


def end_with_the_launcher() -> threading.Event:
    """Let a process that a launcher started end if the launcher does before the ranks are connected.

    It would wait half an hour for rank 0 otherwise. Afterwards :class:`RankWatch` does the work.

    Returns:
        Set it when the ranks are connected.
    """
    connected, parent = threading.Event(), os.getppid()

    def watch() -> None:
        while not connected.wait(POLL_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    if os.environ.get("LOCAL_RANK", "0") != "0":
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
    return connected


def _stop_lightnings_observer() -> None:
    """Lightning's thread would kill this process within five seconds, before it can close its files and say why."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            vars(thread)["_child_processes"] = []
