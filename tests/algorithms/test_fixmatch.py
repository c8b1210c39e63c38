"""FedAvg and FedProx with FixMatch at the clients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.algorithms import FixMatch, Supervised
from lightning_fedssl.models import CNN
from tests.algorithms.helpers import LabeledSteps, fitted, mixed_clients, plain_sgd, started, toy_fixmatch
from tests.toy import ToyData, assert_same, sgd, toy_fedavg, weights

# The loss.


def test_loss_by_hand() -> None:
    """lambda_s = 10, lambda_u = 1/2; the threshold lies between the 4th and 5th of 10 confidences, so 6 are kept."""
    algorithm = toy_fixmatch(labeled_weight=10.0, unlabeled_weight=0.5, unlabeled_ratio=2)
    work, _ = started(algorithm, mixed_clients())
    batch = work.batch(0)
    assert {name: len(t) for name, t in batch.items()} == {"x_weak": 10, "x_strong": 10, "x": 5, "y": 5}
    p, labels = algorithm(batch["x_weak"]).softmax(dim=1).max(dim=1)
    algorithm.threshold = float(p.detach().sort().values[3:5].mean())
    kept = F.cross_entropy(algorithm(batch["x_strong"]), labels, reduction="none")[p >= algorithm.threshold]
    assert len(kept) == 6
    expected = 10 * F.cross_entropy(algorithm(batch["x"]), batch["y"]) + 0.5 * kept.sum() / 10
    torch.testing.assert_close(algorithm.training_step(batch, 0), expected)


def test_without_a_confident_image_the_unlabelled_loss_and_its_gradient_are_zero() -> None:
    algorithm = toy_fixmatch(threshold=1.0)
    work, _ = started(algorithm, ToyData())
    loss = algorithm.training_step(work.batch(0), 0)
    assert loss is not None
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in algorithm.parameters())


def test_labels_get_no_gradient() -> None:
    algorithm = toy_fixmatch(threshold=0.0)
    work, _ = started(algorithm, ToyData())
    batch = dict(work.batch(0))
    batch["x_weak"].requires_grad_()
    batch["x_strong"].requires_grad_()
    loss = algorithm.training_step(batch, 0)
    assert loss is not None
    loss.backward()
    assert batch["x_weak"].grad is None or not batch["x_weak"].grad.any()
    assert batch["x_strong"].grad is not None
    assert batch["x_strong"].grad.any()


def test_labels_of_an_evaluation_pass_use_running_statistics_and_leave_them() -> None:
    same = [toy_fixmatch(label_mode=mode) for mode in ("train", "eval")]
    other = [toy_fixmatch(label_mode=mode, network=partial(CNN, width=4, norm="batch")) for mode in ("train", "eval")]
    losses: list[Any] = []
    for algorithm in (*same, *other):
        work, _ = started(algorithm, ToyData())
        algorithm.train()
        before = [b.clone() for b in algorithm.buffers()]
        losses.append(loss := algorithm.training_step(work.batch(0), 0))
        assert loss is not None
        assert algorithm.training
    torch.testing.assert_close(losses[0], losses[1])
    assert not torch.allclose(losses[2], losses[3], atol=1e-4)
    batch = work.batch(0)
    expected = before[0].lerp(algorithm.network.convs[0](batch["x_strong"]).mean((0, 2, 3)), 0.1)  # type: ignore[index,operator]
    torch.testing.assert_close(next(algorithm.buffers()), expected)


# What a client does.


def test_epochs_go_over_the_unlabelled_images_and_labelled_ones_are_repeated() -> None:
    work, local = started(toy_fixmatch(client_epochs=2), mixed_clients())
    sizes = [len(batch["x_weak"]) for batch in work]
    assert sum(sizes) == 2 * len(local.unlabeled)
    assert all(len(batch["x"]) == min(5, len(local.labeled)) for batch in work)
    assert work.num_samples == len(local.labeled) + len(local.unlabeled)
    fixed, _ = started(toy_fixmatch(client_steps=9, server_steps=4), ToyData())
    assert [len(batch["x_strong"]) for batch in fixed] == [5] * 9


def test_server_takes_its_steps_on_the_view_that_is_asked_for() -> None:
    algorithm = toy_fixmatch(server_steps=4, server_view="strong")
    _, local = started(algorithm, ToyData())
    views = replace(local.views, weak=lambda images, keys: torch.zeros(0), strong=local.views.plain)
    server = replace(local, party=-1, labeled=local.unlabeled[:12], labels=torch.zeros(12).long(), views=views)
    assert [len(batch["x"]) for batch in algorithm.on_server_start(server)] == [5] * 4
    torch.testing.assert_close(
        algorithm.server_training_step(batch := algorithm.on_server_start(server).batch(0), 0),
        F.cross_entropy(algorithm(batch["x"]), batch["y"]),
    )


# Reductions.


@pytest.mark.parametrize("prox_mu", [0.0, 0.5])
def test_without_weight_of_the_unlabelled_images_it_is_fedavg_or_fedprox_on_the_labels(
    tmp_path: Path, prox_mu: float
) -> None:
    settings: dict[str, Any] = {"prox_mu": prox_mu, "optimizer": plain_sgd, "client_weighting": "uniform"}
    ours = fitted(tmp_path, toy_fixmatch(unlabeled_weight=0.0, client_steps=7, **settings), mixed_clients())
    like = LabeledSteps(**dict(toy_fedavg(**settings).hparams))
    plain = fitted(tmp_path, like, mixed_clients())
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


def test_proximal_term_holds_clients_back(tmp_path: Path) -> None:
    start = toy_fixmatch()
    start.configure_model()
    begun = {f"network.{name}": p.double() for name, p in start.network.named_parameters()}
    moved = []
    for mu in (0.0, 15.0):
        algorithm = toy_fixmatch(prox_mu=mu, server_epochs=0, optimizer=plain_sgd, threshold=0.0)
        after = fitted(tmp_path, algorithm, ToyData(), max_rounds=1)
        moved.append(sum(float((after[name] - p.detach()).norm()) for name, p in begun.items()))
    assert moved[0] > 2 * moved[1] > 0


def test_with_nothing_confident_only_the_server_learns(tmp_path: Path) -> None:
    """The same for every place of the server's phase, with plain SGD without decay."""
    common: dict[str, Any] = {"threshold": 1.0, "optimizer": plain_sgd, "client_steps": 2}
    results = {
        phase: fitted(tmp_path, toy_fixmatch(server_phase=phase, **common), ToyData(), max_rounds=1)
        for phase in ("after", "before", "parallel")
    }
    start = toy_fixmatch()
    start.configure_model()
    for name, p in start.network.named_parameters():
        after, parallel = results["after"][f"network.{name}"], results["parallel"][f"network.{name}"]
        torch.testing.assert_close(parallel - p.double(), 0.5 * (after - p.double()), rtol=0, atol=1e-12)


def test_a_parallel_server_with_all_the_weight_is_the_supervised_bound(tmp_path: Path) -> None:
    """Weights and batch-norm statistics."""
    common: dict[str, Any] = {
        "network": partial(CNN, width=4, norm="batch"), "optimizer": sgd, "num_classes": 3, "in_shape": (1, 8, 8),
        "server_epochs": 2, "keep_server_optimizer": True,
    }  # fmt: skip
    bound = fitted(tmp_path, Supervised(**common), ToyData())
    parallel = fitted(tmp_path, FixMatch(server_phase="parallel", server_weight=1.0, **common), ToyData())
    assert_same(bound, parallel)


def test_one_client_with_all_images_is_fixmatch_on_pooled_data(tmp_path: Path) -> None:
    """With one client and persistent momentum, rounds give the same model as training without rounds."""
    data = mixed_clients(num_clients=1)
    algorithm = toy_fixmatch(keep_client_optimizer=True)
    fitted(tmp_path, algorithm, data, clients_per_round=1, max_rounds=2)
    alone = toy_fixmatch()
    alone.configure_model()
    alone.double()
    optimizer = sgd(alone.parameters())
    for round_ in (1, 2):
        for step, batch in enumerate(alone.on_client_start(data.local_data(0, round_, torch.float64))):
            optimizer.zero_grad()
            loss = alone.training_step(batch, step)
            assert loss is not None
            loss.backward()
            optimizer.step()
    for name, p in alone.named_parameters():
        torch.testing.assert_close(weights(algorithm)[name], p.detach(), rtol=0, atol=1e-12)
