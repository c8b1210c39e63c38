"""Measures how far a run is from a stationary point (Fed-SHVR, Eq. 21).

In a checkout: ``--trainer.callbacks+=examples.diagnostics.optimality_gap.OptimalityGap``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from examples.diagnostics.shvr_objective import client_labels, objective, require_objective
from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.functional.averaging import State, WeightedSum
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import TrainerView


class OptimalityGap(FederatedCallback):
    """Logs Fed-SHVR's optimality gap ``g_t``, the quantity that its Theorem 1 bounds.

    ``g_t = ||grad F(theta^t, v^(t+1))||^2 + sum_k w_k ||v_k^(t+1) - v_k^t||^2`` (Eq. 21) is
    ``optimality/gap``, its terms are ``optimality/gradient`` and ``optimality/labels``, and F is
    ``optimality/objective``. theta^t are the weights that the clients of round t receive, and
    v_k^(t+1) the soft labels that client k computes with them; v_k^t are those of the round before,
    computed again from its weights. All sums run over the images of the round's cohort, whole
    clients weighted by their images: over all clients if each takes part. The model is in
    evaluation mode. In the first round there are no earlier labels, and the second term is 0. It
    costs about an epoch of every client more.

    Args:
        every_n_rounds: Interval of the measurements, in rounds.
    """

    def __init__(self, every_n_rounds: int = 1) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.before: State = {}
        self._gradient, self._scalars = WeightedSum(), WeightedSum()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject a method without an objective before training starts."""
        require_objective(self, pl_module)

    def on_client_start(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Add a client's gradient, objective and change of labels at the weights it received."""
        if trainer.round_index % self.every_n_rounds or not work.num_samples:
            return
        method = cast(Any, algorithm)
        labels = client_labels(method, data, data.round)
        weights = {name: p for name, p in algorithm.named_parameters() if p.requires_grad}
        gradient = {name: torch.zeros_like(p) for name, p in weights.items()}
        total_objective = torch.zeros((), dtype=torch.float64, device=labels.device)
        with torch.enable_grad():
            for part in objective(method, data, labels):
                total_objective += part.detach()
                grads = torch.autograd.grad(part, list(weights.values()), materialize_grads=True)
                for total, grad in zip(gradient.values(), grads, strict=True):
                    total.add_(grad)
        change = labels - self._earlier_labels(algorithm, data) if self.before else labels[:0]
        self._gradient.add(gradient, work.num_samples)
        scalars = {"objective": total_objective, "labels": change.square().sum().double()}
        self._scalars.add(scalars, work.num_samples)

    def on_aggregate(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Log the means over the clients of all ranks; keep the weights of this round."""
        if trainer.round_index % self.every_n_rounds == 0:
            scalars, gradient = (
                _mean(trainer.gather((s.total, s.weight))) for s in (self._scalars, self._gradient)
            )
            self._gradient, self._scalars = WeightedSum(), WeightedSum()
            if scalars:
                squared = sum(float(g.double().square().sum()) for g in gradient.values())
                for name, value in scalars.items():
                    trainer.log(f"optimality/{name}", float(value))
                trainer.log("optimality/gradient", squared)
                trainer.log("optimality/gap", squared + float(scalars["labels"]))
        self.before = {name: t.cpu().clone() for name, t in algorithm.server.model().items()}

    def state_dict(self) -> dict[str, Any]:
        """The weights that the clients of the last round received."""
        return {"before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.before = state_dict["before"]

    def _earlier_labels(self, algorithm: FederatedAlgorithm, data: LocalData) -> Tensor:
        """The client's labels by the weights of the round before."""
        live = {**dict(algorithm.named_parameters()), **dict(algorithm.named_buffers())}
        now = {name: live[name].detach().clone() for name in self.before}
        load_state(algorithm, self.before)
        labels = client_labels(cast(Any, algorithm), data, data.round - 1)
        load_state(algorithm, now)
        return labels


def _mean(parts: list[tuple[State, float]]) -> State:
    """The mean from the sums and weights of several ranks; empty if nothing was added."""
    weight = sum(weight for _, weight in parts)
    totals = [{name: t.cpu() for name, t in total.items()} for total, _ in parts if total]
    return {name: sum(t[name] for t in totals) / weight for name in (totals or [{}])[0]}  # type: ignore[misc]
