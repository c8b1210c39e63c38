"""Pictures for the logger: heat maps of the clients.

In a checkout: ``lightning-fedssl fit --config semifl_digits.yaml
--trainer.callbacks+=examples.diagnostics.client_pictures.ClientHeatMaps``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from examples.diagnostics.figures import has_pictures, show_figure
from lightning_fedssl.callback import FederatedCallback, at_least

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import ClientUpdate

TITLES = {
    "mask_rate": "share of confident pseudo-labels",
    "update_norm": "length of the update",
}


class ClientHeatMaps(FederatedCallback):
    """Draws heat maps client x round for the logger: ``clients/mask_rate`` and
    ``clients/update_norm``.

    The mask rate needs a method that labels before the client's first step (SemiFL). It is 0 for a
    client that was drawn and has no confident image; such a client does not train and has no
    update. The update is the client's weights minus those that it received: the global ones, or
    those of its group or slot (FedRGD, EASGD, Overlap Local-SGD).

    Args:
        every_n_rounds: Draw after every n-th round, and after the last one. Every round is
            recorded.
    """

    def __init__(self, every_n_rounds: int = 50) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.history: dict[str, dict[int, dict[int, float]]] = {name: {} for name in TITLES}
        self._found: dict[str, dict[int, Tensor]] = {name: {} for name in TITLES}

    def on_client_start(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Record the mask rate of a client that computed pseudo-labels for the round."""
        if work.pseudo_labels is not None and len(work.pseudo_labels.mask):
            self._found["mask_rate"][data.party] = work.pseudo_labels.mask.double().mean()

    def on_client_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Record the length of a client's update."""
        received = algorithm.broadcast(update.client)
        pairs = [
            (t, received[name].to(t.device))
            for name, t in update.parameters.items()
            if name in received
        ]
        moved = torch.stack([(after - before).norm() for after, before in pairs])
        self._found["update_norm"][update.client] = moved.double().norm()

    def on_global_model(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Combine what all ranks recorded in this round."""
        for name, found in self._found.items():
            parts = trainer.gather({client: float(value) for client, value in found.items()})
            if values := {client: value for part in parts for client, value in part.items()}:
                self.history[name][trainer.round_index] = values
            found.clear()

    def on_pictures(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, is_last: bool
    ) -> None:
        """Draw at the interval."""
        if (is_last or trainer.round_index % self.every_n_rounds == 0) and has_pictures(trainer):
            for name, rounds in self.history.items():
                if rounds:
                    figure = draw_clients(rounds, trainer.datamodule.num_clients, TITLES[name])
                    show_figure(trainer, f"clients/{name}", figure)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded so far."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.history = state_dict["history"]


def draw_clients(rounds: dict[int, dict[int, float]], num_clients: int, title: str) -> Figure:
    """A heat map of a value over clients (rows) and rounds (columns).

    White where a client has no value.

    Args:
        rounds: The clients' values by round.
        num_clients: M.
        title: What the value is.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    table = torch.full((num_clients, max(rounds)), torch.nan)
    for number, values in rounds.items():
        for client, value in values.items():
            table[client, number - 1] = value
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    extent = (0.5, max(rounds) + 0.5, num_clients - 0.5, -0.5)
    picture = axes.imshow(table.numpy(), aspect="auto", interpolation="nearest", extent=extent)
    axes.set(xlabel="round", ylabel="client", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.colorbar(picture)
    return figure
