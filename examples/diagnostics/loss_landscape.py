"""Draws the objective around the trained weights, on a plane of two random directions (Fed-SHVR,
Eq. 23).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.diagnostics.figures import show_figure
from examples.diagnostics.shvr_objective import client_labels, objective, require_objective
from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import TrainerView


_DECADE = 10.0
"""The quotient of the largest and the smallest value from which the colours are logarithmic."""


class LossLandscape(FederatedCallback):
    """Draws ``F(theta + b1 delta1 + b2 delta2, v)`` when training ends: ``loss_landscape.png`` and
    a TensorBoard image.

    theta are the final weights, v the labels of the last round (Fed-SHVR, Eq. 23 and Fig. 5). F is
    the objective of the clients whose updates the server accepted in that round; without any,
    nothing is drawn. The directions are drawn from a normal distribution and filter-normalised: the
    part of each output unit is scaled to the norm of that unit's weights (H. Li et al.,
    "Visualizing the Loss Landscape of Neural Nets", NeurIPS 2018, arXiv 1712.09913). The values are
    also written to ``loss_landscape.csv``. The colours are logarithmic if the largest value is at
    least ten times the smallest.

    Args:
        points: Number of grid points per axis; with an odd number, theta is a grid point.
        reach: b1 and b2 range from -reach to reach.
        max_images: Maximum number of labelled images, and of unlabelled images, of each client,
            evenly spaced.
    """

    def __init__(self, points: int = 21, reach: float = 1.0, max_images: int = 500) -> None:
        at_least(2, points=points)
        self.points = points
        self.reach = reach
        self.max_images = max_images
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._clients: dict[int, tuple[LocalData, Tensor]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject a method without an objective before training starts."""
        require_objective(self, pl_module)

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Delete the labels of the previous round."""
        self._clients = {}

    def on_client_start(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Store a part of the images of a client that trains, with their pseudo-labels."""
        if not work.num_steps:
            return
        labeled, unlabeled = (
            _spread(len(part), self.max_images) for part in (data.labeled, data.unlabeled)
        )
        some = replace(
            data,
            labeled=data.labeled[labeled],
            labels=data.labels[labeled],
            unlabeled=data.unlabeled[unlabeled],
        )
        labels = client_labels(cast(Any, algorithm), some, data.round)
        self._clients[data.party] = (some, labels)

    def on_client_judged(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, client: int, accepted: bool
    ) -> None:
        """Forget a client whose update is rejected:
        the trained weights do not contain it.
        """
        if not accepted:
            self._clients.pop(client, None)

    def on_train_end(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Compute the surface on all ranks and draw it on rank 0."""
        if not any(trainer.gather(bool(self._clients))):
            return
        surface = self.surface(trainer, algorithm)
        if trainer.is_global_zero and trainer.log_dir:
            self._write(trainer, surface)

    @torch.no_grad()
    def surface(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> NDArray[np.float64]:
        """F at the grid points: ``(points, points)``, rows b2, columns b1."""
        algorithm.eval()
        center = algorithm.server.model()
        first, second = (random_direction(center, algorithm, trainer.seed, i) for i in (1, 2))
        steps = np.linspace(-self.reach, self.reach, self.points)
        values = np.zeros((self.points, self.points))
        for row, b2 in enumerate(steps):
            for column, b1 in enumerate(steps):
                load_state(
                    algorithm, {n: center[n] + b1 * first[n] + b2 * second[n] for n in first}
                )
                values[row, column] = self._objective(algorithm)
        load_state(algorithm, center)
        weight = sum(len(d.labeled) + len(d.unlabeled) for d, _ in self._clients.values())
        parts = trainer.gather((values, weight))
        total: NDArray[np.float64] = sum(v for v, _ in parts) / sum(w for _, w in parts)
        return total

    def _objective(self, algorithm: FederatedAlgorithm) -> float:
        """The sum of the objectives of this rank's clients, weighted by their numbers of images."""
        method, total = cast(Any, algorithm), 0.0
        for data, labels in self._clients.values():
            mean = sum(float(part) for part in objective(method, data, labels))
            total += (len(data.labeled) + len(data.unlabeled)) * mean
        return total

    def _write(self, trainer: TrainerView, surface: NDArray[np.float64]) -> None:
        folder = Path(str(trainer.log_dir))
        np.savetxt(folder / "loss_landscape.csv", surface, delimiter=",")
        figure = draw(surface, self.reach)
        figure.savefig(folder / "loss_landscape.png")
        show_figure(trainer, "loss_landscape", figure)


def random_direction(center: State, algorithm: FederatedAlgorithm, seed: int, number: int) -> State:
    """A filter-normalised random direction for every trained weight.

    Biases and norm weights are scaled as a whole.

    Args:
        center: The weights by name.
        algorithm: The working module, which determines the trained weights.
        seed: The run's seed.
        number: The number of the direction; directions with different numbers are independent.
    """
    generator = sampling.rng(seed, "loss landscape", number)
    direction = {}
    for name, p in algorithm.named_parameters():
        if p.requires_grad:
            weight = center[name]
            drawn = torch.from_numpy(generator.standard_normal(tuple(weight.shape))).to(weight)
            rows = weight.flatten(1) if weight.dim() > 1 else weight.reshape(1, -1)
            noise = drawn.reshape(rows.shape)
            scaled = noise * (
                rows.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True).clamp(min=1e-12)
            )
            direction[name] = scaled.reshape(weight.shape)
    return direction


def draw(surface: NDArray[np.float64], reach: float) -> Figure:
    """Contours of the surface; the places of values that are not finite stay white.

    Args:
        surface: ``(points, points)``, rows b2, columns b1.
        reach: The axes range from -reach to reach.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    steps = np.linspace(-reach, reach, len(surface))
    shown = np.ma.masked_invalid(surface)
    low, high = float(shown.min()), float(shown.max())
    logarithmic = low > 0 and high >= _DECADE * low
    levels = np.geomspace(low, high, 25) if logarithmic else np.linspace(low, high or 1.0, 25)
    filled = axes.contourf(
        steps, steps, shown, levels=levels, norm=LogNorm(low, high) if logarithmic else None
    )
    axes.plot([0], [0], marker="+", color="white", markersize=10)
    axes.set(xlabel="b1", ylabel="b2", title="objective around the trained weights", aspect="equal")
    figure.colorbar(filled, label="F", format="%.3g")
    return figure


def _spread(count: int, most: int) -> Tensor:
    """At most ``most`` of ``count`` indices, evenly spaced."""
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).long()
