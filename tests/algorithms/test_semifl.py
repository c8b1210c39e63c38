import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithms import SemiFL, Supervised
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import PseudoLabelQuality
from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.run import TrainerView
from lightning_fedssl.sampling import SERVER
from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import HandData, hand_gradient, momentum_of, started
from tests.callbacks.helpers import NoDiagnostics
from tests.toy import Line, ToyData, assert_same, toy_semifl, toy_trainer, weights


def test_two_rounds_worked_out_by_hand(tmp_path: Path) -> None:
    """A client has one image, so the mixed one is itself and L = 2 CE; the server steps once on two labels."""
    data, lr = HandData(), 0.2
    algorithm = SemiFL(
        network=lambda: Line(0.5, 0.1),
        optimizer=partial(torch.optim.SGD, lr=lr),
        threshold=0.0,
        client_epochs=1,
        server_epochs=1,
        gradient_clip_norm=None,
        num_classes=2,
        in_shape=(1, 4, 4),
    )
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=2, precision="64-true", logger=False)
    trainer.fit(algorithm, data)

    w, b, buffer_w, buffer_b = 0.5, float(torch.tensor(0.1)), 0.0, 0.0
    for _ in range(2):
        returned = []
        for client in data.split.clients:
            x = data.mean_input(int(client.unlabeled[0]))
            label = int(b > w * x)
            g_w, g_b = hand_gradient(w, b, x, label)
            returned.append((w - lr * 2 * g_w, b - lr * 2 * g_b))
        buffer_w = 0.5 * buffer_w + (w - sum(r[0] for r in returned) / 2)
        buffer_b = 0.5 * buffer_b + (b - sum(r[1] for r in returned) / 2)
        w, b = w - buffer_w, b - buffer_b
        inputs = [(data.mean_input(i), i % 2) for i in data.split.server_labeled.tolist()]
        gradients = [hand_gradient(w, b, x, y) for x, y in inputs]
        w, b = w - lr * sum(g[0] for g in gradients) / 2, b - lr * sum(g[1] for g in gradients) / 2
    assert algorithm.server.parameters["network.w"].item() == pytest.approx(w, abs=1e-12)
    assert algorithm.server.parameters["network.b"].item() == pytest.approx(b, abs=1e-12)
    assert momentum_of(algorithm)["network.w"].item() == pytest.approx(buffer_w, abs=1e-12)


@pytest.mark.parametrize("view", ["weak", "strong"])
def test_without_a_confident_image_a_round_is_fine_tuning_alone(view: Any, tmp_path: Path) -> None:
    """Clients do not train, the server momentum stays as it is, and fine-tuning still runs, in the view asked for."""
    silent = toy_semifl(threshold=1.0, server_view=view)
    toy_trainer(tmp_path, max_rounds=2).fit(silent, ToyData())
    alone = Supervised.like(silent, server_epochs=silent.server_epochs, server_view=view)
    toy_trainer(tmp_path, max_rounds=2).fit(alone, ToyData())
    assert_same(weights(silent), weights(alone))
    assert momentum_of(silent) == {}


@pytest.mark.parametrize("method", [SemiFL, Supervised])
def test_server_trains_on_the_view_that_is_asked_for(method: type[SemiFL] | type[Supervised]) -> None:
    data = ToyData()
    data.setup()
    local = data.local_data(SERVER, 1)
    local = replace(
        local,
        views=replace(local.views, weak=lambda images, keys: torch.zeros(len(images), 0), strong=local.views.plain),
    )
    algorithm = method(network=toy_semifl().network_factory, server_epochs=1, server_view="strong")
    assert [batch["x"].shape for batch in algorithm.on_server_start(local)] == [(n, 1, 8, 8) for n in (5, 5, 2)]
    algorithm = method(network=toy_semifl().network_factory, server_epochs=1)
    assert [batch["x"].shape for batch in algorithm.on_server_start(local)] == [(n, 0) for n in (5, 5, 2)]


def test_mix_set_is_as_long_as_the_fix_set_and_holds_unconfident_images() -> None:
    algorithm, data = toy_semifl(client_epochs=40), ToyData(num_clients=2)
    work, local = started(algorithm, data)
    assert work.pseudo_labels is not None
    confidences = work.pseudo_labels.confidence.sort().values
    algorithm.threshold = float(confidences[len(confidences) // 2])
    work, local = started(algorithm, data)
    pseudo = work.pseudo_labels
    assert pseudo is not None
    count = int(pseudo.mask.sum())
    assert 0 < count < len(local.unlabeled)
    batches = list(work)
    assert len(batches) == 40 * math.ceil(count / 5)
    assert work.num_samples == count
    for batch in batches:
        assert len(batch["y_mix"]) == len(batch["y_fix"]) == len(batch["ratio"])
        assert batch["ratio"].unique().numel() == 1
        assert batch["y_mix"].dtype == torch.int64
    plain = {tuple(image.flatten().tolist()): i for i, image in enumerate(local.images[local.unlabeled])}
    assert len(plain) == len(local.unlabeled)
    mixed = torch.cat([algorithm._mix_rows(local, count, epoch) for epoch in range(40)])
    assert not pseudo.mask[mixed].all()
    assert set(mixed.tolist()) == set(range(len(local.unlabeled)))
    assert torch.equal(torch.cat([b["y_mix"] for b in batches]), pseudo.labels[mixed])


def test_views_are_redrawn_each_epoch_and_labels_are_not() -> None:
    algorithm = toy_semifl(client_epochs=2, threshold=0.0)
    work, local = started(algorithm, ToyData())
    batches = list(work)
    half = len(batches) // 2
    first, second = (
        {name: torch.cat([b[name] for b in part]) for name in ("x_strong", "y_fix")}
        for part in (batches[:half], batches[half:])
    )
    assert sorted(first["y_fix"].tolist()) == sorted(second["y_fix"].tolist())
    assert first["x_strong"].shape == (len(local.unlabeled), 1, 8, 8)
    assert not torch.equal(first["x_strong"], second["x_strong"])


def test_loss_is_fix_plus_mix() -> None:
    algorithm = toy_semifl(threshold=0.0)
    work, _ = started(algorithm, ToyData())
    batch = work.batch(0)
    algorithm.train()
    ratio, x = batch["ratio"][0], batch["ratio"][0] * batch["x_weak"] + (1 - batch["ratio"][0]) * batch["x_mix"]
    logits = algorithm(x)
    fix = F.cross_entropy(algorithm(batch["x_strong"]), batch["y_fix"])
    mix = ratio * F.cross_entropy(logits, batch["y_fix"]) + (1 - ratio) * F.cross_entropy(logits, batch["y_mix"])
    torch.testing.assert_close(algorithm.training_step(batch, 0), fix + mix)
    algorithm.mix_weight = 0.0
    torch.testing.assert_close(algorithm.training_step(batch, 0), fix)


def test_mix_ratio_is_beta_distributed() -> None:
    algorithm, data = toy_semifl(), ToyData()
    data.setup()
    draws = torch.cat([algorithm._ratios(data.local_data(0, r), 50, e)[::5] for r in range(1, 41) for e in range(5)])
    assert len(draws) == 2000
    assert draws.mean().item() == pytest.approx(0.5, abs=0.03)
    assert draws.var().item() == pytest.approx(0.25 / 2.5, abs=0.01)
    assert (draws < 0.5).double().mean().item() == pytest.approx(0.5, abs=0.05)


def test_paper_variants_of_the_mix_set() -> None:
    data = ToyData()
    data.setup()
    local = data.local_data(1, 1)
    once = toy_semifl(mix_resample="round")
    first, second = once._mix_rows(local, 20, 0), once._mix_rows(local, 20, 1)
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert not torch.equal(first, second)
    each = toy_semifl()
    assert sorted(each._mix_rows(local, 20, 0).tolist()) != sorted(each._mix_rows(local, 20, 1).tolist())


@pytest.mark.parametrize("order", ["views", "images"])
def test_augmenting_the_mixed_image_uses_one_draw_for_both(order: str) -> None:
    data = ToyData(weak="flip_crop")
    work, local = started(toy_semifl(mix_order=order, threshold=0.0), data)
    one_image = replace(local, images=local.images[:1].expand(len(local.images), -1, -1, -1))
    algorithm = toy_semifl(mix_order=order, threshold=0.0)
    algorithm.configure_model()
    batch = algorithm.on_client_start(one_image).batch(0)
    assert torch.equal(batch["x_weak"], batch["x_mix"]) == (order == "images")
    assert work.num_steps


def test_soft_labels_are_probabilities(tmp_path: Path) -> None:
    algorithm = toy_semifl(soft_labels=True)
    work, local = started(algorithm, ToyData())
    assert work.pseudo_labels is not None
    assert work.pseudo_labels.labels.shape == (len(local.unlabeled), 3)
    torch.testing.assert_close(work.pseudo_labels.labels.sum(1), torch.ones(len(local.unlabeled)))
    toy_trainer(tmp_path).fit(algorithm, ToyData())
    assert float(algorithm.trainer.callback_metrics["client/loss"]) > 0


def test_local_labels_skip_a_batch_without_a_confident_image(tmp_path: Path) -> None:
    algorithm = toy_semifl(pseudo_label_source="local", threshold=1.0, mix_weight=0.0)
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(algorithm, ToyData())
    assert trainer.callback_metrics["client/mask_rate"] == 0
    assert "client/loss" not in trainer.callback_metrics
    lenient = toy_semifl(pseudo_label_source="local", threshold=0.34, mix_weight=0.0)
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(lenient, ToyData())
    assert trainer.callback_metrics["client/mask_rate"] > 0.9
    assert trainer.callback_metrics["client/loss"] > 0


def test_parallel_server_averages_half_and_half_then_steps_with_momentum() -> None:
    """W_s = 2, clients' mean 1: target 1.5, g = 0.5; the next g = 0.5 adds half of the buffer: 0.75."""
    algorithm = SemiFL(network=lambda: Line(2.0, 2.0), server_phase="parallel", num_classes=2, in_shape=(1, 4, 4))
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm)
    for expected, mean in ((1.5, 1.0), (0.75, 0.5)):
        total = WeightedSum()
        total.add({name: torch.full((1,), mean) for name in algorithm.server.parameters}, 1.0)
        algorithm.aggregate({"model": total})
        assert algorithm.server.parameters["network.w"].item() == pytest.approx(expected)


class Phases(FederatedCallback):
    """Notes the order of the phases, and the weights that each starts from."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.starts: dict[str, Tensor] = {}

    def _note(self, phase: str, algorithm: Any) -> None:
        self.seen.append(phase)
        self.starts[phase] = algorithm.network.classifier.bias.detach().clone()

    def on_server_phase_start(self, trainer: TrainerView, algorithm: Any) -> None:
        self._note("server", algorithm)

    def on_client_phase_start(self, trainer: TrainerView, algorithm: Any) -> None:
        self.seen.append("clients")

    def on_aggregate(self, trainer: TrainerView, algorithm: Any) -> None:
        self.seen.append("aggregate")

    def on_client_end(self, trainer: TrainerView, algorithm: Any, update: Any) -> None:
        self.starts["sent"] = algorithm.server.parameters["network.classifier.bias"].clone()


@pytest.mark.parametrize(
    ("phase", "one_round", "extra"),
    [
        ("after", ["clients", "aggregate", "server"], []),
        ("before", ["server", "clients", "aggregate"], ["server"]),
        ("parallel", ["clients", "aggregate", "server"], []),
    ],
)
def test_order_of_the_phases(tmp_path: Path, phase: Any, one_round: list[str], extra: list[str]) -> None:
    phases = Phases()
    toy_trainer(tmp_path, max_rounds=2, callbacks=phases).fit(toy_semifl(server_phase=phase), ToyData())
    assert phases.seen == one_round * 2 + extra
    if phase == "parallel":
        assert torch.equal(phases.starts["server"], phases.starts["sent"])


def test_diagnostics_change_no_weight(tmp_path: Path) -> None:
    loud, quiet = toy_semifl(), toy_semifl()
    trainers = [toy_trainer(tmp_path, callbacks=c) for c in (PseudoLabelQuality(), NoDiagnostics())]
    trainers[0].fit(loud, ToyData())
    trainers[1].fit(quiet, ToyData())
    assert_same(weights(loud), weights(quiet))
    assert "pseudo_label/accuracy" in trainers[0].callback_metrics
    assert "pseudo_label/accuracy" not in trainers[1].callback_metrics


def test_diagnostics_count_by_hand(tmp_path: Path) -> None:
    """Two clients of one image each, all confident: the accuracies are the share of right labels."""
    data = HandData()
    algorithm = SemiFL(network=lambda: Line(-1.0, 0.0), threshold=0.0, num_classes=2, in_shape=(1, 4, 4))
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=2)
    trainer.fit(algorithm, data)
    right = [int(data.mean_input(i) > 0) == i % 2 for c in data.split.clients for i in c.unlabeled.tolist()]
    assert float(trainer.callback_metrics["pseudo_label/accuracy"]) == pytest.approx(sum(right) / 2)
    assert float(trainer.callback_metrics["pseudo_label/confident_accuracy"]) == pytest.approx(sum(right) / 2)
    assert trainer.callback_metrics["client/images"] == 2
    assert trainer.callback_metrics["client/steps"] == 2 * algorithm.client_epochs
    assert float(trainer.callback_metrics["client/mask_rate"]) == 1.0


class Pulled(SemiFL):
    """A loss whose gradient is (3, 4) at every step, or zero."""

    gradient: tuple[float, float] = (3.0, 4.0)

    def server_training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = self.gradient
        return a * self.network.w.sum() + b * self.network.b.sum()  # type: ignore[operator]


@pytest.mark.parametrize(("gradient", "clipped"), [((0.0, 0.0), (0.0, 0.0)), ((3.0, 4.0), (0.6, 0.8))])
def test_first_step_clips_and_then_decays(
    tmp_path: Path, gradient: tuple[float, float], clipped: tuple[float, float]
) -> None:
    """Nesterov with momentum 0.9: w' = w - 0.03 * 1.9 * (clipped gradient + 5e-4 w)."""
    algorithm = Pulled(
        network=lambda: Line(0.5, 0.1),
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4),
        threshold=1.0,
        server_epochs=0.5,
    )
    algorithm.gradient = gradient
    toy_trainer(tmp_path, max_rounds=1, clients_per_round=2, precision="64-true", logger=False).fit(
        algorithm, HandData()
    )
    for name, start, pull in (("network.w", 0.5, clipped[0]), ("network.b", float(torch.tensor(0.1)), clipped[1])):
        expected = start - 0.03 * 1.9 * (pull + 5e-4 * start)
        assert algorithm.server.parameters[name].item() == pytest.approx(expected, abs=1e-7)


def test_client_momentum_is_kept_until_the_next_participation_or_reset(tmp_path: Path) -> None:
    """Momentum 1 and a gradient of 1 in one step a round: the kept buffer grows 1, 2, 3; a reset one stays 1."""

    class Unit(SemiFL):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.network.w.sum()  # type: ignore[operator]

    for keep, buffer in ((True, 3.0), (False, None)):
        algorithm = Unit(
            network=lambda: Line(0.5, 0.1),
            optimizer=partial(torch.optim.SGD, lr=0.1, momentum=1.0),
            threshold=0.0,
            client_epochs=1,
            server_epochs=0,
            aggregation_optimizer=None,
            keep_client_optimizer=keep,
        )
        toy_trainer(tmp_path, max_rounds=3, clients_per_round=2, logger=False).fit(algorithm, HandData())
        moved = 0.1 * (1 + 2 + 3 if keep else 3)
        assert algorithm.server.parameters["network.w"].item() == pytest.approx(0.5 - moved, abs=1e-6)
        kept = algorithm.clients.get(0, "optimizer")
        assert [float(t) for t in kept.values()][:1] == pytest.approx([buffer] if buffer else [], abs=1e-5)


class OneSits(SemiFL):
    """Client 1 finds no confident image after round 1."""

    def on_client_start(self, data: Any) -> LocalWork:
        work = super().on_client_start(data)
        return replace(work, num_steps=0) if data.party == 1 and data.round > 1 else work


class Returned(FederatedCallback):
    """The last weights that each client returned."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_client_end(self, trainer: TrainerView, algorithm: Any, update: Any) -> None:
        self.weights[update.client] = {name: t.clone() for name, t in update.parameters.items()}


def test_a_client_that_sits_out_leaves_the_average_and_its_own_momentum_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "network": lambda: Line(0.5, 0.1), "threshold": 0.0, "server_epochs": 0, "aggregation_optimizer": None,
    }  # fmt: skip
    once, twice, returned = OneSits(**settings), OneSits(**settings), Returned()
    toy_trainer(tmp_path, max_rounds=1, clients_per_round=2, logger=False).fit(once, HandData())
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=2, logger=False, callbacks=returned)
    trainer.fit(twice, HandData())
    assert trainer.callback_metrics["client/trained"] == 1
    assert_same(twice.clients.get(1, "optimizer"), once.clients.get(1, "optimizer"))
    assert_same(twice.server.parameters, returned.weights[0])
    assert not torch.equal(returned.weights[0]["network.w"], returned.weights[1]["network.w"])


def test_a_client_without_unlabelled_images_sits_out() -> None:
    algorithm, data = toy_semifl(threshold=0.0), ToyData()
    _, local = started(algorithm, data)
    work = algorithm.on_client_start(replace(local, unlabeled=local.unlabeled[:0]))
    assert (work.num_steps, work.num_samples) == (0, 0)
