"""The batch-norm moments of all images of a party."""

from __future__ import annotations

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.functional.batch_norm import LayerMoments, local_moments, measuring_batches


def measure_moments(
    algorithm: FederatedAlgorithm, data: LocalData, batch_size: int
) -> LayerMoments:
    """The batch-norm moments of all images of a party by layer.

    A party with fewer than two images has none.

    Args:
        algorithm: The working module.
        data: The party's data.
        batch_size: Images per batch of the measurement.
    """
    indices = torch.cat([data.labeled, data.unlabeled])
    batches = measuring_batches(indices, batch_size)
    with own_random_stream(data, "batch-norm moments"):
        return local_moments(algorithm, map(data.plain, batches)) if len(indices) > 1 else {}
