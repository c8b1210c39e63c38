"""``predict --rows``: predicts new rows of a table by a checkpoint alone, without the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fedssl.cli.export import checkpoint_of, parser
from lightning_fedssl.data.class_shares import drawn_to
from lightning_fedssl.export import LoadedNetwork, network_of
from lightning_fedssl.storage import run_folder

DESCRIPTION = """\
Predicts new rows of a table; needs a checkpoint and no data of the run. predict without --rows
has its own help: predict --help.

  lightning-fedssl predict --rows new.csv --default_root_dir runs/table --output predictions.csv
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``predict --rows``.

    Args:
        arguments: What follows the command's name.

    Returns:
        The exit code, 0.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the rows do not fit the model.
    """
    made = parser("predict", DESCRIPTION)
    made.add_argument("--rows", type=str, help="A CSV file with the columns of the training data.")
    made.add_argument(
        "--class_shares",
        type=dict[str, Any],
        help="How frequent the classes are among the rows, such as --class_shares.ill 0.2.",
    )
    options = made.parse_args(list(arguments))
    checkpoint = checkpoint_of(options)
    model = LoadedNetwork(*network_of(checkpoint, options.trust))
    found = model.predict(options.rows)
    path = Path(options.output or checkpoint.parent.with_name("predictions.csv"))
    values = torch.tensor([[*row.values()] for row in found])
    one_class = model.description["task"] == "Classification"
    if options.class_shares:
        values = drawn_to(values, options.class_shares, [*found[0]], one_class)
    run_folder.write_predictions(values, path, [*found[0]], one_class=one_class)
    print(f"read: {checkpoint}\nwritten: {path}, {len(found)} rows")
    return 0
