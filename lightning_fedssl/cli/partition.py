"""The ``partition`` command: draws the partition and prints its statistics, without training."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from lightning_fedssl.cli.parser import ConfigFile, Parser
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.partition.statistics import PartitionStatistics
from lightning_fedssl.storage.files import write_table

DESCRIPTION = """\
Draws the partition that fit would train on, and prints what every client holds: images, classes,
labels, class skew. Nothing is trained; the keys of trainer and model in a configuration are not
read.

  lightning-fedssl partition --config semifl_digits.yaml
  lightning-fedssl partition --data.num_clients 50 --data.partition Dirichlet \\
      --data.partition.alpha 0.1
  lightning-fedssl partition --config fedrgd_digits.yaml --output p
      partition.json and clients.csv

A saved partition.json can be used again:
  --data.partition FromFile --data.partition.path p/partition.json
"""

MOST_CLASSES = 20
"""The largest number of classes that have a column."""

MOST_CLIENTS = 20
"""The clients in the table at most."""


def main(
    arguments: Sequence[str], datamodule_class: type[FederatedDataModule] = FederatedDataModule
) -> int:
    """Run ``partition``.

    Args:
        arguments: What follows the command's name.
        datamodule_class: A data module of your own.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If the setting does not fit the data.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    reader = parser(datamodule_class)
    options = reader.parse_args(list(arguments))
    seed_everything(options.seed_everything, workers=True, verbose=False)
    data = reader.instantiate_classes(options).data
    data.prepare_data()
    data.setup()
    print(data.reading.summary(), _asked_for(data), data.statistics.summary(), "", sep="\n")
    print("\n".join(client_table(data.statistics)))
    if options.output:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        data.split.save(folder / "partition.json")
        _write_csv(folder / "clients.csv", data.statistics)
        print(f"written: {folder / 'partition.json'} and clients.csv")
    return 0


def parser(datamodule_class: type[FederatedDataModule]) -> Parser:
    """The parser: the keys of data, and where to write."""
    made = Parser.of_command("partition", DESCRIPTION)
    made.add_argument(
        "-c", "--config", action=ConfigFile, help="A configuration, as for fit; the last wins."
    )
    made.add_argument("--seed_everything", type=int, default=0, help="The seed.")
    made.add_argument(
        "--output",
        type=str | None,
        help="Folder for partition.json and clients.csv.",
    )
    for unread in ("trainer", "model", "ckpt_path"):
        made.add_argument(f"--{unread}", type=Any, help=argparse.SUPPRESS)
    made.add_class_arguments(datamodule_class, "data", fail_untyped=False, sub_configs=True)
    return made


def _asked_for(data: FederatedDataModule) -> str:
    """The settings of the partition in one line."""
    rule = data.partition
    settings = ", ".join(f"{key}={value}" for key, value in vars(rule).items() if key[0] != "_")
    name = data.spec.name if data.source is None else type(data.source).__name__
    return (
        f"{name}, {data.num_labels} labels at the {data.label_location}, "
        f"{type(rule).__name__}({settings})"
    )


def client_table(statistics: PartitionStatistics) -> list[str]:
    """A line for the server and for each client: its images, labels, classes, and counts per class.

    A count is ``labelled+unlabelled`` where the party holds labelled images, else the number of
    unlabelled ones. Where the class of some images is not known, a last column counts these.

    Args:
        statistics: Of the partition.
    """
    clients, classes = statistics.class_counts.shape
    names = statistics.class_names or tuple(map(str, range(classes)))
    parties = statistics.client_names or [f"client {client}" for client in range(clients)]
    unknown = statistics.unknown_counts
    others = [0] * clients if unknown is None else unknown.tolist()
    columns = names if classes <= MOST_CLASSES else ()
    rows = [["", "images", "labelled", "classes", *columns, "unknown"]]
    at_server = statistics.server_class_counts
    if at_server.any():
        rows.append(_row("server", at_server, at_server, 0))
    for client in range(clients)[:MOST_CLIENTS]:
        counts = statistics.class_counts[client]
        labeled = statistics.labeled_class_counts[client]
        rows.append(_row(parties[client], counts, labeled, others[client]))
    if unknown is None:
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        padded = map(str.rjust, cells, widths[1:])
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    if columns:
        lines.append("a+b: a labelled and b unlabelled; where there is no +, all are unlabelled")
    if clients > MOST_CLIENTS:
        lines.append(f"not shown: {clients - MOST_CLIENTS} more; --output writes all")
    return lines


def _row(name: str, counts: Tensor, labeled: Tensor, unknown: int) -> list[str]:
    held = counts.tolist()
    known = labeled.tolist()
    cells = [f"{k}+{n - k}" if any(known) else str(n) for n, k in zip(held, known, strict=True)]
    if len(cells) > MOST_CLASSES:
        cells = []
    classes = sum(n > 0 for n in held)
    return [name, str(sum(held) + unknown), str(sum(known)), str(classes), *cells, str(unknown)]


def _write_csv(path: Path, statistics: PartitionStatistics) -> None:
    """A row per client: its labelled and unlabelled images of each class, and those of unknown
    class, if any.
    """
    classes = range(statistics.class_counts.shape[1])
    counts = [
        statistics.labeled_class_counts,
        statistics.class_counts - statistics.labeled_class_counts,
    ]
    unknown = [] if statistics.unknown_counts is None else [statistics.unknown_counts[:, None]]
    names = [f"{kind}_{k}" for kind in ("labeled", "unlabeled") for k in classes]
    rows = enumerate(torch.cat([*counts, *unknown], dim=1).tolist())
    head = ["client", *names, *["unknown"] * len(unknown)]
    write_table(path, [head, *([client, *row] for client, row in rows)])
