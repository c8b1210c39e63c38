from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import FedRGD
from lightning_fedssl.callbacks import GradientDiversity
from lightning_fedssl.callbacks.gradient_diversity import diversities
from lightning_fedssl.functional.diversity import GradientSum, merged, sum_gradients
from lightning_fedssl.models import CNN
from tests.test_fedmatch import toy_fedmatch
from tests.test_fedswitch import toy_fedswitch
from tests.test_semi_sfl import toy_semi_sfl
from tests.test_trainer import labeled_clients, toy_fedavg
from tests.toy import ToyData, assert_same, sgd, toy_trainer, weights

ORTHOGONAL = sum_gradients(torch.eye(2))


@pytest.mark.parametrize(
    ("norm", "squared", "value"),
    [("l2", True, 1.0), ("l2", False, math.sqrt(2)), ("l1", True, 0.5), ("l1", False, 1.0)],
)
def test_two_orthogonal_gradients(norm: Any, squared: bool, value: float) -> None:
    """Squared L2: (1 + 1) / 2; L2: 2 / sqrt 2; squared L1: (1 + 1) / 2^2; L1: 2 / 2 (for unit vectors)."""
    assert ORTHOGONAL.diversity(norm, squared=squared) == pytest.approx(value)


def test_form_of_the_authors_code_is_n_times_as_large() -> None:
    assert ORTHOGONAL.diversity_of_means() == pytest.approx(2)
    assert ORTHOGONAL.diversity_of_means(squared=False) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("n", [1, 3, 10])
def test_equal_gradients(n: int) -> None:
    """n ||g||^2 / ||n g||^2 = 1 / n."""
    total = sum_gradients(torch.tensor([[3.0, -4.0]]).expand(n, 2))
    assert total.diversity() == pytest.approx(1 / n)
    assert total.diversity(squared=False) == pytest.approx(1)
    assert total.diversity_of_means() == pytest.approx(1)


def test_sums_of_parts_are_the_sum_of_all_and_the_parts_stay() -> None:
    g = torch.randn(7, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [sum_gradients(g[:3]), sum_gradients(g[3:]), GradientSum()]
    before = [None if p.total is None else p.total.clone() for p in parts]
    both = merged(parts)
    expected = g.square().sum() / g.sum(0).square().sum()
    assert both.diversity() == pytest.approx(float(expected))
    assert both.diversity("l1") == pytest.approx(float(g.abs().sum(1).square().sum() / g.sum(0).abs().sum() ** 2))
    for part, total in zip(parts, before, strict=True):
        assert (part.total is None) == (total is None)
        assert total is None or torch.equal(part.total, total)  # type: ignore[arg-type]


def test_a_sum_keeps_no_gradient() -> None:
    g = torch.ones(3)
    total = sum_gradients([g])
    g.zero_()
    assert total.total is not None
    assert total.total.tolist() == [1, 1, 1]


def test_cancelling_gradients_are_infinitely_diverse_and_none_is_an_error() -> None:
    assert sum_gradients(torch.tensor([[1.0], [-1.0]])).diversity() == math.inf
    with pytest.raises(ValueError, match="at least one gradient"):
        GradientSum().diversity()


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


def toy_rgd(**kwargs: Any) -> FedRGD:
    defaults: dict[str, Any] = {
        "network": partial(CNN, width=4, norm="batch"),
        "optimizer": sgd,
        "threshold": 0.34,
        "local_steps": 3,
        "num_classes": 3,
        "in_shape": (1, 8, 8),
    }
    return FedRGD(**defaults | kwargs)


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


def test_only_every_nth_round_is_measured(tmp_path: Path) -> None:
    trainer, _ = fitted(tmp_path, GradientDiversity(every_n_rounds=3))
    assert not any(name.startswith("diversity/") for name in trainer.callback_metrics)
    with pytest.raises(ValueError, match="every_n_rounds is 0"):
        GradientDiversity(every_n_rounds=0)


def test_measuring_leaves_a_client_s_teacher_alone(tmp_path: Path) -> None:
    """The local teacher of FedSwitch follows every step of a client, and so would those of the measurement."""
    make = partial(toy_fedswitch, source="teacher", client_teacher_decay=0.5)
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
