"""Images in a memory-mapped file, read when they are needed."""

from __future__ import annotations

import torch
from torch import Tensor


class MappedImages:
    """uint8 images ``(N, channels, height, width)`` in a memory-mapped file; what is indexed is moved to a device.

    It replaces a tensor that would not fit into memory, where samples are only indexed: the operating
    system reads the pages that are used, and may drop them at any time.

    Args:
        values: The mapped tensor, on the CPU.
        device: The device of indexed images.
    """

    def __init__(self, values: Tensor, device: torch.device | str = "cpu") -> None:
        self.values = values
        self.device = torch.device(device)

    @property
    def shape(self) -> torch.Size:
        """``(N, channels, height, width)``."""
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """uint8."""
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        """Images by number, range or index tensor, on the device."""
        if isinstance(index, Tensor):
            index = index.to(self.values.device)
        return self.values[index].to(self.device, non_blocking=True)

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """The images of ``indices`` ``(n,)``, on the device, as ``Tensor.index_select`` gives them."""
        rows = self.values.index_select(dim, indices.to(self.values.device))
        return rows.to(self.device, non_blocking=True)

    def to(self, device: torch.device | str) -> MappedImages:
        """The same images for another device; nothing is copied."""
        return MappedImages(self.values, device)
