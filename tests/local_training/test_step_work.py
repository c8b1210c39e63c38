"""The work of a step against operations counted by hand: those of a linear classifier on 64 pixels."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.algorithms import FedAvg, FixMatch, MeanTeacher
from lightning_fedssl.models import MLP
from lightning_fedssl.system import Device, SystemModel
from tests.algorithms.helpers import mixed_clients, plain_sgd
from tests.toy import ToyData, labeled_clients, toy, toy_trainer

FORWARD = 2 * 64 * 3
"""Operations of a forward pass of one image; the backward pass has as many, as an image needs no gradient."""

PLAIN = 5 * 2 * FORWARD


@pytest.mark.parametrize(
    ("make", "data", "operations"),
    [
        (FedAvg, labeled_clients, PLAIN),
        (FedAvg, partial(labeled_clients, client_batch_size=20), PLAIN),  # the last of two batches is shorter
        (partial(FixMatch, label_mode="train"), ToyData, 2 * PLAIN),  # both views go through one pass with gradients
        (partial(FixMatch, label_mode="eval"), ToyData, PLAIN + 5 * FORWARD),  # the weak view goes forward alone
        # Labelled and unlabelled images go through one pass, the latter also through the teacher.
        (partial(MeanTeacher, optimizer=plain_sgd), partial(mixed_clients, num_labels=60), 2 * PLAIN + 5 * FORWARD),
    ],
)
def test_the_time_of_a_step_is_that_of_its_operations(tmp_path: Path, make: Any, data: Any, operations: int) -> None:
    system = SystemModel([Device("a", 2.0)])
    trainer = toy_trainer(tmp_path, fast_dev_run=True, system=system)
    trainer.fit(toy(make, network=partial(MLP, hidden=())), data())
    assert trainer.callback_metrics["system/step_work"] == operations / PLAIN
    assert trainer.callback_metrics["system/compute_s"] == 2.0 * operations / PLAIN
