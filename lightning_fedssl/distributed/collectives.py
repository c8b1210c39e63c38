"""Communication between the ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor


def gather(fabric: Fabric, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank; every rank must call it.

    Args:
        fabric: The ranks.
        value: Anything that can be pickled; tensors should be on the CPU.
    """
    if fabric.world_size == 1:
        return [value]
    values = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def gather_rows(
    fabric: Fabric, rows: dict[str, Tensor], counts: Sequence[int]
) -> dict[str, Tensor]:
    """Every rank's rows of named tensors, in rank order, on every rank, detached.

    Args:
        fabric: The ranks.
        rows: This rank's, ``(own rows, ...)`` each; empty on a rank without any.
        counts: Rows of each rank.
    """
    parts = gather(fabric, {name: (t.shape[1:], t.dtype) for name, t in rows.items()})
    layout = next(part for part in parts if part)
    of_all_ranks = {}
    for name, (shape, dtype) in layout.items():
        padded = torch.zeros(max(counts), *shape, dtype=dtype, device=fabric.device)
        if name in rows:
            padded[: len(rows[name])] = rows[name].detach()
        gathered = cast(Tensor, fabric.all_gather(padded))
        of_all_ranks[name] = torch.cat(
            [gathered[rank, :count] for rank, count in enumerate(counts)]
        )
    return of_all_ranks
