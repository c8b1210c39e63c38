"""Pictures and the specification of their data set, for tests of views."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

MEAN, STD = (0.49, 0.48, 0.45), (0.20, 0.19, 0.21)
BILINEAR = Image.Resampling.BILINEAR


def spec(name: str = "cifar10", channels: int = 3, side: int = 32, width: int = 0) -> Any:
    shape = (channels, side, width or side)
    return SimpleNamespace(name=name, in_shape=shape, mean=MEAN[:channels], std=STD[:channels], pixels=True)


def pictures(channels: int = 3, height: int = 32, width: int = 32, count: int = 12, seed: int = 0) -> Tensor:
    """Noise, noise of low contrast, smooth pictures, and one of a single and one of two values."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (count, channels, height, width))
    wave = np.sin(np.linspace(0, 5, height))[:, None] * np.cos(np.linspace(0, 7, width))
    smooth = 128 + 100 * wave * rng.random((count, channels, 1, 1)) + rng.normal(0, 4, noise.shape)
    images = np.where((np.arange(count) % 3 == 0)[:, None, None, None], noise, smooth)
    images[1] = 90 + noise[1] // 8
    images[2], images[4] = 77, np.where(noise[4] < 30, 20, 200)
    return torch.from_numpy(images.clip(0, 255).astype(np.uint8))
