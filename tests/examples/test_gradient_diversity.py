from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples.diagnostics.gradient_diversity import GradientDiversity, diversities, sum_gradients

from tests.algorithms.helpers import toy_fedmatch, toy_fedswitch, toy_rgd, toy_semi_sfl
from tests.toy import ToyData, assert_same, labeled_clients, toy_fedavg, toy_trainer, weights


def test_all_kinds_with_one_server_for_both_groups() -> None:
    """Users (1,0) and (0,1) in a group each, the server (1,1)."""
    groups = [sum_gradients(row[None]) for row in torch.eye(2)]
    found = diversities(groups, [sum_gradients(torch.ones(1, 2))])
    assert len(found) == 8 + 2
    assert found["l2_squared"] == pytest.approx(1)
    assert found["l2_squared_with_server"] == pytest.approx(4 / 8)
    assert found["l1_with_server"] == pytest.approx(4 / 4)
    assert found["of_means"] == pytest.approx(3 * 4 / 8)
    assert found["of_means_in_groups"] == pytest.approx(2 * 3 / 5)
    assert len(diversities(groups, [])) == 4 + 2
    assert diversities([], []) == {}


def test_a_group_without_clients_leaves_each_server_in_its_group() -> None:
    """Of two groups with a server each, the second has the only user, who goes as its server does."""
    callback, logged = GradientDiversity(), dict[str, float]()
    trainer: Any = SimpleNamespace(round_index=1, gather=lambda value: [value], log=logged.__setitem__)
    callback.on_round_start(trainer, toy_rgd())
    callback._servers["update"] = [sum_gradients(row[None]) for row in torch.eye(2)]
    callback._clients["update"][1].add(torch.eye(2)[1])
    callback.on_aggregate(trainer, toy_rgd())
    assert logged["diversity/update_of_means_in_groups"] == pytest.approx(1)
    assert logged["diversity/update_of_means"] == pytest.approx(3 * 3 / 5)


def fitted(tmp_path: Path, *callbacks: Any, make: Any = toy_rgd, data: Any = ToyData, **kwargs: Any) -> tuple[Any, Any]:
    algorithm = make()
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=4, callbacks=list(callbacks), **kwargs)
    trainer.fit(algorithm, data())
    return trainer, algorithm


def test_measuring_changes_nothing_and_logs_every_kind(tmp_path: Path) -> None:
    _, plain = fitted(tmp_path / "plain")
    trainer, measured = fitted(tmp_path / "measured", GradientDiversity("both"))
    assert_same(weights(plain), weights(measured))
    found = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("diversity/")}
    assert len(found) == 20
    assert all(value > 0 for value in found.values())
    for source in ("update", "gradient"):
        name = f"diversity/{source}"
        assert found[f"{name}_of_means"] == pytest.approx(5 * found[f"{name}_l2_squared_with_server"])
        assert found[f"{name}_of_means"] >= 1
        assert found[f"{name}_of_means_in_groups"] >= 1


def test_update_of_one_plain_step_points_along_the_gradient_on_all_data(tmp_path: Path) -> None:
    """With one step on all images of a client the update is minus eta times the gradient: equal diversity."""
    plain = partial(torch.optim.SGD, lr=0.01)
    make = partial(toy_fedavg, optimizer=plain)
    data = partial(labeled_clients, client_batch_size=1000, weak="none")
    trainer, _ = fitted(tmp_path, GradientDiversity("both"), make=make, data=data, precision="64-true")
    found = trainer.callback_metrics
    for kind in ("l2_squared", "l2", "l1_squared", "l1"):
        a, b = (float(found[f"diversity/{source}_{kind}"]) for source in ("update", "gradient"))
        assert a == pytest.approx(b, rel=1e-6)
    assert not any("with_server" in name for name in found)


def test_measuring_leaves_a_client_s_teacher_alone(tmp_path: Path) -> None:
    """The local teacher of FedSwitch follows every step of a client, and so would those of the measurement."""
    make = partial(toy_fedswitch, beta=0, client_teacher_decay=0.5)
    _, plain = fitted(tmp_path / "plain", make=make)
    trainer, measured = fitted(tmp_path / "measured", GradientDiversity("gradient"), make=make)
    assert_same(weights(plain), weights(measured))
    assert float(trainer.callback_metrics["diversity/gradient_l2_squared"]) > 0


def test_a_server_that_trains_other_weights_than_the_clients_send_is_left_out(tmp_path: Path) -> None:
    """With labels at the server, FedMatch's clients send psi, and the server trains sigma."""
    trainer, _ = fitted(tmp_path, GradientDiversity(), make=toy_fedmatch)
    found = [name for name in trainer.callback_metrics if name.startswith("diversity/")]
    assert "diversity/update_l2_squared" in found
    assert not any("with_server" in name for name in found)


def test_split_learning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="clients of SemiSFL train the lower layers and the server the others: leave"):
        fitted(tmp_path, GradientDiversity(), make=toy_semi_sfl)
