"""Fed-SHVR's Table I after one round, by reading of the paper's text, with a smaller network in plain PyTorch.

A thousand units stand for the paper's 5,000: the last layer's weights begin sqrt(5) times as large and learn at five
times the rate, which keeps both parts of the tangent kernel; inputs are on their 64 principal axes. Partition and
initial weights are those of ``papers.py``. It takes seconds where the full size takes 80, and is good to some points:
compare its rows *default*, *noniid* with those of fed_shvr_table1.csv. A row is appended when its run has ended.

    python benchmarks/shvr_readings.py --root data --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

import papers
from lightning_fedssl import Experiment, FederatedDataModule, FedSHVR, LocalData
from lightning_fedssl.functional.pseudo_labels import sharpen

AXES, UNITS, RATE, BATCH = 64, 1000, 0.01, 32
PATH = papers.RESULTS / "fed_shvr_readings.csv"


class Setting(NamedTuple):
    """What the readings of a split and seed share: clients, inputs, initial weights and how many units a unit is."""

    clients: list[LocalData]
    train: Tensor
    test: Tensor
    test_labels: Tensor
    weights: list[Tensor]
    times: float


def setting(algorithm: FedSHVR, data: FederatedDataModule) -> Setting:
    """Prepare the clients' inputs and the initial weights."""
    data.setup()
    algorithm.configure_model()
    clients = [data.local_data(client, 1) for client in range(data.num_clients)]
    plain = clients[0].views.plain
    train, test = (
        plain(images, torch.arange(0)).flatten(1) for images in (clients[0].images, data.test_as_read.images)
    )
    axes = torch.linalg.eigh(train.T @ train)[1][:, -AXES:]
    first, last = (m for m in algorithm.network.modules() if isinstance(m, torch.nn.Linear))
    times = first.out_features / UNITS
    in_first = (first.weight[:UNITS] @ axes).T.contiguous()
    weights = [in_first, first.bias[:UNITS], last.weight[:, :UNITS] * times**0.5, last.bias]
    return Setting(clients, train @ axes, test @ axes, data.test_labels, weights, times)


def forward(weights: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden units and logits."""
    hidden = torch.addmm(weights[1], x, weights[0]).relu_()
    return hidden, torch.addmm(weights[3], hidden, weights[2].T)


def trained(algorithm: FedSHVR, given: Setting, client: LocalData, seed: int) -> tuple[list[Tensor], int]:
    """A client's weights after its steps of round 1 (Eq. 16, where d_k is 0), gradients by hand; and their number."""
    draw = torch.Generator().manual_seed(seed)
    labeled, unlabeled, one_hot = given.train[client.labeled], given.train[client.unlabeled], torch.eye(10)
    steps = max(len(labeled), len(unlabeled)) * 2 // BATCH
    exponent = algorithm.alpha0_of_labels(1)
    v = None
    if algorithm.label_refresh == "round":
        v = sharpen(forward(given.weights, unlabeled)[1], exponent, algorithm.alpha1)
    first, bias, last, last_bias = weights = [weight.clone() for weight in given.weights]
    for alpha0 in algorithm.ramp.values(1, 2, steps).tolist():
        mine = torch.randperm(len(labeled), generator=draw)[:BATCH]
        others = torch.randperm(len(unlabeled), generator=draw)[:BATCH]
        x = torch.cat([labeled[mine], unlabeled[others]])
        hidden, logits = forward(weights, x)
        f, g = logits[: len(mine)].softmax(dim=1), logits[len(mine) :].softmax(dim=1)
        pseudo = sharpen(logits[len(mine) :], exponent, algorithm.alpha1) if v is None else v[others]
        of_unlabeled = alpha0 * (g - pseudo) + algorithm.alpha2 * (g - 0.1)
        of_logits = torch.cat([(f - one_hot[client.labels[mine]]) / len(mine), of_unlabeled / len(others)])
        of_hidden = torch.ops.aten.threshold_backward(of_logits @ last, hidden, 0)
        last.addmm_(of_logits.T, hidden, alpha=-RATE * given.times)
        last_bias.sub_(of_logits.sum(dim=0), alpha=RATE)
        first.addmm_(x.T, of_hidden, alpha=-RATE)
        bias.sub_(of_hidden.sum(dim=0), alpha=RATE)
    return weights, steps


def accuracy(algorithm: FedSHVR, given: Setting, seed: int) -> float:
    """The test accuracy after one round, in per cent."""
    total = sum(len(client.labeled) + len(client.unlabeled) for client in given.clients)
    moved: list[Any] = [0] * len(given.weights)
    mean_steps = 0.0
    for number, client in enumerate(given.clients):
        weights, steps = trained(algorithm, given, client, 1000 * seed + number)
        share = (len(client.labeled) + len(client.unlabeled)) / total
        mean_steps += share * steps
        pairs = zip(moved, given.weights, weights, strict=True)
        moved = [m + share / steps * (before - after) for m, before, after in pairs]
    after = [before - mean_steps * m for before, m in zip(given.weights, moved, strict=True)]  # Eq. 14
    predicted = forward(after, given.test)[1].argmax(dim=1)
    return 100 * float((predicted == given.test_labels).float().mean())


@torch.no_grad()
def main() -> None:
    """Append the rows that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="the data folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    settings: dict[tuple[str, int], Setting] = {}
    for seed in options.seeds:
        for cell in papers.readings({}):
            key = {column: cell.key[column] for column in ("cell", "split", "reading")} | {"seed": str(seed)}
            if papers.is_known(PATH, key):
                continue
            began = time.process_time()
            common = {"seed_everything": seed, "data.root": options.root}
            _, algorithm, data = Experiment.from_config(*cell.configurations, common)
            assert isinstance(algorithm, FedSHVR)
            place = cell.key["split"], seed
            if place not in settings:
                settings[place] = setting(algorithm, data)
            found = accuracy(algorithm, settings[place], seed)
            cpu = time.process_time() - began
            papers.append(PATH, key | {"accuracy": f"{found:.2f}", "cpu_s": f"{cpu:.1f}"})


if __name__ == "__main__":
    main()
