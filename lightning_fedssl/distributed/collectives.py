"""Communication between the ranks of a run: small objects, the sums of a round, rows of tensors."""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedssl.distributed.connections import LONGEST, Connections
from lightning_fedssl.distributed.shared_memory import PrivateMemory, SharedMemory
from lightning_fedssl.functional.averaging import WeightedSum

_FIRST = LONGEST
"""Bytes of a value that :func:`gather` sends in its first message; the values of most rounds are shorter."""

_LENGTH = 8
"""Bytes in which a value's length is sent."""


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank.

    A message takes about as long for a few kilobytes as for one byte. So the length is not sent before the value, but
    with its beginning; only long values take a second message. Forked ranks send the first through connections of their
    own.

    Args:
        fabric: The ranks.
        value: Anything that can be pickled.
    """
    if fabric.world_size == 1:
        return [value]
    content = pickle.dumps(value)
    framed = len(content).to_bytes(_LENGTH, "little") + content
    connections: Connections | None = getattr(fabric.strategy, "connections", None)
    first = framed[:_FIRST]
    parts = _gather_bytes(fabric, first, _FIRST) if connections is None else connections.gather(first)
    ends = [_LENGTH + int.from_bytes(part[:_LENGTH], "little") for part in parts]
    if (longest := max(ends)) > _FIRST:
        rest = _gather_bytes(fabric, framed[_FIRST:], longest - _FIRST)
        parts = [first + second for first, second in zip(parts, rest, strict=True)]
    return [pickle.loads(part[_LENGTH:end]) for part, end in zip(parts, ends, strict=True)]


def _gather_bytes(fabric: Fabric, mine: bytes, size: int) -> list[bytes]:
    """Every rank's bytes, filled up with zeros to one size, in one collective."""
    device = torch.device("cpu") if torch.distributed.get_backend() == "gloo" else fabric.device
    padded = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(fabric.world_size * size, dtype=torch.uint8, device=device)
    torch.distributed.all_gather_into_tensor(everyone, padded)
    return [part.numpy().tobytes() for part in everyone.cpu().split(size)]


def together(fabric: Fabric, action: Callable[[], None]) -> None:
    """Run an action that may fail on every rank, on the first rank of each machine before its others.

    Either all ranks continue, or all raise an error.

    Args:
        fabric: The ranks.
        action: The action, such as downloading and reading the data.

    Raises:
        ConnectionAbortedError: If only other ranks failed; a rank that failed raises its own error.
    """
    refusal: Exception | None = None
    with fabric.rank_zero_first(local=True):
        try:
            action()
        except Exception as error:
            refusal = error
    refused = gather(fabric, None if refusal is None else str(refusal))
    failed = next((rank for rank, text in enumerate(refused) if text is not None), None)
    if failed is not None:
        with suppress(RuntimeError):  # another rank may end before this one
            leave(fabric)
    if refusal is not None:
        raise refusal
    if failed is not None:
        raise ConnectionAbortedError(f"rank {failed} ended with an error: {refused[failed]}")


def add_up(mine: Tensor) -> Tensor:
    """The sum of the ranks' tensors, in place. Unlike Fabric's ``all_reduce``, it has no barrier before it.

    Args:
        mine: This rank's tensor, contiguous, and of the same shape on every rank.
    """
    torch.distributed.all_reduce(mine)
    return mine


def stack_rows(fabric: Fabric, row: Tensor) -> Tensor:
    """The ranks' rows ``(n,)``, in rank order: ``(ranks, n)``; without the barrier of Fabric's ``all_gather``.

    Args:
        fabric: The ranks.
        row: This rank's row.
    """
    rows = row.new_empty(fabric.world_size * len(row))
    torch.distributed.all_gather_into_tensor(rows, row)
    return rows.view(fabric.world_size, -1)


def reduce(fabric: Fabric, total: WeightedSum) -> None:
    """Add up the ranks' sums in place, in one all-reduce of one flat buffer.

    A rank that trained no client adds zeros.

    Args:
        fabric: The ranks.
        total: This rank's sum; afterwards the sum over all ranks.
    """
    parts = gather(fabric, (total.weight, total.count, {n: (t.shape, t.dtype) for n, t in total.total.items()}))
    total.weight = sum(weight for weight, _, _ in parts)
    total.count = sum(count for _, count, _ in parts)
    layout: dict[str, tuple[torch.Size, torch.dtype]] = next((part for _, _, part in parts if part), {})
    if not layout:
        return
    for name, (shape, dtype) in layout.items():
        total.total.setdefault(name, torch.zeros(shape, dtype=dtype, device=fabric.device))
    flat = add_up(torch.cat([total.total[name].flatten() for name in layout]))
    sizes = [shape.numel() for shape, _ in layout.values()]
    for (name, (shape, dtype)), part in zip(layout.items(), torch.split(flat, sizes), strict=True):
        total.total[name] = part.reshape(shape).to(dtype)


def gather_tensors(
    fabric: Fabric, mine: Iterable[tuple[Any, Sequence[Tensor]]]
) -> list[list[tuple[Any, list[Tensor]]]]:
    """Every rank's labelled lists of tensors, in rank order, on every rank; the tensors are on the CPU.

    The tensors of a rank are views of one buffer of bytes. Forked ranks share its memory; other ranks receive a copy.

    Args:
        fabric: The ranks.
        mine: This rank's lists, each with a label that can be pickled. A list is copied before the next one is taken.

    Returns:
        The lists of each rank. The tensors are valid until the second call after this one, and must not be changed.
    """
    memory: SharedMemory | PrivateMemory | None = getattr(fabric.strategy, "shared_memory", None)
    shared = memory is not None
    memory = memory or PrivateMemory()
    memory.begin_exchange()
    described, own = _written(mine, partial(memory.of_rank, fabric.global_rank))
    everyone = []
    for rank, lists in enumerate(gather(fabric, described)):  # when all have written
        layouts = [layout for _, of_label in lists for layout in of_label]
        buffer = own if rank == fabric.global_rank else memory.of_rank(rank, _size(layouts))
        if layouts and not shared:
            _broadcast(fabric, buffer[: _size(layouts)], rank)
        parts = iter(_views(buffer, layouts))
        everyone.append([(label, [next(parts) for _ in of_label]) for label, of_label in lists])
    return everyone


_Layout = tuple[torch.Size, torch.dtype]

_ALIGNMENT = 64
"""Bytes to which every tensor of a buffer is aligned: a processor's cache line, and more than any element."""


_Described = list[tuple[Any, list[_Layout]]]
"""Labels, and the shapes and types of the tensors of each."""


def _written(
    lists: Iterable[tuple[Any, Sequence[Tensor]]], memory: Callable[[int], Tensor]
) -> tuple[_Described, Tensor]:
    """Copy labelled lists of tensors into memory, one after another; returns their description and the memory.

    Args:
        lists: The tensors of a list may be invalid when the next one is taken.
        memory: Returns memory of at least so many bytes, with what has been written so far.
    """
    described: _Described = []
    end, buffer = 0, memory(0)
    for label, tensors in lists:
        layouts = [(t.shape, t.dtype) for t in tensors]
        start, end = end, end + _size(layouts)
        if end > len(buffer):
            buffer = memory(2 * end)
        if layouts:
            torch._foreach_copy_(_views(buffer[start:], layouts), [t.detach() for t in tensors])
        described.append((label, layouts))
    return described, buffer


def _starts(layouts: Sequence[_Layout]) -> list[int]:
    """Where each tensor begins in a buffer, and the size of the buffer."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in layouts]
    return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]


def _size(layouts: Sequence[_Layout]) -> int:
    return _starts(layouts)[-1]


def _views(buffer: Tensor, layouts: Sequence[_Layout]) -> list[Tensor]:
    """The tensors of these shapes and types in a buffer of bytes."""
    return [
        buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for start, (shape, dtype) in zip(_starts(layouts), layouts, strict=False)
    ]


def _broadcast(fabric: Fabric, buffer: Tensor, source: int) -> None:
    """Fill a buffer on the CPU with that of another rank."""
    sent = buffer.to(fabric.device)  # the buffer itself on a CPU
    torch.distributed.broadcast(sent, src=source)
    buffer.copy_(sent)


def gather_rows(fabric: Fabric, rows: dict[str, Tensor], counts: Sequence[int]) -> dict[str, Tensor]:
    """Every rank's rows of named tensors, in rank order, on every rank, detached.

    Args:
        fabric: The ranks.
        rows: This rank's, ``(own rows, ...)`` each; empty on a rank without any.
        counts: Rows of each rank.
    """
    parts = gather(fabric, {name: (t.shape[1:], t.dtype) for name, t in rows.items()})
    layout: dict[str, tuple[torch.Size, torch.dtype]] = next(part for part in parts if part)
    everyone = {}
    for name, (shape, dtype) in layout.items():
        padded = torch.zeros(max(counts), *shape, dtype=dtype, device=fabric.device)
        if name in rows:
            padded[: len(rows[name])] = rows[name].detach()
        gathered = cast(Tensor, fabric.all_gather(padded))
        everyone[name] = torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)])
    return everyone


def leave(fabric: Fabric) -> None:
    """Leave the process group together: the backend aborts a rank that ends while another still communicates."""
    if torch.distributed.is_initialized():
        fabric.barrier()
        leave_now()


def leave_at_exit() -> None:
    """Leave the process group when the interpreter ends, so that a script can train several times.

    Otherwise a thread of the backend that still holds a tensor can abort the process while the interpreter shuts down
    (https://github.com/pytorch/pytorch/pull/179291). There is no barrier, because another rank may have failed.
    """
    if torch.distributed.is_initialized():
        atexit.register(leave_now)


def leave_now() -> None:
    """Leave the process group without waiting for the other ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
