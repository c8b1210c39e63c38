"""Where the CPU time of a SemiFL round on the digits goes, phase by phase.

It trains ``configs/semifl_digits.yaml`` on one thread and counts the CPU time of each phase without that of the phases
inside it. The images that train grow from round to round, as more of them pass the threshold. It prints a table.

    python benchmarks/round_phases.py --rounds 8
"""

from __future__ import annotations

import argparse
import functools
import logging
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.cli.lightning_cli import FederatedCLI
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_training import sequential
from lightning_fedssl.local_training.ops.backward import _Backward
from lightning_fedssl.local_training.sequential import Loop
from lightning_fedssl.trainer import FederatedTrainer, evaluation
from lightning_fedssl.trainer.run import Run

PHASES: dict[str, list[tuple[Any, str]]] = {
    "labelling": [(SemiFL, "label_images")],
    "views": [(LocalData, "weak"), (LocalData, "strong"), (LocalData, "plain")],
    "forward": [(Loop, "loss_and_gradients")],
    "backward": [(_Backward, "__call__")],
    "clipping": [(sequential, "clip_norm")],
    "optimizer and loop": [(Loop, "train")],
    "batch-norm statistics": [(StaticBatchNorm, "_refresh")],
    "evaluation": [(evaluation, "evaluate")],
    "logging": [(Run, "log_metrics")],
    "checkpoint": [(FederatedCheckpoint, "on_round_end")],
}


class Clock:
    """CPU seconds of nested phases, each without those inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open = ["other"]
        self._since = time.process_time()

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since  # type: ignore[assignment]
        self._since = now

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count the time of a function or method under a phase."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        setattr(owner, name, timed)

    def take(self) -> Counter[str]:
        """The seconds since the last call."""
        self._switch()
        taken, self.seconds = self.seconds, Counter()
        return taken


class Rounds(FederatedCallback):
    """Stores the phases and the images of every round."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rows: list[tuple[float, Counter[str]]] = []

    def on_train_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Forget what was before the first round."""
        self.clock.take()

    def on_round_end(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        """Store a row; the checkpoint of a round is counted to the next."""
        self.rows.append((metrics["client/images"], self.clock.take()))


def main() -> None:
    """Train, and print a column for the first and for the last rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    clock = Clock()
    for phase, functions in PHASES.items():
        for owner, name in functions:
            clock.watch(owner, name, phase)
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "max_rounds": rounds, "accelerator": "cpu", "devices": 1, "default_root_dir": folder,
            "enable_progress_bar": "false",
        }  # fmt: skip
        options = [f"--trainer.{key}={value}" for key, value in keys.items()]
        cli = FederatedCLI(["--config", "configs/semifl_digits.yaml", *options], run=False)
        recorded = Rounds(clock)
        vars(cli.trainer)["given_callbacks"].append(recorded)
        cli.trainer.fit(cli.model, cli.datamodule)
    parts = {"rounds 2 and 3": recorded.rows[1:3], f"rounds {rounds - 1} and {rounds}": recorded.rows[-2:]}
    print("| phase | " + " | ".join(f"{title}: CPU ms a round | share" for title in parts) + " |")
    print("|---|" + "---|---|" * len(parts))
    sums = [sum((row for _, row in rows), Counter()) for rows in parts.values()]
    for phase in [*PHASES, "other"]:
        cells = [f"{1000 * s[phase] / 2:.0f} | {s[phase] / sum(s.values()):.1%}" for s in sums]
        print(f"| {phase} | " + " | ".join(cells) + " |")
    totals = [f"{1000 * sum(s.values()) / 2:.0f} | 100 %" for s in sums]
    print("| whole round | " + " | ".join(totals) + " |")
    print(
        "| images of clients | " + " | ".join(f"{sum(n for n, _ in rows) / 2:.0f} | " for rows in parts.values()) + "|"
    )


if __name__ == "__main__":
    main()
