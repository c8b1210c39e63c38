"""Several views of a batch in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedssl.state import Batch


def logits_of_views(
    model: Callable[[Tensor], Tensor], batch: Batch, names: Sequence[str]
) -> dict[str, Tensor]:
    """The logits of every view of a batch that it has, ``(images, classes)`` each, from one pass of
    all of them.

    Args:
        model: Computes logits.
        batch: The views by name.
        names: The views to pass.
    """
    views = {name: batch[name] for name in names if name in batch}
    logits = model(torch.cat(list(views.values()))).split(list(map(len, views.values())))
    return dict(zip(views, logits, strict=True))
