"""SCAFFOLD: control variates against the drift of clients that hold different classes.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning", ICML 2020, arXiv 1910.06378 (Algorithm 1, option II).

A round, for N clients of which those of the set S are drawn:

1. the server sends x and its control variate c;
2. client i takes K steps from ``y = x``: ``y <- y - eta_l (g_i(y) - c_i + c)``;
3. it computes ``c_i' = c_i - c + (x - y) / (K eta_l)``, sends y and ``c_i' - c_i``, and stores
   ``c_i'``;
4. the server moves x by eta_g of the mean update, and ``c <- c + (1/N) sum_{i in S} (c_i' - c_i)``.

All variates are 0 at first. eta_g is 1, or the rate of SGD as ``aggregation_optimizer``. The paper
fixes K; here K follows from the client's number of images and E, as in FedAvg. Weights that clients
keep for themselves, and statistics of batch norm, have no variate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.fedavg import FedAvg
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State, Sums, WeightedSum, sizes_of
from lightning_fedssl.functional.dictionaries import add_prefix, map_values
from lightning_fedssl.functional.optimizers import plain_sgd, require_plain_sgd
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class SCAFFOLD(FedAvg):
    """SCAFFOLD on labelled clients. It costs a model's size per client, and twice the traffic.

    Args:
        optimizer: The optimizer of a client's steps: SGD without momentum, with rate eta_l.
        client_weighting: A client's weight in the mean of the models: ``uniform``, as in the paper,
            or its number of ``samples``.
    """

    same_step_every_round = True
    not_deployable = "sends its clients a control variate, which a node does not expect"

    optimizer: OptimizerCallable = plain_sgd
    client_weighting: Literal["samples", "uniform"] = "uniform"

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        require_plain_sgd(
            self.optimizer,
            "SCAFFOLD's c_i' is a client's mean gradient under plain SGD alone",
            weight_decay=True,
        )

    def on_round_start(self) -> None:
        """Begin with c = 0; refuse a learning rate of 0, because c_i' is divided by it."""
        self.server.extra.setdefault("c", map_values(torch.zeros_like, self.server.parameters))
        moves = self.current_round.client_lr > 0
        remedy = "c_i' divides by it; end model.schedule above 0"
        checks.require(moves, "optimizer.init_args.lr", 0, remedy)

    def variate(self, client: int) -> State:
        """c_i, by the names of the weights: 0 before the client's first round."""
        c = self.server.extra["c"]
        stored = self.clients.get(client, "c")
        return {
            name: stored[name].to(t) if stored else torch.zeros_like(t) for name, t in c.items()
        }

    def download_sizes(self, client: int, received: State) -> Sizes:
        """The broadcast, and c."""
        c = add_prefix("c.", self.server.extra["c"])
        return super().download_sizes(client, received) | sizes_of(c)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Epochs on the labelled images, with ``c - c_i`` added to every gradient."""
        drift = map_values(torch.sub, self.server.extra["c"], self.variate(data.party))
        return replace(super().on_client_start(data), control_variate=drift)

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Store ``c_i'``, and send ``c_i' - c_i = (x - y) / (K eta_l) - c``."""
        c_i = self.variate(update.client)
        change = self.change_of(update)
        self.clients.put(update.client, "c", map_values(torch.add, c_i, change))
        return replace(update, payload=add_prefix("c.", change))

    def change_of(self, update: ClientUpdate) -> State:
        """``(x - y) / (K eta_l) - c``."""
        steps = update.num_steps * self.current_round.client_lr
        x = self.server.parameters
        moved = map_values(lambda y, start: (start - y) / steps, update.parameters, x)
        return map_values(torch.sub, moved, self.server.extra["c"])

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """The change of a variate follows from y, which the server has: no other is possible."""
        change = add_prefix("c.", self.change_of(update))
        return {name: (t, t) for name, t in change.items()}

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the models, and the changes of the variates."""
        change = WeightedSum()

        def summed() -> Iterable[ClientUpdate]:
            for update in updates:
                change.add(update.payload)
                yield update

        return {**super().accumulate(summed()), "change": change}

    def aggregate(self, sums: Sums) -> None:
        """Move x by the mean update, and c by the sum of the changes over N."""
        super().aggregate(sums)
        for name, t in sums["change"].total.items():
            self.server.extra["c"][name.removeprefix("c.")] += t / self.current_round.num_clients
