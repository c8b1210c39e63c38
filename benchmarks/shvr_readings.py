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
from lightning_fedssl import Experiment
from lightning_fedssl.algorithms import FedSHVR
from lightning_fedssl.data import FederatedDataModule, LocalData
from lightning_fedssl.functional.pseudo_labels import sharpen

AXES, UNITS, RATE, BATCH = 64, 1000, 0.01, 32
PATH = papers.RESULTS / "fed_shvr_readings.csv"


class Client:
    """One client's steps in round 1 (Eq. 16 without d_k, which is 0), with gradients by hand."""

    def __init__(self, algorithm: FedSHVR, weights: list[Tensor], rates: list[float]) -> None:
        self.algorithm = algorithm
        self.weights = [weight.clone() for weight in weights]
        self.rates = rates

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden units and logits."""
        first, bias, last, last_bias = self.weights
        hidden = torch.addmm(bias, x, first).relu_()
        return hidden, torch.addmm(last_bias, hidden, last.T)

    def labels(self, logits: Tensor) -> Tensor:
        """The pseudo-labels (Eq. 8) of round 1."""
        return sharpen(logits, self.algorithm.alpha0_of_labels(1), self.algorithm.alpha1)

    def train(self, labeled: Tensor, targets: Tensor, unlabeled: Tensor, seed: int) -> int:
        """Take tau_k steps; their number."""
        draw = torch.Generator().manual_seed(seed)
        steps = max(len(labeled), len(unlabeled)) * 2 // BATCH
        weights = self.algorithm.ramp.values(1, 2, steps).tolist()
        one_hot = torch.eye(10)[targets]
        once = self.algorithm.label_refresh == "round"
        v = self.labels(self.logits(unlabeled)[1]) if once else None
        for alpha0 in weights:
            mine = torch.randperm(len(labeled), generator=draw)[:BATCH]
            other = torch.randperm(len(unlabeled), generator=draw)[:BATCH]
            x = torch.cat([labeled[mine], unlabeled[other]])
            hidden, logits = self.logits(x)
            f, g = logits[: len(mine)].softmax(dim=1), logits[len(mine) :].softmax(dim=1)
            pseudo = self.labels(logits[len(mine) :]) if v is None else v[other]
            of_unlabeled = alpha0 * (g - pseudo) + self.algorithm.alpha2 * (g - 0.1)
            of_logits = torch.cat([(f - one_hot[mine]) / len(mine), of_unlabeled / len(other)])
            of_hidden = torch.ops.aten.threshold_backward(of_logits @ self.weights[2], hidden, 0)
            products = [(x.T, of_hidden), None, (of_logits.T, hidden), None]
            sums = [None, of_hidden.sum(dim=0), None, of_logits.sum(dim=0)]
            for weight, rate, product, total in zip(self.weights, self.rates, products, sums, strict=True):
                if product is not None:
                    weight.addmm_(*product, alpha=-rate)
                else:
                    weight.sub_(total, alpha=rate)
        return steps


class Setting(NamedTuple):
    """The clients of a split and seed with their inputs, and the initial weights."""

    clients: list[LocalData]
    train: Tensor
    test: Tensor
    test_labels: Tensor
    weights: list[Tensor]
    rates: list[float]


def setting(algorithm: FedSHVR, data: FederatedDataModule) -> Setting:
    """Prepare what the readings of a split and seed share."""
    data.setup()
    algorithm.configure_model()
    clients = [data.local_data(client, 1) for client in range(data.num_clients)]
    plain = clients[0].views.plain
    train, test = (plain(images, torch.arange(0)).flatten(1) for images in (clients[0].images, data.test_images))
    axes = torch.linalg.eigh(train.T @ train)[1][:, -AXES:]
    first, last = (m for m in algorithm.network.modules() if isinstance(m, torch.nn.Linear))
    times = first.out_features / UNITS
    in_first = (first.weight[:UNITS] @ axes).T.contiguous()
    weights = [in_first, first.bias[:UNITS], last.weight[:, :UNITS] * times**0.5, last.bias]
    rates = [RATE, RATE, RATE * times, RATE]
    return Setting(clients, train @ axes, test @ axes, data.test_labels, weights, rates)


def accuracy(algorithm: FedSHVR, given: Setting, seed: int) -> float:
    """The test accuracy after one round, in per cent."""
    sizes = [len(client.labeled) + len(client.unlabeled) for client in given.clients]
    moved: list[Any] = [0] * len(given.weights)
    mean_steps = 0.0
    for number, client in enumerate(given.clients):
        own = Client(algorithm, given.weights, given.rates)
        labeled, unlabeled = given.train[client.labeled], given.train[client.unlabeled]
        steps = own.train(labeled, client.labels, unlabeled, 1000 * seed + number)
        share = sizes[number] / sum(sizes)
        mean_steps += share * steps
        pairs = zip(moved, given.weights, own.weights, strict=True)
        moved = [m + share / steps * (before - after) for m, before, after in pairs]
    after = [before - mean_steps * m for before, m in zip(given.weights, moved, strict=True)]  # Eq. 14
    predicted = Client(algorithm, after, given.rates).logits(given.test)[1].argmax(dim=1)
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
        for variant, split, rows in [("default", "noniid", papers.SHVR_ROWS), *papers.READINGS]:
            for cell in papers.fed_shvr({"variant": variant, "split": split}):
                columns = ("cell", "split", "reading")
                key = {**{column: cell.key[column] for column in columns}, "seed": str(seed)}
                if cell.key["cell"] not in rows or papers.is_known(PATH, key):
                    continue
                began = time.process_time()
                common = {"seed_everything": seed, "data.root": options.root}
                _, algorithm, data = Experiment.from_config(*cell.configurations, common)
                assert isinstance(algorithm, FedSHVR)
                if (split, seed) not in settings:
                    settings[split, seed] = setting(algorithm, data)
                found = accuracy(algorithm, settings[split, seed], seed)
                cpu = time.process_time() - began
                papers.append(PATH, key | {"accuracy": f"{found:.2f}", "cpu_s": f"{cpu:.1f}"})


if __name__ == "__main__":
    main()
