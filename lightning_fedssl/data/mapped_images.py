"""Images in a memory-mapped file, read when they are needed."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

HASH = ".sha256"
"""The suffix of the file that holds the hash of the images next to it."""

_HASHED_AT_ONCE = 512
_HEXADECIMAL_DIGITS = 64
"""The length of a hash that was written completely."""


class MappedImages:
    """uint8 images ``(N, channels, height, width)`` in a memory-mapped file; what is indexed is moved to a device.

    It replaces a tensor that would not fit into memory, where samples are only indexed: the operating
    system reads the pages that are used, and may drop them at any time.

    Args:
        values: The mapped tensor, on the CPU.
        device: The device of indexed images.
        file: The ``.npy`` file that is mapped.
    """

    def __init__(self, values: Tensor, device: torch.device | str = "cpu", file: Path | None = None) -> None:
        self.values = values
        self.device = torch.device(device)
        self.file = file

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
        return MappedImages(self.values, device, self.file)

    def content_hash(self) -> str:
        """SHA-256 over the images, not over their file's name: copies in other folders have the same.

        It is computed once and kept in a file ``.sha256`` next to the images, if their folder can be written.
        """
        kept = self.file and self.file.with_suffix(HASH)
        with suppress(OSError):
            if kept and len(known := kept.read_text()) == _HEXADECIMAL_DIGITS:
                return known
        digest = hashlib.sha256()
        for part in self.values.split(_HASHED_AT_ONCE):
            digest.update(part.contiguous().numpy())
        with suppress(OSError):
            if kept:
                kept.write_text(digest.hexdigest())
        return digest.hexdigest()
