"""What the benchmark of a GPU counts and times, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedssl.local_training import stack_memory
from tests.local_training.helpers import clients_of
from tests.toy import ToyData, toy_semifl, toy_trainer

VIEWS = "(_unsafe_)?view|t|transpose|permute|expand|slice|select|(un)?squeeze|detach|alias|as_strided|unbind"
VIEWS += "|(unsafe_)?split(_with_sizes)?|(new_)?empty(_like|_strided)?"  # they launch nothing


class Operators(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not re.fullmatch(VIEWS, func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_a_step_gives_a_gpu_no_more_operators_than_it_did(script: Any) -> None:
    """SemiFL's two passes of WRN-10-1; stacked norms without their rule would make it 250."""
    step = script.step_of(clients=3, images=4, side=8, device="cpu", small=True)
    step()
    with Operators() as counted:  # type: ignore[no-untyped-call]
        step()
    assert counted.number <= 196


@pytest.mark.parametrize("queued", [False, True])
def test_the_phases_of_a_round_hold_all_of_its_operators(
    script: Any, queued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked clients train in queues where a GPU records their steps."""
    monkeypatch.setattr(stack_memory, "KIND", "cpu" if queued else "cuda")
    counted = Operators()  # type: ignore[no-untyped-call]
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


def test_the_kernels_of_a_round_are_listed_by_time(script: Any) -> None:
    for _, measure in script.kernels("cpu", True):
        everything, *each = [row.split(" ms|") for row in measure().splitlines()]
        times = [float(time) for time, _ in each]
        assert times == sorted(times, reverse=True)
        assert 0.8 * float(everything[0]) < sum(times)
        assert any("convolution" in name for _, name in each)


def test_every_limit_is_measured_at_small_size(script: Any) -> None:
    limits = [(case[0], measure) for case, measure in script.limits("cpu", True) if case[0] != "launch"]
    units = [measure().split()[1] for name, measure in limits if "32 to 32" in name or "convol" not in name]
    assert sorted(units) == 3 * ["TFLOP/s"] + (2 + 2 * 2) * ["ms"]
