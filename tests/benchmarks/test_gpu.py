"""What the benchmark of a GPU counts and times, on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.local_training.helpers import clients_of
from tests.toy import ToyData, toy_semifl, toy_trainer


@pytest.mark.parametrize(("clients", "most"), [(3, 196), (1, 159)])
def test_a_step_gives_a_gpu_no_more_operators_than_it_did(script: Any, clients: int, most: int) -> None:
    """SemiFL's two passes of WRN-10-1; stacked norms without their rule would make it 250."""
    step = script.step_of(clients, images=4, side=8, device="cpu", small=True)
    step()
    with script.Operators() as counted:
        step()
    assert counted.number <= most


def test_the_phases_of_a_round_hold_all_of_its_operators(script: Any, tmp_path: Path) -> None:
    counted = script.Operators()
    phases = script.Phases(lambda: counted.number)
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_at_once=4, logger=False, callbacks=phases)
    with phases.watching(), counted:
        trainer.fit(toy_semifl(), ToyData())
    found = phases.result
    assert {"labels", "views", "stacked steps", "steps of one party", "evaluation"} < found.keys()
    assert min(found.values()) >= 0
    assert found["stacked steps"] > 10 * found["labels"]


def test_clients_differ_in_their_number_of_confident_images(script: Any) -> None:
    everything = SimpleNamespace(mask=torch.ones(400, dtype=torch.bool))
    label = script.partly_confident(lambda algorithm, data: everything, (4, 2))
    shares = [float(label(None, data).mask.double().mean()) for data in clients_of((40, 40, 40))]
    assert len({share for share in shares if 0.1 < share < 0.99}) == 3


def test_every_limit_is_measured_at_small_size(script: Any) -> None:
    limits = [(case[0], measure) for case, measure in script.limits("cpu", True) if case[0] != "launch"]
    units = [measure().split()[1] for name, measure in limits if "32 to 32" in name or "convol" not in name]
    assert sorted(units) == 3 * ["TFLOP/s"] + (4 + 2 * 2) * ["ms"]
