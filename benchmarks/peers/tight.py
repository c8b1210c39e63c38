"""The tight loop: the plain loop of bare.py with the fastest public calls that PyTorch has for each of its lines.

Gradients come from ``torch.autograd.grad`` and go straight into the fused kernel of SGD, so that no gradient is stored
in a weight and no optimizer object collects its tensors again. Weights are loaded and summed up by one ``foreach`` call
for all of them, and a client's batches are views that one ``split`` makes.

With ``--duties`` the loop also does, for each client, what the other simulators do for theirs and this loop leaves out:
it draws an order of the images from the client's own random stream, gathers images and labels in this order, computes
normalised images from the stored pixels, and adds an update only if its movement is finite. It seeds no generator for
random layers, reports and logs nothing.

python benchmarks/peers/tight.py --network lr
"""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import torch
import workload
from pacer import Pacer, network_argument
from torch.nn import functional as F

torch.set_num_threads(1)
name = network_argument()
duties = "--duties" in sys.argv
network = workload.network(name)
x, y = workload.tensors()
pixels, _ = map(torch.from_numpy, workload.images())
scale = torch.full((3, 1, 1), 255.0)
parameters: list[torch.Tensor] = list(network.parameters())
rate = workload.rate(name)
server = [p.detach().clone() for p in parameters]
clients = random.Random(0)
orders = np.random.Generator(np.random.Philox(key=0))
start = orders.bit_generator.state


def load() -> None:
    """Copy the global model into the network."""
    with torch.no_grad():
        torch._foreach_copy_(parameters, server)


def shuffled(client: int, round_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of a client and their labels, in an order of the client's own."""
    start["state"]["key"][:] = client, round_index
    orders.bit_generator.state = start
    rows = torch.from_numpy(orders.permutation(workload.IMAGES)) + workload.client(client).start
    return pixels.index_select(0, rows).float().div_(scale), y.index_select(0, rows)


def is_finite() -> bool:
    """Whether the client's movement is finite."""
    with torch.no_grad():
        norms = torch._foreach_norm(torch._foreach_sub(parameters, server))
    return math.isfinite(float(torch.stack(norms).sum()))


def global_loss() -> float:
    """Loss of the global model."""
    load()
    return workload.loss(network)


pacer = Pacer(global_loss)
round_index = 0
while True:
    round_index += 1
    pacer.pause()
    total = [torch.zeros_like(p) for p in server]
    for client in clients.sample(range(workload.CLIENTS), workload.COHORT):
        load()
        own = workload.client(client)
        inputs, targets = shuffled(client, round_index) if duties else (x[own], y[own])
        for images, labels in zip(inputs.split(workload.BATCH), targets.split(workload.BATCH), strict=True):
            gradients = torch.autograd.grad(F.cross_entropy(network(images), labels), parameters)
            with torch.no_grad():
                torch._fused_sgd_(
                    parameters, list(gradients), [], weight_decay=0.0, momentum=0.0, lr=rate, dampening=0.0,
                    nesterov=False, maximize=False, is_first_step=False,
                )  # fmt: skip
        if duties and not is_finite():
            raise SystemExit("a client diverged")
        torch._foreach_add_(total, [p.detach() for p in parameters])
    server = list(torch._foreach_div(total, workload.COHORT))
