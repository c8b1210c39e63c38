"""The data of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData


class PartitionOfDataSet:
    """Clients of the partition that the configuration describes, of a data set that every node can load.

    It is for trials and for data sets that are public anyway: each node reads the whole data set and uses its part. The
    images of others, and the labels of all images but its own labelled ones, are dropped at once.

    Args:
        datamodule: The data and their partition, set up.
        clients: The clients of the node.

    Raises:
        ValueError: If there is no such client.
    """

    def __init__(self, datamodule: FederatedDataModule, clients: Sequence[int]) -> None:
        if wrong := [client for client in clients if not 0 <= client < datamodule.num_clients]:
            raise ValueError(f"there is no client {wrong[0]}: data.num_clients is {datamodule.num_clients}")
        self.clients = list(clients)
        self._parts = {client: _own_part(datamodule.local_data(client, 0)) for client in self.clients}
        self._views = {dtype: datamodule.local_data(0, 0, dtype).views for dtype in (torch.float32, torch.float64)}

    def local_data(self, client: int, round_index: int, dtype: torch.dtype) -> LocalData:
        """What one of the clients may train on in a round."""
        return replace(self._parts[client], round=round_index, dtype=dtype, views=self._views[dtype])


def _own_part(data: LocalData) -> LocalData:
    """The same data with the party's own images alone, numbered anew in the same order."""
    labeled, unlabeled = len(data.labeled), len(data.unlabeled)
    numbers: Tensor = torch.arange(labeled + unlabeled, device=data.images.device)
    images = data.images.index_select(0, torch.cat([data.labeled, data.unlabeled]))
    return replace(data, images=images, labeled=numbers[:labeled], unlabeled=numbers[labeled:])
