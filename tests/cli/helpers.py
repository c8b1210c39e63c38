"""A small run, as a configuration, and how the tests call the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fedssl import FederatedDataModule
from lightning_fedssl.cli import main

CONFIG: dict[str, Any] = {
    "seed_everything": 3,
    "trainer": {"max_rounds": 2, "clients_per_round": 2, "accelerator": "cpu"},
    "model": {
        "class_path": "SemiFL",
        "init_args": {
            "network": {"class_path": "MLP", "init_args": {"hidden": [8]}},
            "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}},
            "client_epochs": 1,
            "server_epochs": 1,
        },
    },
    "data": {"num_clients": 5, "num_labels": 20, "max_train_images": 200, "max_test_images": 50, "partition": "Shards"},
}


class SmallData(FederatedDataModule):
    """A user's own data module.

    Args:
        size: Training images.
        num_clients: Clients.
    """

    def __init__(self, size: int = 60, num_clients: int = 3) -> None:
        super().__init__(num_clients=num_clients, num_labels=20, max_train_images=size, max_test_images=20)


def write(name: str, content: object) -> None:
    Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that ends with code 2."""
    capsys.readouterr()
    try:
        code: object = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    errors = capsys.readouterr().err
    assert code == 2, errors
    return errors.partition("error: ")[2]
