"""Communication between the ranks of a run: small objects, the sums of a round, rows of tensors."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedssl.functional.averaging import WeightedSum


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank.

    Args:
        fabric: The ranks.
        value: Anything that can be pickled.
    """
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return values


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
    fabric: Fabric, mine: Sequence[tuple[Any, Sequence[Tensor]]]
) -> list[list[tuple[Any, list[Tensor]]]]:
    """Every rank's labelled lists of tensors, in rank order, on every rank; the tensors are copies on the CPU.

    The tensors of a rank are sent as one buffer of bytes, of which the results are views.

    Args:
        fabric: The ranks.
        mine: This rank's lists, each with a label that can be pickled.
    """
    described = [(label, [(t.shape, t.dtype) for t in tensors]) for label, tensors in mine]
    everyone = []
    for rank, lists in enumerate(gather(fabric, described)):
        buffer, views = _laid_out([layout for _, layouts in lists for layout in layouts])
        if rank == fabric.global_rank and views:
            torch._foreach_copy_(views, [t.detach() for _, tensors in mine for t in tensors])
        if views:
            sent = buffer.to(fabric.device)  # the buffer itself on a CPU
            torch.distributed.broadcast(sent, src=rank)
            buffer.copy_(sent)
        parts = iter(views)
        everyone.append([(label, [next(parts) for _ in layouts]) for label, layouts in lists])
    return everyone


_ALIGNMENT = 64
"""Bytes to which every tensor of a buffer is aligned: a processor's cache line, and more than any element."""


def _laid_out(layouts: Sequence[tuple[torch.Size, torch.dtype]]) -> tuple[Tensor, list[Tensor]]:
    """A buffer of bytes for tensors of these shapes and types, and the tensors as views of it."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in layouts]
    starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8)
    views = [
        buffer[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, layouts, strict=False)
    ]
    return buffer, views


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
