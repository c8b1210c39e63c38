from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_fedssl.models import EMNISTCNN, VGG11


@pytest.mark.parametrize(
    ("network", "shape", "parameters"),
    [
        (partial(EMNISTCNN, norm="none"), (1, 28, 28), 1_204_655),
        (partial(EMNISTCNN, norm="group"), (1, 28, 28), 1_204_847),
        (VGG11, (3, 32, 32), 9_231_114),
        (partial(VGG11, norm="batch"), (3, 32, 32), 9_231_114),
    ],
)
def test_networks_have_the_published_size(network: Any, shape: Any, parameters: int) -> None:
    built = network(in_shape=shape)
    assert sum(p.numel() for p in built.parameters()) == parameters
    classes = 47 if shape[0] == 1 else 10
    assert built.eval()(torch.zeros(2, *shape)).shape == (2, classes)


def test_vgg_averages_the_maps_of_larger_images() -> None:
    assert VGG11(in_shape=(3, 96, 96), width=4)(torch.zeros(2, 3, 96, 96)).shape == (2, 10)
