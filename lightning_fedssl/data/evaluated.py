"""The samples that are evaluated, and new images to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_fedssl.data import image_files
from lightning_fedssl.data.datasets import ImageSplit
from lightning_fedssl.data.sources.reading import Reading


@dataclass(frozen=True)
class Evaluated:
    """The samples of an evaluation.

    Attributes:
        split: What they are among.
        chosen: Their indices in it, ``(n,)``; None for all.
    """

    split: ImageSplit
    chosen: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Their indices in the split, ``(n,)``."""
        labels = self.split.labels
        return (
            torch.arange(len(labels), device=labels.device) if self.chosen is None else self.chosen
        )

    @property
    def labels(self) -> Tensor:
        """Their labels, ``(n,)``, or targets of another task, ``(n, ...)``."""
        return self.split.labels[self.rows]

    def batches(
        self, size: int, shard: tuple[int, int] = (0, 1), indices: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of stored samples and their labels, in the split's order.

        Args:
            size: Samples per batch.
            shard: ``(rank, ranks)``: the batches rank, rank + ranks, .. only; together the ranks
                see every sample once.
            indices: The samples to take, by their place among these samples, in this order; all if
                left out.
        """
        rank, ranks = shard
        rows = self.rows if indices is None else self.rows[indices.to(self.rows.device)]
        for batch in torch.split(rows, size)[rank::ranks]:
            if len(batch):
                yield self.split.images[batch], self.split.labels[batch]


def new_files(root: Path, pixels: bool, reading: Reading) -> list[str]:
    """Paths of the images of ``data.predict_root``, relative to it.

    Args:
        root: The folder.
        pixels: Whether the samples of the data set are 8-bit pixels.
        reading: Gets a warning of files that are left out.

    Raises:
        FileNotFoundError: If there is no such folder, or no image in it.
        ValueError: If the samples of the data set are not 8-bit pixels.
    """
    if not pixels:
        raise ValueError(
            "data.predict_root: samples are numbers that are not 8-bit pixels; leave it out, and "
            "give data.dataset the new samples as its test samples, prepared as the training "
            "samples are, with any labels, such as 0"
        )
    left_out = Counter[str]()
    paths = image_files.image_files(root, left_out=left_out)
    if left_out:
        reading.warn(f"data.predict_root: {root.name}{image_files.described(left_out)}")
    return [path.relative_to(root).as_posix() for path in paths]


def new_batches(
    root: Path, files: list[str], size: int, in_shape: tuple[int, ...]
) -> Iterator[Tensor]:
    """Batches of the images of ``data.predict_root``, read as the data set's images are: resized to
    cover the network's size, cropped to their centre.

    Args:
        root: The folder.
        files: Their paths in it.
        size: Images per batch.
        in_shape: Channels, height and width.
    """
    for start in range(0, len(files), size):
        paths = [root / name for name in files[start : start + size]]
        yield image_files.read_images(paths, in_shape, key="data.predict_root")
