"""Lightning's profilers around the phases of a round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback

if TYPE_CHECKING:
    from lightning.pytorch.profilers import Profiler


ROUND = "round.training_step"
"""The name of a round: by its ending PyTorchProfiler, which records every operation of a few steps,
takes a round as a step."""


def _starts(action: str) -> Any:
    """A hook that begins an action."""

    def hook(self: PhaseProfiler, trainer: Any, algorithm: Any) -> None:
        if trainer.training:
            self.running.append(action)
            self.profiler.start(action)

    return hook


def _ends(action: str) -> Any:
    """A hook that ends an action."""

    def hook(self: PhaseProfiler, trainer: Any, algorithm: Any, *metrics: Any) -> None:
        if action in self.running:
            self.running.remove(action)
            self.profiler.stop(action)

    return hook


class PhaseProfiler(FederatedCallback):
    """Measures the phases of ``fit`` by a profiler of Lightning, and lets it report at the end.

    The actions are ``server``, ``clients``, ``evaluation``, and ``round.training_step`` around all.

    Args:
        profiler: ``SimpleProfiler``, which sums up the seconds, ``PyTorchProfiler``, ... of
            ``lightning.pytorch.profilers``.

    Attributes:
        running: The actions that have begun and not ended.
    """

    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler
        self.running: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin a report."""
        self.profiler.setup(stage, trainer.local_rank, trainer.log_dir)

    on_round_start = _starts(ROUND)
    on_round_end = _ends(ROUND)
    on_server_phase_start = _starts("server")
    on_server_phase_end = _ends("server")
    on_client_phase_start = _starts("clients")
    on_aggregate = _ends("clients")
    on_evaluation_start = _starts("evaluation")
    on_evaluation_end = _ends("evaluation")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the profiler report, also on a run that an error has ended."""
        while self.running:
            self.profiler.stop(self.running.pop())
        if trainer.training:
            self.profiler.describe()
