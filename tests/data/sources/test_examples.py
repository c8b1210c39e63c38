"""The embedded examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_fedssl.data import BreastCancer, Signals


@pytest.mark.parametrize(("source", "shape", "classes"), [(BreastCancer(), (30,), 2), (Signals(300), (1, 64), 3)])
def test_embedded_examples_are_the_same_at_every_reading(source: Any, shape: tuple[int, ...], classes: int) -> None:
    first, second = source.load(), type(source)(**({"count": 300} if classes == 3 else {})).load()
    assert (first.spec.in_shape, first.spec.num_classes) == (shape, classes)
    assert torch.equal(first.train.images, second.train.images)
    assert set(first.test.labels.tolist()) == set(range(classes))
