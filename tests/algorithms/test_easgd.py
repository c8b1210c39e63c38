from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import EASGD, OverlapSGD
from lightning_fedssl.state import ClientUpdate, ServerState
from tests.algorithms.helpers import toy_easgd
from tests.algorithms.test_fedrgd import start_round
from tests.toy import Line, assert_same, labeled_clients, toy_trainer


def after(algorithm: EASGD, *rounds: dict[int, float]) -> tuple[float, list[float]]:
    """The centre and the weights of the slots after rounds in which these weights came back."""
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm)
    for number, values in enumerate(rounds, start=1):
        start_round(algorithm, list(values), number)
        updates = [
            ClientUpdate(c, {name: torch.full((1,), v) for name in algorithm.server.parameters}, {}, 9, 1)
            for c, v in values.items()
        ]
        algorithm.aggregate(algorithm.accumulate(updates))
    slots = [float(algorithm.broadcast(c)["network.w"]) for c in rounds[-1]]
    return float(algorithm.server.parameters["network.w"]), slots


def line(kind: Any, z: float, **kwargs: Any) -> EASGD:
    algorithm: EASGD = kind(network=lambda: Line(z, z), num_classes=2, in_shape=(1, 4, 4), **kwargs)
    return algorithm


def test_elastic_step_by_hand() -> None:
    """z = 10, x = 2 and 4, a = 0.25: x <- 4 and 5.5, z <- 10 - 0.25 (8 + 6)."""
    centre, slots = after(line(EASGD, 10.0, alpha=0.25), {7: 2.0, 3: 4.0})
    assert [centre, *slots] == pytest.approx([6.5, 4, 5.5])


def test_moving_rate_is_0_9_over_c_if_left_out() -> None:
    """a = 0.9 / 3 = 0.3: x = 1 - 0.3 (1 - 0), z = 0 + 0.3 * 3."""
    centre, slots = after(line(EASGD, 0.0), {0: 1.0, 1: 1.0, 2: 1.0})
    assert centre == pytest.approx(0.9)
    assert slots == pytest.approx([0.7] * 3)


def test_overlap_steps_by_hand() -> None:
    """a = 0.5, b = 0.5: x = 2 and 4 about z = 10 become 6 and 7, v = -3.5, z = 6.5; then x = 4.5: 5.5, v = -2.75."""
    first = {7: 2.0, 3: 4.0}
    for rounds, expected in (((first,), [6.5, 6, 7]), ((first, {7: 4.5, 3: 4.5}), [6.5 - 2.75, 5.5, 5.5])):
        centre, slots = after(line(OverlapSGD, 10.0, alpha=0.5, beta=0.5), *rounds)
        assert [centre, *slots] == pytest.approx(expected)


@pytest.mark.parametrize("kind", [EASGD, OverlapSGD])
def test_users_learn_and_slots_stay_apart(tmp_path: Path, kind: Any) -> None:
    algorithm = toy_easgd(kind)
    trainer = toy_trainer(tmp_path, max_rounds=8, clients_per_round=4)
    trainer.fit(algorithm, labeled_clients())
    assert float(trainer.callback_metrics["test/accuracy"]) > 0.8
    kept = [algorithm.clients.get(slot, "weights") for slot in range(4)]
    assert any(not torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert_same({n: t for n, t in algorithm.broadcast(list(algorithm.slot_of)[2]).items() if n in kept[2]}, kept[2])
