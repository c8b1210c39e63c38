"""Test samples that equal a training sample: if they are the same samples, a test accuracy is too high."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedssl.data.datasets import ImageSplit

MOST_COMPARED = 200_000
"""With more samples nothing is compared."""

_KEY_BYTES = 32
"""Bytes of a sample, evenly spread over it, that are compared first, so that the time depends little on its size."""

_AT_ONCE = 4096
"""Samples whose keys are computed at the same time, to bound the memory."""


def count_equal(train: ImageSplit, test: ImageSplit) -> int:
    """The number of test samples that equal a training sample; 0 for more samples than :data:`MOST_COMPARED`.

    Memory-mapped samples are not compared, because all of them would be read.

    Args:
        train: The training samples.
        test: The test samples.
    """
    images = train.images, test.images
    if not all(isinstance(part, Tensor) for part in images) or sum(map(len, images)) > MOST_COMPARED:
        return 0
    of_train, of_test = (part.detach().cpu() for part in images)  # a source of the user's may give any tensors
    train_keys, test_keys = _keys(of_train), _keys(of_test)
    train_rows = torch.isin(train_keys, test_keys).nonzero().flatten().tolist()
    test_rows = torch.isin(test_keys, train_keys).nonzero().flatten().tolist()
    known = {_hash(of_train[row]) for row in train_rows}
    return sum(_hash(of_test[row]) in known for row in test_rows)


def _keys(samples: Tensor) -> Tensor:
    """A number for each sample, int64 ``(N,)``: a weighted sum of some of its bytes."""
    values = samples.flatten(1)
    step = max(1, values.shape[1] * values.element_size() // _KEY_BYTES)
    some = values[:, ::step].contiguous().view(torch.uint8)
    weights = torch.randint(2**40, (some.shape[1],), generator=torch.Generator().manual_seed(0))
    return torch.cat([(part.to(torch.int64) * weights).sum(1) for part in some.split(_AT_ONCE)])


def _hash(sample: Tensor) -> int:
    return hash(sample.contiguous().numpy().tobytes())
