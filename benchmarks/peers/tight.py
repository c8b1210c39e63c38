"""The tight loop: the plain loop of bare.py with the fastest calls that PyTorch has for each of its lines.

Gradients come from ``torch.autograd.grad`` and go straight into the fused kernel of SGD, so that no gradient is stored
in a weight and no optimizer object collects its tensors again. Weights are loaded and summed up by one ``foreach`` call
for all of them, and a client's batches are views that one ``split`` makes.

python benchmarks/peers/tight.py --network lr
"""

from __future__ import annotations

import random

import torch
import workload
from pacer import Pacer, network_argument
from torch.nn import functional as F

torch.set_num_threads(1)
name = network_argument()
network = workload.network(name)
x, y = workload.tensors()
parameters: list[torch.Tensor] = list(network.parameters())
rate = workload.rate(name)
server = [p.detach().clone() for p in parameters]
clients = random.Random(0)


def load() -> None:
    """Copy the global model into the network."""
    with torch.no_grad():
        torch._foreach_copy_(parameters, server)


def global_loss() -> float:
    """Loss of the global model."""
    load()
    return workload.loss(network)


pacer = Pacer(global_loss)
while True:
    pacer.pause()
    total = [torch.zeros_like(p) for p in server]
    for client in clients.sample(range(workload.CLIENTS), workload.COHORT):
        load()
        own = workload.client(client)
        for images, labels in zip(x[own].split(workload.BATCH), y[own].split(workload.BATCH), strict=True):
            gradients = torch.autograd.grad(F.cross_entropy(network(images), labels), parameters)
            with torch.no_grad():
                torch._fused_sgd_(
                    parameters, list(gradients), [], weight_decay=0.0, momentum=0.0, lr=rate, dampening=0.0,
                    nesterov=False, maximize=False, is_first_step=False,
                )  # fmt: skip
        torch._foreach_add_(total, [p.detach() for p in parameters])
    server = list(torch._foreach_div(total, workload.COHORT))
