"""Rows with named columns, such as those of the Hugging Face library ``datasets`` (the extra
``huggingface``).
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedssl.data.image_files import RESAMPLING, as_seen
from lightning_fedssl.data.sources.arrays import as_tensor
from lightning_fedssl.storage.optional import optional

_CONVERTED = {"P": "RGB", "1": "L"}
"""Pillow's modes whose stored values are not brightness: numbers of a palette, and bits, and the
modes to use instead."""


class Columns(Dataset[Any]):
    """Rows with named columns as pairs ``(sample, label)``: Hugging Face data sets, lists of dicts.

    A picture, the bytes of its file or its path become uint8 ``(channels, height, width)``, upright
    and on white where it is transparent; lists and arrays become tensors. In a
    configuration, the parts of :class:`~lightning_fedssl.data.sources.arrays.Datasets` are of this
    class.

    Args:
        rows: What gives a dict at an index, with a length; or what ``datasets.load_dataset`` takes,
            a name on the Hub or a folder, also one that ``save_to_disk`` wrote.
        split: The split of a name or folder.
        config: The configuration of a data set on the Hub, if it has several.
        sample: Column of the samples.
        label: Column of the labels, whose class names are used if it has some; None for rows
            without labels.
        client: Column of the clients' identifiers.
        image_size: Side in pixels to which pictures are resized and cropped; None leaves them as
            they are.

    Raises:
        ValueError: If there is no row, or a column is missing; the message names the columns that
            there are.
    """

    def __init__(
        self,
        rows: Any,
        split: str = "train",
        config: str | None = None,
        sample: str = "image",
        label: str | None = "label",
        client: str | None = None,
        image_size: int | None = None,
    ) -> None:
        if isinstance(rows, str):
            library = optional("datasets")
            if Path(rows, "dataset_dict.json").is_file():
                rows = library.load_from_disk(rows)[split]
            else:
                rows = library.load_dataset(rows, config, split=split)
        columns = list(rows[0]) if len(rows) else []
        if missing := [c for c in (sample, label, client) if c and c not in columns]:
            raise ValueError(
                f"data.dataset: there is no column {', '.join(map(repr, missing))}; there are "
                f"{', '.join(columns)}"
            )
        self.rows = rows
        self.sample = sample
        self.label = label
        self.image_size = image_size
        self.client_ids = None if client is None else [rows[i][client] for i in range(len(rows))]
        self.classes = getattr(getattr(rows, "features", {}).get(label), "names", ())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """``(sample, label)``; -1 for rows without labels."""
        row = self.rows[index]
        try:
            sample = self._tensor(row[self.sample])
        except (TypeError, ValueError, OSError) as error:
            raise ValueError(
                f"data.dataset: row {index} of the column {self.sample!r} is not a sample "
                f"({error}); give pictures, the bytes or paths of their files, or numbers of one "
                "shape"
            ) from error
        return sample, -1 if self.label is None else row[self.label]

    def _tensor(self, value: Any) -> Tensor:
        from PIL import Image, ImageOps

        if isinstance(value, Mapping):  # as the library stores pictures that it does not decode
            value = value.get("bytes") or value.get("path")
        if isinstance(value, (bytes, str, Path)):
            value = Image.open(BytesIO(value) if isinstance(value, bytes) else value)
        if not hasattr(value, "getbands"):  # no Pillow image
            return as_tensor(np.asarray(value))
        value = as_seen(value.copy())
        if value.mode in _CONVERTED:
            value = value.convert(_CONVERTED[value.mode])
        if self.image_size is not None:
            square = (self.image_size, self.image_size)
            value = ImageOps.fit(value, square, Image.Resampling[RESAMPLING])
        pixels = np.array(value)
        return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)
