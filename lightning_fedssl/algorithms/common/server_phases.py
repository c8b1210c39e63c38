"""Methods whose server trains after the clients, before them, or in parallel with them, and may
take a step of any optimizer towards the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, Sums
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.functional.optimizer_states import load_optimizer_state, optimizer_state
from lightning_fedssl.functional.optimizers import build_optimizer
from lightning_fedssl.local_work import LocalWork, labeled_work
from lightning_fedssl.storage.hyperparameters import hyperparameters, require, require_factory

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.round import Federation

AGGREGATION_STATE = "optimizer.aggregation"
"""Where ``server.extra`` has the state of the aggregation's optimizer."""

_KEY = "model.aggregation_optimizer"


@hyperparameters
class ServerPhases(FederatedAlgorithm):
    """Federated averaging with a choice of the server's phase, and of the optimizer of its step
    towards the mean.

    Args:
        server_phase: When the server trains: ``after`` the aggregation, ``before`` the clients (and
            once more after the last round), or in ``parallel``: from the same model as the clients,
            then averaged with their mean. If a run with ``before`` is continued with more rounds,
            the phase after its former last round is not undone; it used the batches of the next
            round's first phase.
        server_weight: With ``parallel``, the server's share in the average.
        aggregation_optimizer: The optimizer of the server's step, with the mean update ``w - mean``
            as gradient and a constant learning rate; null takes the mean. SGD with learning rate 1
            and momentum beta_g is FedAvgM;
            :class:`~lightning_fedssl.functional.optimizers.FedOpt` is FedAdam, FedYogi and
            FedAdagrad. With ``parallel`` the step
            starts from the weights that the server has trained, as in the code of SemiFL's authors
            (``update_parallel``).
        server_view: The view of the labelled images that the server trains on.
        server_steps: Steps of the server in its phase; if left out, ``server_epochs``.
    """

    server_phase: Literal["after", "before", "parallel"] = "after"
    server_weight: float = 0.5
    aggregation_optimizer: OptimizerCallable | None = None
    server_view: Literal["weak", "strong"] = "weak"
    server_steps: int | None = None

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 1, "server_steps")
        checks.probability(self, "server_weight")
        require_factory("aggregation_optimizer", self.aggregation_optimizer)
        if self.aggregation_optimizer is not None:
            build_optimizer(self.aggregation_optimizer, [nn.Parameter(torch.zeros(1, 1))], _KEY)

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse a parallel phase of a server that does not train: the mean would be averaged with
        the last weights.
        """
        super().check_data(data)
        trains = data.label_location == "server" and (self.server_epochs or self.server_steps)
        fits = self.server_phase != "parallel" or bool(trains)
        remedy = "the server has no labels or epochs; leave the key out"
        require(fits, "server_phase", self.server_phase, remedy)

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Epochs, or steps, over the server's labelled images; no work where the clients have the
        labels.
        """
        return labeled_work(data, self.server_epochs, self.server_steps, view=self.server_view)

    def aggregate(self, sums: Sums) -> None:
        """Compute the new global model; without an update, weights and optimizer do not change."""
        mean = sums["model"].mean()
        if mean is None:
            return
        if self.server_phase == "parallel":
            share = self.server_weight
            mean = map_values(
                lambda t, at_server: torch.lerp(t, at_server, share), mean, self.server.model()
            )
        weights = {name: mean[name] for name in self.server.parameters if name in mean}
        if self.aggregation_optimizer is not None:
            weights = self._step_towards(weights, self.aggregation_optimizer)
        self.server.update(mean | weights)

    def _step_towards(self, mean: State, factory: OptimizerCallable) -> State:
        """The global weights after a step of the optimizer, with the mean update as gradient."""
        weights = {name: nn.Parameter(self.server.parameters[name].clone()) for name in mean}
        optimizer = build_optimizer(factory, [*weights.values()], _KEY)
        load_optimizer_state(optimizer, self.server.extra.get(AGGREGATION_STATE, {}))
        for name, weight in weights.items():
            weight.grad = weight.detach() - mean[name]
        optimizer.step()
        self.server.extra[AGGREGATION_STATE] = optimizer_state(optimizer)
        return map_values(Tensor.detach, weights)

    def round(self, federation: Federation) -> None:
        """One round: the clients train from the global model, the server averages, and trains in
        its phase.
        """
        last = self.current_round.index == self.current_round.max_rounds
        if self.server_phase == "before":
            federation.train_server()
        sums = self.accumulate(federation.train_clients())
        if self.server_phase == "parallel":
            federation.train_server()
        self.aggregate(sums)
        if self.server_phase == "after" or (self.server_phase == "before" and last):
            federation.train_server()
