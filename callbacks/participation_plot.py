"""Draws which clients took part in which rounds."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.boards import show_figure
from lightning_fedssl.system import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import Run

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""The outcomes in the order of their numbers in a checkpoint."""
_COLORS = {
    "not selected": "#f2f2f2",
    "finished": "#0072b2",
    "skipped": "#9ad0f0",
    "late": "#e69f00",
    "dropped": "#8c8c8c",
    "rejected": "#c0267a",
}

Participations = Mapping[int, Mapping[int, Outcome]]
"""The outcome of every selected client, by round and client."""


class ParticipationPlot(FederatedCallback):
    """Writes which clients took part in which rounds, as ``participation.csv`` and
    ``participation.png``.

    The picture has a heat map, clients by rounds, and a histogram of the number of rounds in which
    a client took part. TensorBoard shows it as the figure ``participation``. Both are written when
    the run ends. A resumed run continues them. Part of every run in which clients may be missing
    (``trainer.availability``, ``deadline_s``, ``over_selection``).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.rounds: dict[int, dict[int, Outcome]] = {}

    def on_round_end(
        self, trainer: Run, algorithm: FederatedAlgorithm, metrics: dict[str, float]
    ) -> None:
        """Record the outcomes of the round."""
        self.rounds[trainer.round_index] = dict(trainer.participation)

    def on_train_end(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Write the table and the picture."""
        self._write(trainer)

    def _write(self, trainer: Run) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run or not any(self.rounds.values()):
            return
        figure = draw_participation(self.rounds, trainer.datamodule.num_clients)
        if trainer.log_dir:
            folder = Path(trainer.log_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_participation(self.rounds, folder / "participation.csv")
            figure.savefig(folder / "participation.png", dpi=110)
        show_figure(trainer, "participation", figure)

    def state_dict(self) -> dict[str, Any]:
        """A row for every round and selected client: round, client, number of the outcome."""
        rows = [
            (t, k, OUTCOMES.index(o))
            for t, outcomes in self.rounds.items()
            for k, o in outcomes.items()
        ]
        return {"rows": torch.tensor(rows, dtype=torch.int32).reshape(-1, 3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.rounds = {}
        for round_index, client, number in state_dict["rows"].tolist():
            self.rounds.setdefault(round_index, {})[client] = OUTCOMES[number]


def write_participation(rounds: Participations, path: Path) -> None:
    """Write a line for every round and selected client, in the drawn order: round, client, outcome.

    Args:
        rounds: The outcomes.
        path: The file.
    """
    rows = [
        (t, client, outcome)
        for t, outcomes in rounds.items()
        for client, outcome in outcomes.items()
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("round", "client", "outcome"), *rows])


def draw_participation(rounds: Participations, num_clients: int) -> Figure:
    """A heat map of the outcomes, clients by rounds, and a histogram of the clients'
    participations.

    Args:
        rounds: The outcomes.
        num_clients: All clients of the federation.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    names = list(_COLORS)
    first, last = min(rounds), max(rounds)
    numbers = torch.zeros(num_clients, last - first + 1, dtype=torch.int64)
    for round_index, outcomes in rounds.items():
        for client, outcome in outcomes.items():
            numbers[client, round_index - first] = names.index(outcome)
    figure = Figure(figsize=(5.2, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    above.imshow(
        numbers.numpy(),
        cmap=ListedColormap(list(_COLORS.values())),
        vmin=0,
        vmax=len(names) - 1,
        aspect="auto",
        interpolation="nearest",
        extent=(first - 0.5, last + 0.5, num_clients - 0.5, -0.5),
    )
    above.set(xlabel="round", ylabel="client", title="what became of the selected clients")
    found = {
        "not selected",
        *(outcome for outcomes in rounds.values() for outcome in outcomes.values()),
    }
    patches = [
        Patch(facecolor=_COLORS[name], edgecolor="black", linewidth=0.4, label=name)
        for name in names
    ]
    figure.legend(
        handles=[p for p in patches if p.get_label() in found], loc="outside lower left", ncols=3
    )
    counts = Counter((numbers == names.index("finished")).sum(1).tolist())
    below.bar(list(counts), list(counts.values()), color=_COLORS["finished"])
    below.set(
        xlabel="rounds in which a client took part",
        ylabel="clients",
        title="participation of the clients",
    )
    for axis in (above.xaxis, above.yaxis, below.xaxis, below.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure
