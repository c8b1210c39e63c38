"""Federated averaging as a plain PyTorch loop with the least overhead: one model, slices as batches, a running sum.

python benchmarks/peers/bare.py --network lr
"""

from __future__ import annotations

import random
import sys

import torch
import workload
from pacer import Pacer, network_argument
from torch.nn import functional as F

torch.set_num_threads(1)
name = network_argument()
network = workload.network(name)
x, y = workload.tensors()
parameters = list(network.parameters())
optimizer = torch.optim.SGD(parameters, lr=workload.rate(name))
server = [p.detach().clone() for p in parameters]
central = "--central" in sys.argv
clients = random.Random(0)


def load(weights: list[torch.Tensor]) -> None:
    """Copy weights into the network."""
    with torch.no_grad():
        for parameter, value in zip(parameters, weights, strict=True):
            parameter.copy_(value)


def global_loss() -> float:
    """Loss of the global model."""
    load(server)
    return workload.loss(network)


pacer = Pacer(global_loss)
while True:
    pacer.pause()
    total = [torch.zeros_like(p) for p in parameters]
    for client in clients.sample(range(workload.CLIENTS), workload.COHORT):
        if not central:
            load(server)
        own = workload.client(client)
        for start in range(own.start, own.stop, workload.BATCH):
            loss = F.cross_entropy(network(x[start : start + workload.BATCH]), y[start : start + workload.BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for into, parameter in zip(total, parameters, strict=True):
                if not central:
                    into.add_(parameter)
    server = [p.detach().clone() for p in parameters] if central else [t / workload.COHORT for t in total]
