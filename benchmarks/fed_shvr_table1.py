"""Fed-SHVR's Table I on MNIST, cell by cell: one run per cell and seed, the results appended to a CSV as they come.

A cell that the CSV has is not run again, so the script can be stopped and started. It ends with the table in Markdown.

    OMP_NUM_THREADS=1 python benchmarks/fed_shvr_table1.py --root data --rounds 1 --seeds 5
    OMP_NUM_THREADS=1 python benchmarks/fed_shvr_table1.py --root data --rounds 1 --seeds 5 --reading step
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tempfile
import time
from pathlib import Path

import command_line
from command_line import RESULTS, ROOT

ALPHAS = (("0", "0"), ("0.75", "0"), ("0", "0.1"), ("0.75", "0.1"))
"""alpha_1 and alpha_2 of the rows of Table I."""

PAPER: dict[str, tuple[float, float, float, float]] = {
    "fedavg 600": (58.5, 88.0, 37.8, 87.5),
    "fedavg 60000": (94.4, 98.5, 94.3, 98.4),
    "fedshvr 0 0": (81.4, 92.5, 34.7, 92.4),
    "fedshvr 0.75 0": (83.5, 92.7, 74.4, 92.7),
    "fedshvr 0 0.1": (83.1, 95.2, 72.9, 95.4),
    "fedshvr 0.75 0.1": (83.6, 96.6, 82.2, 95.5),
}
"""Published test accuracies in per cent: IID after 1 and 100 rounds, not IID after 1 and 100."""

FURTHER = ("fedavg 600 3steps", "fedavg 600 tau")
"""FedAvg on 600 labels with 3 steps, E N_k / B rounded down, and with as many steps as Fed-SHVR makes."""

SUPERVISED_ONLY = ("alpha0=0", "alpha2=0", "control_variate=false", "averaging=plain")
"""What makes Fed-SHVR federated averaging on the labels with its own tau_k steps."""

READINGS = {
    "printed": ("ramp_epochs=50", "ramp_every_step=false", "label_refresh=round"),
    "step": ("ramp_epochs=2", "ramp_every_step=true", "label_refresh=step"),
}
"""Algorithm 1's labels and the printed ramp; labels by the model in training, and a ramp over the first round."""

COLUMNS = ("cell", "split", "reading", "hidden", "rounds", "seed", "accuracy", "loss", "cpu_s")


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="the data folder, with MNIST in it")
    parser.add_argument("--rounds", type=int, default=1, help="T")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ..")
    parser.add_argument("--hidden", type=int, default=5000, help="width of the hidden layer; the paper's is 5000")
    parser.add_argument("--reading", choices=READINGS, default="printed", help="of when labels are made")
    parser.add_argument("--cells", nargs="*", default=[*PAPER, *FURTHER], help="rows of the table")
    parser.add_argument("--splits", nargs="*", default=["iid", "noniid"], help="columns of the table")
    parser.add_argument("--csv", type=Path, default=RESULTS / "fed_shvr_table1.csv", help="where results are added")
    arguments = parser.parse_args()
    for seed in range(arguments.seeds):
        for split in arguments.splits:
            for cell in arguments.cells:
                key = (
                    cell,
                    split,
                    reading_of(cell, arguments.reading),
                    str(arguments.hidden),
                    str(arguments.rounds),
                    str(seed),
                )
                if key not in {tuple(row[name] for name in COLUMNS[:6]) for row in rows(arguments.csv)}:
                    with tempfile.TemporaryDirectory() as folder:
                        add(arguments.csv, [*key, *run(cell, split, seed, folder, arguments)])
    print("\n".join(table(rows(arguments.csv), arguments.rounds, str(arguments.hidden), arguments.reading)))


def reading_of(cell: str, reading: str) -> str:
    """The reading, where it matters: FedAvg has no unlabelled images to label."""
    return "-" if cell.startswith("fedavg") else reading


def options(cell: str, split: str, reading: str) -> tuple[str, list[str]]:
    """The configuration of a cell, and what it changes in it."""
    method, *rest = cell.split()
    if method == "fedavg" and "tau" not in rest:
        return f"fedavg_mnist_{rest[0]}_{split}.yaml", ["--model.client_epochs=1.5"] if "3steps" in rest else []
    alpha1, alpha2 = ("0.75", "0.1") if method == "fedavg" else rest
    changed = [f"alpha1={alpha1}", f"alpha2={alpha2}"] if method == "fedshvr" else list(SUPERVISED_ONLY)
    changed += READINGS[reading]
    return f"fedshvr_mnist_{split}.yaml", [f"--model.{option}" for option in changed]


def run(cell: str, split: str, seed: int, folder: str, arguments: argparse.Namespace) -> list[str]:
    """Accuracy in per cent, loss and processor seconds of one run."""
    from lightning_fedssl.cli import FederatedCLI

    config, changes = options(cell, split, arguments.reading)
    started = time.process_time()
    settings = {
        "trainer.callbacks": '{"class_path": "FederatedCheckpoint", "init_args": {"every_n_rounds": 1000}}',
        "trainer.default_root_dir": folder,
        "seed_everything": seed,
        "data.root": arguments.root,
        "data.validation": 0,
        "trainer.max_rounds": arguments.rounds,
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "model.network.hidden": f"[{arguments.hidden}]",
    }
    given = [*(f"--{key}={value}" for key, value in settings.items()), *changes]
    sys.argv = sys.argv[:1]
    metrics = FederatedCLI(args=["fit", f"--config={ROOT / 'configs' / config}", *given]).trainer.callback_metrics
    accuracy, loss = 100 * float(metrics["test/accuracy"]), float(metrics["test/loss"])
    return [f"{accuracy:.2f}", f"{loss:.4f}", f"{time.process_time() - started:.0f}"]


def rows(path: Path) -> list[dict[str, str]]:
    """What the CSV holds; nothing if there is none."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def add(path: Path, values: list[str]) -> None:
    """Append a row, with the header if the file is new."""
    new = not path.is_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow(values)
    print(*values, flush=True)


def table(results: list[dict[str, str]], rounds: int, hidden: str, reading: str) -> list[str]:
    """Mean, population standard deviation and number of seeds of each cell beside the paper's numbers."""
    lines = ["| cell | IID | paper | not IID | paper |", "|---|---|---|---|---|"]
    for cell in [*PAPER, *FURTHER]:
        texts = []
        for column, split in enumerate(("iid", "noniid")):
            wanted = (cell, split, reading_of(cell, reading), hidden, str(rounds))
            found = [float(r["accuracy"]) for r in results if tuple(r[name] for name in COLUMNS[:5]) == wanted]
            mean = f"{statistics.mean(found):.1f} ± {statistics.pstdev(found):.1f} ({len(found)})" if found else "-"
            index = 2 * column + (rounds == 100)
            published = f"{PAPER[cell][index]}" if cell in PAPER and rounds in (1, 100) else "-"
            texts += [mean, published]
        lines.append(f"| {cell} | {' | '.join(texts)} |")
    return [*lines, "", f"{command_line.machine()}."]


if __name__ == "__main__":
    main()
