"""Ranks on one machine's CPU that are forked for one command; rank 0 is the process that called it.

So a script runs once, its model is trained in its own process, and the other ranks import and read nothing: the data
and the model are the parent's, in shared memory pages until somebody writes to them.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.launchers.launcher import _Launcher
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_fedssl.distributed import collectives, rank_watch
from lightning_fedssl.distributed.connections import Connections
from lightning_fedssl.distributed.shared_memory import SharedMemory

_HOST = "127.0.0.1"

# A forked process must not destroy what its parent has left: a former process group would wait for its threads, which
# only the parent has. This holds for every fork, such as those of Lightning's ddp_fork.
os.register_at_fork(after_in_child=gc.freeze)

LEAVING_SECONDS = 20.0
"""For the other ranks to end after rank 0 has; then they are killed."""


def can_fork() -> bool:
    """Whether ranks may be forked here: on Linux, and without a GPU, whose driver does not survive a fork."""
    return sys.platform == "linux" and not torch.cuda.is_available()


class ForkedRanks(DDPStrategy):
    """A strategy whose ranks are forked at every command, on the CPU.

    Args:
        optional: Whether a command may use one rank instead of all.

    Attributes:
        ranks: Ranks of the next command; as many as devices if None.
        connections: Connections between the ranks of the present command; None if it has one rank, and outside of a
            command.
        shared_memory: Memory of the ranks of the present command; None also where Python cannot create such memory.
        children: The processes of the other ranks of the present command, at rank 0, and what receives their errors.
    """

    def __init__(self, optional: bool = False) -> None:
        super().__init__(process_group_backend="gloo", start_method="fork")
        self.optional = optional
        self.ranks: int | None = None
        self.connections: Connections | None = None
        self.shared_memory: SharedMemory | None = None
        self._store: TCPStore | None = None
        self.children: list[tuple[BaseProcess, Connection]] = []

    @property
    def num_processes(self) -> int:
        """Ranks of the next command."""
        return super().num_processes if self.ranks is None else self.ranks

    def _configure_launcher(self) -> None:
        self._launcher = _ForkLauncher(self)

    def setup_environment(self) -> None:
        """Connect the ranks; a forked rank ends if rank 0 ends before."""
        connected = rank_watch.end_with_the_launcher()
        try:
            super().setup_environment()
        finally:
            connected.set()

    @contextmanager
    def meeting_point(self) -> Iterator[Connections]:
        """Inside, ranks can find each other and share memory; afterwards this process is a single one again."""
        self._store = TCPStore(_HOST, 0, self.num_processes, is_master=True, wait_for_workers=False)
        self.connections = Connections(self.num_processes)
        if hasattr(os, "memfd_create"):  # some builds of Python lack it
            self.shared_memory = SharedMemory(self.num_processes)
        try:
            yield self.connections
        finally:
            self.connections.close()
            if self.shared_memory is not None:
                self.shared_memory.close()
            self.connections = self.shared_memory = self._store = None
            self.children = []
            self.cluster_environment = LightningEnvironment()

    def sent_error(self) -> str | None:
        """The traceback that another rank has sent to rank 0; None if there is none, and on other ranks."""
        if self.global_rank:  # which has inherited the ends of pipes that are rank 0's
            return None
        found = next(filter(None, map(_received, (receiver for _, receiver in self.children))), None)
        return None if found is None else found[1]

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        if self._store is not None:
            port, ranks = self._store.port, self.num_processes
            store = self._store if self.global_rank == 0 else TCPStore(_HOST, port, ranks, is_master=False)
            torch.distributed.init_process_group(
                "gloo", store=store, rank=self.global_rank, world_size=ranks, timeout=self._timeout
            )


class RemoteTracebackError(Exception):
    """The traceback of an error that was raised on another rank, as text."""


class _ForkLauncher(_Launcher):
    """Forks all ranks but the first, and runs a function on all of them.

    Args:
        strategy: Says how many ranks there are.
    """

    def __init__(self, strategy: ForkedRanks) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks can fork."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on all ranks; returns what it returns here, on rank 0.

        Raises:
            Exception: What the function raises here; or what it raised on the rank that failed first.
        """
        strategy = self._strategy
        if strategy.num_processes == 1:
            return function(*args, **kwargs)
        with strategy.meeting_point() as connections:
            children = strategy.children
            try:
                for rank in range(1, strategy.num_processes):
                    children.append(self._fork(rank, connections, function, args, kwargs))
                connections.keep(0)
                return function(*args, **kwargs)
            except Exception as error:
                vars(error)["reports"] = True  # the others print nothing
                if isinstance(error, rank_watch.LostRankError) and (found := _first_error(children)) is not None:
                    raise found[0] from RemoteTracebackError(found[1])
                raise
            finally:
                with suppress(Exception):  # the group may be broken
                    collectives.leave_now()
                connections.close()
                _end(children)

    def _fork(
        self, rank: int, connections: Connections, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[BaseProcess, Connection]:
        forking = multiprocessing.get_context("fork")
        receiver, sender = forking.Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what is in the buffer
        child = forking.Process(
            target=_run_rank, args=(rank, connections, sender, function, args, kwargs), name=f"rank {rank}",
            daemon=False,
        )  # fmt: skip
        with warnings.catch_warnings(), _no_garbage_collection():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process may have threads
            child.start()
        sender.close()
        return child, receiver


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _run_rank(
    rank: int, connections: Connections, sender: Connection, function: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    """A forked rank: it logs errors only, as rank 0 logs the rest, and sends an error to rank 0 if that is alive."""
    parent = os.getppid()
    connections.keep(rank)
    gc.enable()  # what is here now is frozen
    os.environ["LOCAL_RANK"] = str(rank)
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the parent's threads are not in this process, so none may be waited for
    try:
        function(*args, **kwargs)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        if os.getppid() != parent:
            sys.stderr.write(f"error: {error}\n")
        elif vars(error).get("reports", True):
            with suppress(OSError):
                sender.send_bytes(_pickled(error))
        code = 1
    else:
        code = 0
    sender.close()
    if code:
        raise SystemExit(code)


def _pickled(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        data = pickle.dumps((error, text))
        pickle.loads(data)  # some errors can be written, but not read
    except Exception:
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), text))
    return data


def _first_error(children: Sequence[tuple[BaseProcess, Connection]]) -> tuple[Exception, str] | None:
    """The error that a rank has sent, and its traceback; None if a rank was killed."""
    for child, receiver in children:
        child.join(rank_watch.DYING_SECONDS)
        if (found := _received(receiver)) is not None:
            return found
    return None


def _received(receiver: Connection) -> tuple[Exception, str] | None:
    """The error that a rank has sent, and its traceback; None if it has sent none."""
    with suppress(EOFError, OSError):
        if receiver.poll():
            error, text = pickle.loads(receiver.recv_bytes())
            vars(error)["reports"] = True
            return error, text
    return None


def _end(children: Sequence[tuple[BaseProcess, Connection]]) -> None:
    """Wait for the ranks; those that do not end in time are killed."""
    deadline = time.monotonic() + LEAVING_SECONDS
    for child, receiver in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
        receiver.close()
