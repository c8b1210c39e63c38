"""Compares SemiFL with the labels alone on the two embedded examples that are no images, over seeds.

The labels, the network, the weak view and the server's steps are the same for both. All runs are made in one process.

    python benchmarks/own_data.py --seeds 5
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from pathlib import Path

import torch

from lightning_fedssl.cli.lightning_cli import FederatedCLI

RESULTS = Path(__file__).resolve().parent / "results" / "own_data.csv"
CONFIGS = {
    "breast cancer": {"SemiFL": "semifl_breast_cancer.yaml", "labels alone": "supervised_breast_cancer.yaml"},
    "signals": {"SemiFL": "semifl_signals.yaml", "labels alone": "supervised_signals.yaml"},
}
"""The configurations of each data set by their names in the table."""


def main() -> None:
    """Run everything and write one row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, .. of each configuration")
    parser.add_argument("--rounds", type=int, help="instead of the configurations' own number")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        (data, method, config, seed, test_accuracy(config, seed, arguments.rounds))
        for data, methods in CONFIGS.items()
        for method, config in methods.items()
        for seed in range(arguments.seeds)
    ]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("data", "method", "config", "seed", "test_accuracy"))
        table.writerows((*row[:4], f"{row[4]:.4f}") for row in rows)
    for data, methods in CONFIGS.items():
        for method in methods:
            scores = [100 * row[4] for row in rows if row[:2] == (data, method)]
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            print(f"{data}, {method}: {statistics.mean(scores):.1f} +- {spread:.1f} %")


def test_accuracy(config: str, seed: int, rounds: int | None) -> float:
    """The accuracy of the last model of a run on the test samples."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--config={config}", f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}"]
        options += ["--trainer.enable_progress_bar=false", "--trainer.logger=false"]
        options += [] if rounds is None else [f"--trainer.max_rounds={rounds}"]
        cli = FederatedCLI(options, run=False)
        cli.trainer.fit(cli.model, cli.datamodule)
        return float(cli.trainer.callback_metrics["test/accuracy"])


if __name__ == "__main__":
    main()
