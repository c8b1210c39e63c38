"""Fed-SHVR: its rules by hand, its invariants, its ablations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.diagnostics.shvr_objective import client_labels, unlabeled_losses
from torch import Tensor, nn

from lightning_fedssl.algorithms import FedSHVR
from lightning_fedssl.algorithms.common.labeled_unlabeled import Ramp
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data import LocalData, Views
from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.functional.losses import kl_from_uniform, kl_to_uniform
from lightning_fedssl.functional.pseudo_labels import sharpen
from lightning_fedssl.local_work import LocalWork, local_steps, paired_work
from lightning_fedssl.state import ClientUpdate, ServerState
from tests.algorithms.helpers import Given, fitted, plain_sgd, started, toy_shvr, uneven_clients
from tests.toy import ToyData, assert_same, toy_fedavg, toy_round, toy_trainer

# The rules, by hand.


class Scalar(nn.Module):
    """One weight; the logits do not matter here."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))


def scalar_algorithm(value: float, **kwargs: Any) -> FedSHVR:
    algorithm = FedSHVR(network=lambda: Scalar(value), **kwargs)
    algorithm.network = Scalar(value)
    algorithm.server = ServerState.from_module(algorithm)
    return algorithm


def send(
    algorithm: FedSHVR, results: dict[int, float], taus: dict[int, int], sizes: dict[int, int], eta: float
) -> None:
    """One round's end, with these weights coming back."""
    algorithm.current_round = toy_round(client_lr=eta)
    updates = [
        ClientUpdate(k, {"network.w": torch.tensor(w, dtype=torch.float64)}, {}, sizes[k], taus[k])
        for k, w in results.items()
    ]
    algorithm.aggregate(algorithm.accumulate(map(algorithm.on_client_end, updates)))


def theta(algorithm: FedSHVR) -> float:
    return algorithm.server.parameters["network.w"].item()


def d_of(algorithm: FedSHVR, client: int) -> float:
    kept = algorithm.control(client)
    return kept["network.w"].item() if kept else 0.0


def test_scalar_round_by_hand() -> None:
    """From theta = 1 with weights 1/2 and tau = 2, 4, so tau_bar = 3, to 0.8 and 0.4.

    Eq. 14: 1 - 3 (0.2 / 2 + 0.6 / 4) / 2 = 0.625. Eq. 15: d_1 = 0.375 / (0.1 * 3) - 0.2 / (0.1 * 2) = 0.25, and
    d_2 = 1.25 - 0.6 / (0.1 * 4) = -0.25. The plain mean is (0.8 + 0.4) / 2 = 0.6.
    """
    algorithm = scalar_algorithm(1.0)
    send(algorithm, {1: 0.8, 2: 0.4}, {1: 2, 2: 4}, {1: 10, 2: 10}, eta=0.1)
    assert theta(algorithm) == pytest.approx(0.625, abs=1e-15)
    assert d_of(algorithm, 1) == pytest.approx(0.25, abs=1e-14)
    assert d_of(algorithm, 2) == pytest.approx(-0.25, abs=1e-14)
    assert algorithm.clients.with_state("mean_step") == []
    plain = scalar_algorithm(1.0, averaging="plain")
    send(plain, {1: 0.8, 2: 0.4}, {1: 2, 2: 4}, {1: 10, 2: 10}, eta=0.1)
    assert theta(plain) == pytest.approx(0.6, abs=1e-15)


def test_equal_steps_give_the_weighted_mean() -> None:
    """0.1 * 0.8 + 0.3 * 0.5 + 0.6 * 0.1, with weights by the sizes 10, 30 and 60."""
    algorithm = scalar_algorithm(1.0)
    send(algorithm, {0: 0.8, 1: 0.5, 2: 0.1}, {0: 7, 1: 7, 2: 7}, {0: 10, 1: 30, 2: 60}, eta=0.1)
    assert theta(algorithm) == pytest.approx(0.08 + 0.15 + 0.06, abs=1e-14)


def test_absent_clients_keep_their_correction_and_all_corrections_still_cancel() -> None:
    algorithm, sizes = scalar_algorithm(1.0), {0: 1, 1: 2, 2: 3}
    send(algorithm, {0: 0.8, 1: 0.5, 2: 0.1}, {0: 3, 1: 5, 2: 9}, sizes, eta=0.1)
    before = d_of(algorithm, 1)
    send(algorithm, {0: 0.3, 2: -0.1}, {0: 3, 2: 9}, sizes, eta=0.1)
    assert d_of(algorithm, 1) == before
    assert sum(sizes[k] * d_of(algorithm, k) for k in sizes) == pytest.approx(0, abs=1e-13)


def test_without_an_update_nothing_changes() -> None:
    algorithm = scalar_algorithm(1.0)
    algorithm.aggregate({"model": WeightedSum()})
    assert (theta(algorithm), len(algorithm.clients)) == (1.0, 0)


CURVATURES, CENTERS, STEPS = (1.0, 0.5, 2.0), (1.0, -2.0, 4.0), {0: 2, 1: 5, 2: 9}


@pytest.mark.parametrize(
    ("options", "rest"),
    [
        ({}, 2.8889),
        ({"control_variate": False}, 2.5848),
        ({"control_variate": False, "averaging": "plain"}, 3.2460),
        ({"averaging": "plain"}, 3.4384),
    ],
    ids=["Fed-SHVR", "Fed-SH", "plain mean", "Fed-SVR"],
)
def test_rest_point_of_three_quadratic_clients(options: dict[str, Any], rest: float) -> None:
    """Clients ``c (x - m)^2 / 2``: only Fed-SHVR converges to the minimum of their weighted sum."""
    algorithm, eta, sizes = scalar_algorithm(0.0, **options), 0.05, {0: 20, 1: 30, 2: 50}
    for _ in range(3000):
        results = {}
        for k, (c, m) in enumerate(zip(CURVATURES, CENTERS, strict=True)):
            x = theta(algorithm)
            for _ in range(STEPS[k]):
                x -= eta * (c * (x - m) + d_of(algorithm, k))
            results[k] = x
        send(algorithm, results, STEPS, sizes, eta)
    assert theta(algorithm) == pytest.approx(rest, abs=5e-5)


# Labels and losses.

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)


def test_soft_labels_by_hand() -> None:
    """0.7^(4/3) = 0.6215, 0.2^(4/3) = 0.1170 and 0.1^(4/3) = 0.0464, divided by their sum 0.7849."""
    logits = PROBABILITIES.log()
    expected = torch.tensor([[0.7919, 0.1490, 0.0591]], dtype=torch.float64)
    torch.testing.assert_close(sharpen(logits, 1.0, 0.75), expected, atol=5e-5, rtol=0)
    assert torch.equal(sharpen(logits, 1.0, 0.0), torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(sharpen(logits, 0.0, 0.75), torch.full_like(logits, 1 / 3))
    torch.testing.assert_close(sharpen(logits, 0.75, 0.75), PROBABILITIES)
    large = sharpen(torch.tensor([[3e4, -3e4, 0.0], [1.0, 2.0, 3.0]]), 5.0, 0.01)
    assert torch.isfinite(large).all()
    torch.testing.assert_close(large.sum(dim=1), torch.ones(2))


@pytest.mark.parametrize(("divergence", "expected"), [(kl_to_uniform, 0.2968), (kl_from_uniform, 0.3243)])
def test_r2_by_hand(divergence: Callable[[Tensor], Tensor], expected: float) -> None:
    """KL(f, u) = log 3 - 0.8018, the entropy of f; KL(u, f) = -log(0.7 * 0.2 * 0.1) / 3 - log 3."""
    assert divergence(PROBABILITIES.log()).item() == pytest.approx(expected, abs=5e-5)
    uniform = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    penalty = divergence(uniform).sum()
    penalty.backward()
    assert penalty.item() == pytest.approx(0, abs=1e-15)
    assert uniform.grad is not None
    assert uniform.grad.abs().max() < 1e-15


@pytest.mark.parametrize("r2", ["from_uniform", "to_uniform"])
def test_loss_of_a_batch_is_the_sum_of_its_three_terms(r2: Any) -> None:
    algorithm = toy_shvr(alpha0=0.6, alpha2=0.3, r2=r2)
    work, _ = started(algorithm, uneven_clients())
    batch = work.batch(0)
    x, u = algorithm(batch["x"]), algorithm(batch["u"])
    p, uniform = u.softmax(dim=1), torch.full_like(u, 1 / 3)
    first, second = (uniform, p) if r2 == "from_uniform" else (p, uniform)
    by_hand = (
        -x.log_softmax(dim=1)[torch.arange(len(x)), batch["y"]].mean()
        - 0.6 * (batch["v"] * u.log_softmax(dim=1)).sum(dim=1).mean()
        + 0.3 * (first * (first / second).log()).sum(dim=1).mean()
    )
    torch.testing.assert_close(algorithm.training_step(batch, 0), by_hand)


def test_alpha1_acts_through_the_labels_alone() -> None:
    """r_1 has no gradient in the weights: with v held fixed, alpha_1 changes nothing."""
    algorithm = toy_shvr()
    work, local = started(algorithm, uneven_clients())
    batch = work.batch(0)

    def gradient() -> list[Tensor]:
        loss = algorithm.training_step(batch, 0)
        assert loss is not None
        return list(torch.autograd.grad(loss, list(algorithm.parameters())))

    before = gradient()
    algorithm.alpha1 = 0.2
    assert all(torch.equal(a, b) for a, b in zip(before, gradient(), strict=True))
    assert not torch.equal(client_labels(algorithm, local, 1)[:5], batch["v"][:5])


def test_labels_are_those_of_the_received_model_for_the_whole_round() -> None:
    algorithm = toy_shvr(alpha1=0.5)
    work, local = started(algorithm, uneven_clients())
    assert work.pseudo_labels is not None
    algorithm.eval()
    f = algorithm(local.plain(local.unlabeled)).softmax(dim=1)
    torch.testing.assert_close(work.pseudo_labels.labels, f**2 / (f**2).sum(dim=1, keepdim=True))
    known = {tuple(image.flatten().tolist()): v for image, v in zip(
        local.plain(local.unlabeled), work.pseudo_labels.labels, strict=True)}  # fmt: skip
    data_views = replace(local, views=Views(local.views.plain, local.views.plain, local.views.plain))
    for batch in algorithm.on_client_start(data_views):
        for image, v in zip(batch["u"], batch["v"], strict=True):
            assert torch.equal(known[tuple(image.flatten().tolist())], v)


def test_eq_8_takes_the_final_alpha_0_while_the_ramp_grows_or_the_one_of_the_round() -> None:
    """With the ramped one labels are flatter than the model that made them until alpha_0 reaches alpha_1."""
    settings: dict[str, Any] = {"alpha0": 1.0, "alpha1": 0.8, "ramp_epochs": 10}
    for kind, exponents in (("final", [0.0, 1.25, 1.25]), ("ramped", [0.0, 0.5, 1.25])):
        algorithm = toy_shvr(label_alpha0=kind, **settings)
        _, local = started(algorithm, uneven_clients())
        logits = algorithm.eval()(local.plain(local.unlabeled))
        for round_index, exponent in zip((1, 3, 6), exponents, strict=True):  # two local epochs a round
            labels = client_labels(algorithm, local, round_index)
            torch.testing.assert_close(labels, (exponent * logits).softmax(dim=1).to(labels.dtype))


@pytest.mark.parametrize("alpha1", [0.75, 0.0])
def test_labels_made_at_each_step_are_those_of_the_model_in_training(alpha1: float) -> None:
    algorithm = toy_shvr(label_refresh="step", alpha0=0.6, alpha1=alpha1, alpha2=0.0)
    work, _ = started(algorithm, uneven_clients())
    with torch.no_grad():
        next(algorithm.parameters()).add_(1.0)  # as if steps had been taken
    batch = work.batch(0)
    logits = algorithm(batch["u"])
    labels = nn.functional.one_hot(logits.argmax(dim=1), 3) if alpha1 == 0 else (0.8 * logits).softmax(dim=1).detach()
    unlabeled = -(labels * logits.log_softmax(dim=1)).sum(dim=1).mean()
    of_labeled = nn.functional.cross_entropy(algorithm(batch["x"]), batch["y"])
    torch.testing.assert_close(algorithm.training_step(batch, 0), of_labeled + 0.6 * unlabeled)


# Steps and draws.


def data_of(labeled: int, unlabeled: int, batch_size: int = 32) -> LocalData:
    def view(images: Tensor, keys: Tensor) -> Tensor:
        return images.float()

    count = labeled + unlabeled
    images = torch.arange(count, dtype=torch.int32).reshape(count, 1, 1, 1)
    rows = torch.arange(count)
    views = Views(view, view, view)
    labels = torch.zeros(labeled, dtype=torch.int64)
    return LocalData(3, 1, 0, images, rows[:labeled], labels, rows[labeled:], batch_size, views)


@pytest.mark.parametrize(
    ("labeled", "unlabeled", "steps"), [(60, 5940, 371), (60, 0, 3), (0, 5940, 371), (5, 3, 1), (0, 0, 0)]
)
def test_number_of_steps_comes_from_the_larger_set(labeled: int, unlabeled: int, steps: int) -> None:
    assert local_steps(data_of(labeled, unlabeled), 2) == steps


def test_batches_are_drawn_without_repetition_and_anew_for_each_step() -> None:
    data = data_of(60, 300)
    batches = list(paired_work(data, 40, unlabeled=lambda rows, steps: {"row": rows, "step": steps}))
    assert len(batches) == 40
    for step, batch in enumerate(batches):
        for name in ("x", "u"):
            assert batch[name].shape == (32, 1, 1, 1)
            assert len(batch[name].unique()) == 32
        assert torch.equal(batch["step"], torch.full((32,), step))
        assert torch.equal(data.unlabeled[batch["row"]], batch["u"].flatten().long())
    assert len(torch.cat([batch["u"] for batch in batches]).unique()) > 280
    assert not torch.equal(batches[0]["u"].sort(dim=0).values, batches[1]["u"].sort(dim=0).values)
    shorter = list(paired_work(data, 3, unlabeled=lambda rows, steps: {}))
    assert all(
        torch.equal(a["u"], b["u"]) and torch.equal(a["x"], b["x"]) for a, b in zip(shorter, batches, strict=False)
    )


def test_a_client_with_fewer_images_than_a_batch_takes_them_all() -> None:
    (batch,) = paired_work(data_of(7, 9), 1, unlabeled=lambda rows, steps: {})
    assert sorted(batch["x"].flatten().tolist()) == list(range(7))
    assert sorted(batch["u"].flatten().tolist()) == list(range(7, 16))


def test_ramp_is_the_paper_s_in_local_epochs() -> None:
    """2 (t - 1) of 50 epochs are complete before round t: 2/50, 48/50; in the second epoch of round 1 1/50."""
    ramp = Ramp(final=1.0, epochs=50)
    assert [ramp.values(t, 2, 371)[0].item() for t in (1, 2, 25, 26, 90)] == pytest.approx([0, 0.04, 0.96, 1, 1])
    first = ramp.values(1, 2, 370)
    assert first[:185].unique().tolist() == [0.0]
    assert first[185:].unique().tolist() == pytest.approx([0.02])
    assert Ramp(3.0, 0).values(1, 2, 4).tolist() == [3.0] * 4


# Whole runs.


class Watch(FederatedCallback):
    """Compares the corrections of all clients after every round."""

    def __init__(self, data: ToyData) -> None:
        self.data = data
        self.rounds = 0

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        sizes = [len(c.labeled) + len(c.unlabeled) for c in self.data.split.clients]
        controls = [algorithm.control(k) for k in range(len(sizes))]
        for name in algorithm.server.parameters:
            total = sum(n * d[name] for n, d in zip(sizes, controls, strict=True)) / sum(sizes)
            largest = max(float(d[name].abs().max()) for d in controls)
            assert largest > 0
            assert float(total.abs().max()) < 1e-11 * max(largest, 1)
        self.rounds += 1


def test_one_client_is_local_sgd(tmp_path: Path) -> None:
    algorithm = toy_shvr()
    alone = fitted(tmp_path, algorithm, uneven_clients(num_clients=1))
    assert all(float(d.abs().max()) < 1e-12 for d in algorithm.control(0).values())
    sgd_alone = fitted(tmp_path, toy_shvr(control_variate=False, averaging="plain"), uneven_clients(num_clients=1))
    for name, value in alone.items():
        torch.testing.assert_close(value, sgd_alone[name], rtol=0, atol=1e-10)


class LikeFedAvg(FedSHVR):
    """Goes over the labelled images in epochs, as FedAvg does."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        from lightning_fedssl.local_work import labeled_work

        return labeled_work(data, self.client_epochs)


def test_without_unlabelled_terms_and_corrections_it_is_fedavg_on_the_labels(tmp_path: Path) -> None:
    data = partial(ToyData, num_labels="all", label_location="clients")
    settings: dict[str, Any] = {"optimizer": plain_sgd, "client_epochs": 2}
    fedavg = fitted(tmp_path, toy_fedavg(**settings), data())
    none = {"alpha0": 0.0, "alpha2": 0.0, "control_variate": False}
    like = LikeFedAvg(**dict(toy_shvr(averaging="plain", **none).hparams) | settings)
    for name, value in fitted(tmp_path, like, data()).items():
        torch.testing.assert_close(value, fedavg[name], rtol=0, atol=1e-12)


def test_a_client_without_labels_sits_out_where_unlabelled_images_have_no_terms(tmp_path: Path) -> None:
    """Client 1 of the four has unlabelled images only."""
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=4)
    trainer.fit(toy_shvr(alpha0=0, alpha2=0), ToyData(label_location="clients", partition=Given()))
    assert float(trainer.callback_metrics["client/trained"]) == 3


class Poisoned(FedSHVR):
    """Client 1 sends NaN in round 2."""

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        update = super().on_client_end(update)
        if update.client == 1 and self.trainer.current_epoch == 1:
            return replace(update, parameters={n: torch.full_like(p, math.nan) for n, p in update.parameters.items()})
        return update


def test_a_refused_update_leaves_the_client_s_correction_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[dict[str, Tensor]] = []

    class Note(FederatedCallback):
        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            seen.append(algorithm.control(1))

    data = uneven_clients()
    algorithm = Poisoned(**dict(toy_shvr().hparams))
    watch = Watch(data)
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        fitted(tmp_path, algorithm, data, callbacks=[Note(), watch])
    assert "client 1 returned weights that are not finite" in caplog.text
    assert_same(seen[0], seen[1])
    assert not torch.equal(seen[1]["network.classifier.bias"], seen[2]["network.classifier.bias"])
    assert watch.rounds == 3


# Diagnostics.


def test_r2_from_uniform_in_the_step_and_in_the_objective() -> None:
    """With alpha_0 = 0 the unlabelled images' part of both is alpha_2 KL(uniform, f) alone."""
    algorithm = toy_shvr(alpha0=0, alpha2=0.3, r2="from_uniform")
    logits = torch.randn(5, 3, dtype=torch.float64)
    expected = 0.3 * torch.nn.functional.kl_div(logits.log_softmax(1), torch.full_like(logits, 1 / 3), reduction="none")
    (term,) = algorithm.unlabeled_terms(logits, {"alpha0": torch.zeros(5)})
    torch.testing.assert_close(term, expected.sum(dim=1).mean())
    uniform_labels = torch.full_like(logits, 1 / 3)  # whose r_1 is 0
    torch.testing.assert_close(unlabeled_losses(algorithm, logits, uniform_labels, 0.0), expected.sum(dim=1))


@pytest.mark.parametrize("of_vectors", [{"lr": 0.01}, {"momentum": 0.9}])
def test_groups_of_weights_for_which_eq_15_does_not_hold_are_refused(of_vectors: dict[str, float]) -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        weights = list(parameters)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in weights if p.dim() != 1]},
            {"params": [p for p in weights if p.dim() == 1], **of_vectors},
        ]
        return torch.optim.SGD(groups, lr=0.02)

    with pytest.raises(ValueError, match=r"^model\.optimizer is SGD, but .*Eq\. 15.*use SGD without momentum"):
        toy_shvr(optimizer=grouped)
    assert toy_shvr(optimizer=grouped, control_variate=False).control_variate is False
    decaying = partial(torch.optim.SGD, lr=0.1, weight_decay=1e-3)  # a part of the gradient
    assert toy_shvr(optimizer=decaying).control_variate
