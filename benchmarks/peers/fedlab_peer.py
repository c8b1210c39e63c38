"""FedLab: its serial trainer and synchronous server in the standalone pipeline, as in its quick start.

python benchmarks/peers/fedlab_peer.py --network lr
"""

from __future__ import annotations

import logging
import random
from typing import Any

import torch
import workload
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from pacer import Pacer, network_argument
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
logging.disable(logging.INFO)
random.seed(0)
name = network_argument()


class Clients:
    """The clients' loaders."""

    def __init__(self) -> None:
        self.x, self.y = workload.tensors()

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader[Any]:
        """Batches of a client's images."""
        own = workload.client(client)
        return DataLoader(TensorDataset(self.x[own], self.y[own]), batch_size=batch_size)


class Pipeline(StandalonePipeline):
    """Pauses where the quick start evaluates."""

    def evaluate(self) -> None:
        """Wait."""
        pacer.pause()


trainer = SGDSerialClientTrainer(workload.network(name), workload.CLIENTS)
trainer.setup_dataset(Clients())
trainer.setup_optim(1, workload.BATCH, workload.rate(name))
handler = SyncServerHandler(workload.network(name), 10**9, workload.COHORT / workload.CLIENTS)
pacer = Pacer(lambda: workload.loss(handler.model))
pacer.pause()
Pipeline(handler, trainer).main()
