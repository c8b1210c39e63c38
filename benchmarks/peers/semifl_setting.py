"""The small SemiFL setting of the benchmark: sizes and images. It needs NumPy only, and not this package."""

from __future__ import annotations

import numpy as np

CLIENTS = 20
COHORT = 10
IMAGES = 50
LABELS = 100
TEST_IMAGES = 250
EPOCHS = 3
BATCH = 10
SERVER_MOMENTUM = 0.5
STEPS = EPOCHS * (COHORT * IMAGES + LABELS) // BATCH
"""Training steps of a round, of all its clients and the server, if all images train."""


def images() -> tuple[np.ndarray, np.ndarray]:
    """Random images of ten classes, each with its own bright square, and their classes.

    Returns:
        Training images first, then :data:`TEST_IMAGES` test images: uint8 ``(n, 3, 32, 32)`` and int64 ``(n,)``.
    """
    labels = np.arange(CLIENTS * IMAGES + LABELS + TEST_IMAGES) % 10
    pixels = np.random.default_rng(0).integers(0, 200, (len(labels), 3, 32, 32))
    for k in range(10):
        pixels[labels == k, :, 8 * (k // 4) : 8 * (k // 4) + 8, 8 * (k % 4) : 8 * (k % 4) + 8] += 55
    return pixels.astype(np.uint8), labels
