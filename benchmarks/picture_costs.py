"""Processor time of the dashboard and the callbacks that draw, as a share of a run with the defaults.

``python benchmarks/picture_costs.py``: runs of SemiFL on the digits in one process, alternately with and without the
callbacks, so that other load on the machine affects both alike. The share is the callbacks' own processor time, which a
timer around their hooks measures, over that of the whole run.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning_fedssl.callbacks import (
    ClientHeatMaps,
    Dashboard,
    MetricMatrices,
    PartitionReport,
    PseudoLabelGallery,
    PseudoLabelQuality,
)
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet

MEASURED = (ClientHeatMaps, Dashboard, MetricMatrices, PartitionReport, PseudoLabelGallery, PseudoLabelQuality)
DRAWN = ("ClientHeatMaps", "PseudoLabelGallery")


def time_hooks() -> dict[str, float]:
    """Wrap the hooks of the measured classes; the returned processor seconds by class grow as runs call the hooks."""
    spent: dict[str, float] = {}
    for kind in MEASURED:
        for hook in [name for name in vars(kind) if name.startswith("on_")]:
            setattr(kind, hook, _timer(getattr(kind, hook), kind.__name__, spent))
    return spent


def _timer(hook: Any, name: str, spent: dict[str, float]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = hook(*args, **kwargs)
        spent[name] = spent.get(name, 0.0) + time.process_time() - began
        return result

    return call


def run(config: str, folder: Path, rounds: int | None, more: list[str]) -> float:
    """Processor seconds of a run from its set-up to its test."""
    options = ["--config", config, "--trainer.default_root_dir", str(folder), "--trainer.enable_progress_bar", "false"]
    options += [] if rounds is None else ["--trainer.max_rounds", str(rounds)]
    with quiet():
        cli = FederatedCLI([*options, *more], run=False)
    began = time.process_time()
    cli.trainer.fit(cli.model, cli.datamodule)
    return time.process_time() - began


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="semifl_digits.yaml", help="the configuration")
    parser.add_argument("--rounds", type=int, default=None, help="the configuration's own if left out")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    options = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    drawn = [f"--trainer.callbacks+={name}" for name in DRAWN]
    drawn += ["--trainer.callbacks+=PseudoLabelQuality", "--trainer.callbacks.matrix_every_n_rounds=50"]
    totals: dict[str, list[float]] = {"plain": [], "drawn": []}
    shares: dict[str, list[tuple[float, float]]] = {}
    spent = time_hooks()
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for kind, more in (("plain", []), ("drawn", drawn)):
                spent.clear()
                totals[kind].append(run(options.config, Path(folder, f"{kind}{repeat}"), options.rounds, more))
                for name, part in spent.items():
                    shares.setdefault(f"{kind}: {name}", []).append((part, part / totals[kind][-1]))
    for kind, values in totals.items():
        print(f"{kind}: {statistics.median(values):.1f} processor seconds, {', '.join(f'{v:.1f}' for v in values)}")
    for name, parts in sorted(shares.items()):
        seconds, share = (statistics.median(column) for column in zip(*parts, strict=True))
        print(f"{name}: {seconds:.2f} s, {100 * share:.2f} % of the run")


if __name__ == "__main__":
    main()
