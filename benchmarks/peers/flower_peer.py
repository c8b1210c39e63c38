"""Flower: a ClientApp and a ServerApp in its Ray simulation, as in its PyTorch quick start; one client at a time.

python benchmarks/peers/flower_peer.py --network lr
"""

from __future__ import annotations

import logging

import torch
import workload
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from pacer import Pacer, network_argument

logging.getLogger("flwr").setLevel(logging.ERROR)
name = network_argument()
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of a client."""
    torch.set_num_threads(1)
    (x, y), module = workload.tensors(), workload.resident_network(name)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=workload.rate(name))
    own = workload.client(int(context.node_config["partition-id"]))
    for start in range(own.start, own.stop, workload.BATCH):
        rows = slice(start, start + workload.BATCH)
        loss = torch.nn.functional.cross_entropy(module(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": workload.IMAGES})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The rounds, with a pause after each."""
    module = workload.network(name)
    pacer = Pacer(lambda: workload.loss(module))

    def pause(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        module.load_state_dict(arrays.to_torch_state_dict())
        pacer.pause()
        return MetricRecord({})

    strategy = FedAvg(fraction_train=workload.COHORT / workload.CLIENTS, fraction_evaluate=0.0)
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord(module.state_dict()), num_rounds=10**6, timeout=3600, evaluate_fn=pause
    )


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=workload.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": 1, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
