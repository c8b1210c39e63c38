"""A queue of projections of earlier images, which a contrastive loss uses in addition to those of
the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fedssl.functional.contrastive import References


class MemoryQueue(nn.Module):
    """A ring buffer of the last ``size`` keys with their labels and confidence, stored as module
    buffers.

    Empty slots are not valid references.

    Args:
        size: Number of slots.
        dimension: Length of a key.
    """

    keys: Tensor
    labels: Tensor
    confident: Tensor
    filled: Tensor
    position: Tensor

    def __init__(self, size: int, dimension: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("keys", torch.zeros(size, dimension), persistent=False)
        self.register_buffer("labels", torch.full((size,), -1), persistent=False)
        self.register_buffer("confident", torch.zeros(size, dtype=torch.bool), persistent=False)
        self.register_buffer("filled", torch.zeros(size, dtype=torch.bool), persistent=False)
        self.register_buffer("position", torch.zeros((), dtype=torch.int64), persistent=False)

    @torch.no_grad()
    def push(self, new: References) -> None:
        """Replace the oldest keys by new ones.

        Of more than ``size`` new keys, the last ``size`` are stored.

        Args:
            new: The keys, in order; all of them must be valid.
        """
        count = len(new.labels)
        stored = min(count, self.size)
        slots = (
            self.position + torch.arange(count - stored, count, device=self.position.device)
        ) % self.size
        for queue, values in zip((self.keys, self.labels, self.confident), new, strict=False):
            queue[slots] = values[count - stored :].to(queue.dtype)
        self.filled.index_fill_(0, slots, True)  # an assignment would wait for the device
        self.position.add_(count).remainder_(self.size)

    @torch.no_grad()
    def clear(self) -> None:
        """Empty every slot."""
        self.labels.fill_(-1)
        for buffer in (self.keys, self.confident, self.filled, self.position):
            buffer.zero_()

    def references(self, *, all_confident: bool = False, empty_count: bool = False) -> References:
        """A copy of the slots.

        Args:
            all_confident: Every filled slot may be a positive, also one that was pushed as not
                confident.
            empty_count: Empty slots are valid references, whose keys are zero vectors.
        """
        confident = self.filled if all_confident else self.confident
        valid = torch.ones_like(self.filled) if empty_count else self.filled.clone()
        return References(self.keys.clone(), self.labels.clone(), confident.clone(), valid)
