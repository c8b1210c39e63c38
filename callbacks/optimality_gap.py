"""Measures the distance from a stationary point of an objective in weights and pseudo-labels (Fed-SHVR, Eq. 21)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.averaging import State, WeightedSum
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.trainer import FederatedTrainer


class HasObjective(Protocol):
    """A method that minimises an explicit objective in weights and soft pseudo-labels."""

    def client_labels(self, data: LocalData, round_index: int) -> Tensor:
        """A client's soft labels in a round, ``(unlabelled, classes)``, computed by the working module."""

    def objective(self, data: LocalData, labels: Tensor) -> Iterator[Tensor]:
        """Terms that sum to the client's objective F_k at the working module's weights and these labels."""


def require_objective(algorithm: FederatedAlgorithm, callback: object) -> HasObjective:
    """Return the algorithm if it has an objective.

    Args:
        algorithm: The method of the run.
        callback: The callback that needs the objective, for the message.

    Raises:
        ValueError: The algorithm has no objective.
    """
    if not hasattr(algorithm, "objective"):
        raise ValueError(
            f"{type(callback).__name__} needs a method with an explicit objective, such as FedSHVR, not "
            f"{type(algorithm).__name__}: leave it out of trainer.callbacks"
        )
    return cast(HasObjective, algorithm)


class OptimalityGap(FederatedCallback):
    """Logs Fed-SHVR's optimality gap g_t and objective F at a round's initial model, on all images of the clients.

    ``g_t = ||grad F(theta^t, v^(t+1))||^2 + sum_k w_k ||v_k^(t+1) - v_k^t||^2`` (Eq. 21) is ``optimality/gap``, its two
    terms are ``optimality/gradient`` and ``optimality/labels``, and F is ``optimality/objective``. In the first round
    there are no earlier labels, so the second term is 0. The model is in evaluation mode. A measured round costs about
    one local epoch more.

    Args:
        every_n_rounds: Interval of the measurements, in rounds.
    """

    def __init__(self, every_n_rounds: int = 1) -> None:
        if every_n_rounds < 1:
            raise ValueError(f"OptimalityGap.every_n_rounds is {every_n_rounds}: give 1 or more")
        self.every_n_rounds = every_n_rounds
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.before: State = {}
        self._sums = {"gradient": WeightedSum(), "scalars": WeightedSum()}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject a method without an objective."""
        require_objective(pl_module, self)

    def on_client_start(
        self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, data: LocalData, work: LocalWork
    ) -> None:
        """Add a client's gradient, objective and change of labels at the model that it received."""
        if trainer.round_index % self.every_n_rounds or not work.num_samples:
            return
        method = require_objective(algorithm, self)
        algorithm.eval()
        labels = method.client_labels(data, data.round)
        parameters = {name: p for name, p in algorithm.named_parameters() if p.requires_grad}
        gradient = {name: torch.zeros_like(p) for name, p in parameters.items()}
        objective = torch.zeros((), dtype=torch.float64, device=labels.device)
        for part in method.objective(data, labels):
            grads = torch.autograd.grad(part, list(parameters.values()), allow_unused=True)
            for total, grad in zip(gradient.values(), grads, strict=True):
                if grad is not None:
                    total.add_(grad)
            objective += part.detach()
        change = (labels - self._labels_before(algorithm, method, data, labels)).square().sum().double()
        self._sums["gradient"].add(gradient, work.num_samples)
        self._sums["scalars"].add({"objective": objective, "labels": change}, work.num_samples)

    def on_aggregate(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Combine the sums of all ranks and log them; store the model to compute its labels again in the next round."""
        if trainer.round_index % self.every_n_rounds == 0:
            parts = trainer.gather({name: (s.total, s.weight) for name, s in self._sums.items()})
            gradient, scalars = (_mean([part[name] for part in parts]) for name in ("gradient", "scalars"))
            self._sums = {"gradient": WeightedSum(), "scalars": WeightedSum()}
            if scalars:
                squared = sum(float(g.double().square().sum()) for g in gradient.values())
                values = {"gradient": squared} | {name: float(t) for name, t in scalars.items()}
                values["gap"] = squared + values["labels"]
                for name, value in values.items():
                    trainer.log(f"optimality/{name}", value)
        self.before = {name: t.cpu().clone() for name, t in algorithm.server.model().items()}

    def state_dict(self) -> dict[str, Any]:
        """The initial model of the last round."""
        return {"before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.before = state_dict["before"]

    def _labels_before(
        self, algorithm: FederatedAlgorithm, method: HasObjective, data: LocalData, labels: Tensor
    ) -> Tensor:
        """The client's labels of the previous round; in the first round, those of this round."""
        if not self.before:
            return labels
        live = {**dict(algorithm.named_parameters()), **dict(algorithm.named_buffers())}
        now = {name: live[name].detach().clone() for name in self.before}
        load_state(algorithm, self.before)
        earlier = method.client_labels(data, data.round - 1)
        load_state(algorithm, now)
        return earlier


def _mean(parts: list[tuple[State, float]]) -> State:
    """The mean from the sums and weights of several ranks; empty if nothing was added."""
    weight = sum(weight for _, weight in parts)
    totals = [total for total, _ in parts if total]
    if not totals:
        return {}
    return {name: torch.stack([total[name].cpu() for total in totals]).sum(dim=0) / weight for name in totals[0]}
