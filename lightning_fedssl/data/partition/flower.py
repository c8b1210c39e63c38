"""Partitions that the partitioners of Flower's library flwr-datasets draw (the extra
``partitioners``).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.storage.optional import optional


class FlowerPartitions(Partition):
    """Clients hold what a partitioner of flwr-datasets gives them.

    The partitioner sees a data set of one column, ``label``, and draws from its own seed, so every
    seed of a run has the same partition for the same pool of images.

    Args:
        partitioner: A ``flwr_datasets.partitioner.Partitioner`` of ``data.num_clients`` partitions
            with ``partition_by="label"``, if it has that argument.

    Example::

        from flwr_datasets.partitioner import DirichletPartitioner

        partition = FlowerPartitions(DirichletPartitioner(20, "label", alpha=0.3))
        data = FederatedDataModule("digits", partition=partition, num_clients=20)
    """

    def __init__(self, partitioner: Any) -> None:
        self.partitioner = partitioner

    def assign(
        self, labels: Tensor, num_clients: int, num_classes: int, generator: Generator
    ) -> list[Tensor]:
        """Lets the partitioner divide the pool; see :meth:`Partition.assign`.

        Raises:
            ValueError: If the partitioner refuses the labels or asks for another column.
        """
        drawn = copy.deepcopy(self.partitioner)  # it takes a data set only once
        drawn.dataset = optional("datasets").Dataset.from_dict(
            {"label": labels.tolist(), "position": range(len(labels))}
        )
        try:
            parts = [drawn.load_partition(client) for client in range(drawn.num_partitions)]
        except ValueError as error:
            raise ValueError(
                f"data.partition: FlowerPartitions: {error} (the labels are in the column label)"
            ) from error
        return [torch.tensor(list(part["position"])) for part in parts]
