"""SemiFL and FedAvg on the digits with clients that drop out, and with one client whose updates explode.

* ``drop-out``: every selected client drops out of a round with a probability of 0, 0.1, 0.3, 0.5 or 0.7
  (``trainer.availability RandomDropout``).
* ``exploding``: client 0 sends 100 times its change of the weights in every round in which it is selected, with the
  quarantine (``trainer.quarantine 10``, the default) and without it (``null``). Without the quarantine a run may end
  because the global model is not finite; then the row has the accuracy on the validation images of the last whole
  round.

    OMP_NUM_THREADS=1 python benchmarks/faults.py

The configurations are ``fedavg_digits.yaml`` as it is and ``semifl_digits.yaml`` with 10 instead of 30 rounds, with
seeds 0, 1 and 2, which also draw the partition and the initial weights. When a run has ended, one row is appended to
``results/faults.csv`` and its curve to ``results/faults_curves.csv``. A run that is in the first file is not repeated.
At its end the script prints a table in Markdown and draws ``docs/images/faults.svg`` from the files; ``--at-most 0``
only does that.
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.cli import FederatedCLI

ROOT = Path(__file__).resolve().parent
CONFIGS = {"FedAvg": "fedavg_digits.yaml", "SemiFL": "semifl_digits.yaml"}
ROUNDS = {"FedAvg": 20, "SemiFL": 10}
RATES = (0.0, 0.1, 0.3, 0.5, 0.7)
EXPLODING = 0
"""The client whose updates explode."""
FACTOR = 100.0
KEY = ("method", "fault", "dropout", "quarantine", "seed")
COLUMNS = (
    *KEY, "accuracy", "ended_in_round", "rounds_without_clients", "rejected", "fewest_rounds_of_a_client",
    "mean_rounds_of_a_client", "most_rounds_of_a_client", "megabytes", "cpu_s",
)  # fmt: skip
CURVES = (*KEY, "round", "finished", "val_accuracy")


@dataclass(frozen=True)
class Setting:
    """The settings of a run without its seed.

    Attributes:
        method: A key of :data:`CONFIGS`.
        fault: ``drop-out`` or ``exploding``.
        dropout: The drop-out probability.
        quarantine: Whether exploding updates are rejected.
    """

    method: str
    fault: str
    dropout: float = 0.0
    quarantine: bool = True

    def key(self, seed: int) -> dict[str, str]:
        """The first columns of the run's rows."""
        values = (self.method, self.fault, f"{self.dropout:g}", "on" if self.quarantine else "off", str(seed))
        return dict(zip(KEY, values, strict=True))


SETTINGS = [
    *(Setting(method, "drop-out", rate) for method, rate in product(CONFIGS, RATES)),
    *(Setting(method, "exploding", 0.0, on) for method, on in product(CONFIGS, (True, False))),
]


class Course(FederatedCallback):
    """Records the clients' outcomes and the accuracy of every round."""

    def __init__(self) -> None:
        self.outcomes: list[Counter[str]] = []
        self.rounds_of: Counter[int] = Counter()
        self.accuracies: list[float] = []
        self.total_bytes = 0.0

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """Record the round."""
        self.outcomes.append(Counter(trainer.participation.values()))
        self.rounds_of.update(k for k, outcome in trainer.participation.items() if outcome == "finished")
        self.accuracies.append(metrics["val/accuracy"])
        self.total_bytes = metrics.get("communication/total_bytes", self.total_bytes)


def explode(algorithm: Any) -> None:
    """Multiply the change of the weights in one client's updates by :data:`FACTOR`."""
    end = algorithm.on_client_end

    def on_client_end(update: Any) -> Any:
        update = end(update)
        if update.client != EXPLODING:
            return update
        sent = algorithm.server.parameters
        return replace(update, parameters={n: sent[n] + FACTOR * (p - sent[n]) for n, p in update.parameters.items()})

    vars(algorithm)["on_client_end"] = on_client_end


def run(setting: Setting, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train and test once: the row of the results, and the rows of the curve."""
    options = [f"--config={CONFIGS[setting.method]}", f"--seed_everything={seed}", "--trainer.logger=false"]
    options += [f"--trainer.max_rounds={ROUNDS[setting.method]}"]
    options += ["--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={tempfile.gettempdir()}"]
    options += ["--trainer.availability=RandomDropout", f"--trainer.availability.probability={setting.dropout}"]
    options += [] if setting.quarantine else ["--trainer.quarantine=null"]
    cli: Any = FederatedCLI(args=options, run=False)
    course, started = Course(), time.process_time()
    cli.trainer.given_callbacks.append(course)
    if setting.fault == "exploding":
        explode(cli.model)
    try:
        cli.trainer.fit(cli.model, cli.datamodule)
        accuracy = float(cli.trainer.callback_metrics["test/accuracy"])
    except ValueError as error:  # the global model is not finite
        print(error)
        accuracy = course.accuracies[-1]
    finished = [outcomes["finished"] for outcomes in course.outcomes]
    rounds_of = [course.rounds_of[client] for client in range(cli.datamodule.num_clients)]
    row = {
        "accuracy": f"{accuracy:.4f}",
        "ended_in_round": len(finished),
        "rounds_without_clients": finished.count(0),
        "rejected": sum(outcomes["rejected"] for outcomes in course.outcomes),
        "fewest_rounds_of_a_client": min(rounds_of),
        "mean_rounds_of_a_client": f"{statistics.mean(rounds_of):.2f}",
        "most_rounds_of_a_client": max(rounds_of),
        "megabytes": f"{course.total_bytes / 1e6:.1f}",
        "cpu_s": f"{time.process_time() - started:.0f}",
    }
    curve = [
        {"round": t, "finished": count, "val_accuracy": f"{accuracy:.4f}"}
        for t, (count, accuracy) in enumerate(zip(finished, course.accuracies, strict=True), start=1)
    ]
    return row, curve


def main() -> None:
    """Run the missing runs, method by method and seed by seed, then print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ..")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of the CSV files")
    parser.add_argument("--picture", type=Path, default=ROOT.parent / "docs" / "images" / "faults.svg")
    parser.add_argument("--at-most", type=int, default=1000, help="end after this number of runs")
    options = parser.parse_args()
    sys.argv[1:] = []  # Lightning warns of a command line beside the arguments that it is given
    logging.getLogger("lightning_fedssl").setLevel(logging.ERROR)
    results, curves = options.results / "faults.csv", options.results / "faults_curves.csv"
    for setting, seed in list(missing(read(results), options.seeds))[: options.at_most]:
        row, curve = run(setting, seed)
        append(curves, CURVES, [setting.key(seed) | point for point in curve])
        append(results, COLUMNS, [setting.key(seed) | row])
        print(" ".join(str(value) for value in (setting.key(seed) | row).values()), flush=True)
    print("\n".join(table(read(results))))
    draw(read(results), options.picture)


def missing(rows: Sequence[dict[str, str]], seeds: int) -> Iterator[tuple[Setting, int]]:
    """The runs that the CSV file does not have, method by method and seed by seed."""
    known = [{name: row[name] for name in KEY} for row in rows]
    for method, seed, setting in product(CONFIGS, range(seeds), SETTINGS):
        if setting.method == method and setting.key(seed) not in known:
            yield setting, seed


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a CSV file, which gets a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def of_setting(rows: Sequence[dict[str, str]], setting: Setting, column: str) -> list[float]:
    """A column of the runs of a setting, one value a seed."""
    wanted = {name: value for name, value in setting.key(0).items() if name != "seed"}
    return [float(row[column]) for row in rows if all(row[name] == value for name, value in wanted.items())]


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """The results in Markdown: test accuracy of every seed, and what happened to the clients."""
    head = ["method", "fault", "test accuracy, each seed", "mean", "rounds a client took part in", "MB"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|"]
    for setting in SETTINGS:
        accuracies = of_setting(rows, setting, "accuracy")
        if not accuracies:
            continue
        fault = f"drop-out {setting.dropout:.0%}"
        if setting.fault == "exploding":
            fault = f"exploding client, quarantine {'on' if setting.quarantine else 'off'}"
        names = ("fewest_rounds_of_a_client", "mean_rounds_of_a_client", "most_rounds_of_a_client")
        fewest, mean, most = (of_setting(rows, setting, name) for name in names)
        cells = [
            setting.method,
            fault,
            ", ".join(f"{100 * a:.1f}" for a in accuracies),
            f"{100 * statistics.mean(accuracies):.1f} %",
            f"{statistics.mean(mean):.1f} ({min(fewest):.0f} to {max(most):.0f})",
            f"{statistics.mean(of_setting(rows, setting, 'megabytes')):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Draw test accuracy against the drop-out rate, and with one exploding client; every seed is a dot."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    colors = {"FedAvg": "#0072b2", "SemiFL": "#d55e00"}
    bars = [
        ("no fault", "drop-out", True),
        ("quarantine\non", "exploding", True),
        ("quarantine\noff", "exploding", False),
    ]
    for shift, method in zip((-0.1, 0.1), CONFIGS, strict=True):
        by_rate = {rate: of_setting(rows, Setting(method, "drop-out", rate), "accuracy") for rate in RATES}
        by_rate = {rate: found for rate, found in by_rate.items() if found}
        means = [100 * statistics.mean(found) for found in by_rate.values()]
        left.plot([100 * rate for rate in by_rate], means, color=colors[method], label=method)
        dots(left, {100 * rate: found for rate, found in by_rate.items()}, colors[method])
        by_fault = {
            place + shift: of_setting(rows, Setting(method, fault, 0.0, on), "accuracy")
            for place, (_, fault, on) in enumerate(bars)
        }
        dots(right, by_fault, colors[method])
        for place, found in by_fault.items():
            if found:
                right.plot([place - 0.08, place + 0.08], [100 * statistics.mean(found)] * 2, color=colors[method])
    left.set(xlabel="drop-out rate in %", ylabel="test accuracy in %", title="clients drop out", ylim=(0, 100))
    right.set_xticks(range(len(bars)), [title for title, _, _ in bars])
    right.set(title=f"client {EXPLODING} sends {FACTOR:.0f} times its movement")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(title="mean of the seeds; every dot is a seed", loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "faults"}):
        figure.savefig(path, metadata={"Date": None})


def dots(axes: Any, places: dict[float, list[float]], color: str) -> None:
    """Draw every value of every place as a dot, in per cent."""
    pairs = [(place, 100 * value) for place, values in places.items() for value in values]
    if pairs:
        axes.scatter(*zip(*pairs, strict=True), color=color, s=18, zorder=3)


if __name__ == "__main__":
    main()
