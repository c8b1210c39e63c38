"""Tests of MyMethod; see docs/adding_a_method.md for further ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from my_method import MyMethod
from torch import Tensor

from lightning_fedssl import (
    MLP,
    FederatedAlgorithm,
    FederatedDataModule,
    FederatedTrainer,
    FixMatch,
)

OPTIONS: dict[str, Any] = {
    "network": partial(MLP, hidden=(8,)),
    "optimizer": partial(torch.optim.SGD, lr=0.1),
    "client_epochs": 1,
    "server_epochs": 1,
}


def trained(model: FederatedAlgorithm, folder: Path, clients_at_once: int = 1) -> dict[str, Tensor]:
    """The weights after two rounds with three clients, in 64 bits."""
    data = FederatedDataModule(
        "digits", num_clients=3, num_labels=10, max_train_images=60, max_test_images=10
    )
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=3,
        clients_at_once=clients_at_once,
        precision="64-true",
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data)
    return dict(model.server.parameters)


def test_stacked_clients_train_as_sequential_ones(tmp_path: Path) -> None:
    sequential = trained(MyMethod(threshold=0.2, **OPTIONS), tmp_path / "sequential")
    stacked = trained(MyMethod(threshold=0.2, **OPTIONS), tmp_path / "stacked", clients_at_once=3)
    torch.testing.assert_close(stacked, sequential, rtol=0, atol=1e-10)


def test_it_is_fixmatch_until_you_change_it(tmp_path: Path) -> None:
    """Replace this by a special case of your method: with what is new switched off, it equals a
    known method.
    """
    own = trained(MyMethod(threshold=0.2, **OPTIONS), tmp_path / "own")
    known = trained(FixMatch(threshold=0.2, **OPTIONS), tmp_path / "known")
    torch.testing.assert_close(own, known, rtol=0, atol=1e-10)


def test_a_threshold_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.threshold is 2: give a number from 0 to 1"):
        MyMethod(threshold=2, **OPTIONS)
