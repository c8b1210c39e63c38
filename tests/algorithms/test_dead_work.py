"""Work that the authors' SemiFL round does and no weight depends on is not done; doing it changes no bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.algorithms import SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch
from tests.algorithms.helpers import momentum_of
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights

CLIENT_EPOCHS, SERVER_EPOCHS, LABELS, VALIDATION, TEST = 2, 3, 12, 12, 60


class Counting(FederatedCallback):
    """Counts images: forward passes by what they are for, and views by kind; and notes how many clients labelled."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.labelled = 0
        self.confident = 0

    def on_fit_start(self, trainer: Any, algorithm: Any) -> None:
        algorithm.network.register_forward_pre_hook(self._forward)
        views: Views = trainer.datamodule.views
        counted = {name: self._counted(name, getattr(views, name)) for name in ("plain", "weak", "strong")}
        trainer.datamodule.views = replace(views, **counted)

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.images.clear()
        self.labelled = self.confident = 0

    def on_client_start(self, trainer: Any, algorithm: Any, data: LocalData, work: LocalWork) -> None:
        self.labelled += len(data.unlabeled)
        self.confident += work.num_samples

    def _forward(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        training = network.training and torch.is_grad_enabled()
        self.images["forward and backward" if training else "forward"] += len(inputs[0])

    def _counted(self, name: str, view: Any) -> Any:
        def counted(images: Tensor, keys: Tensor) -> Tensor:
            self.images[f"{name} views"] += len(images)
            result: Tensor = view(images, keys)
            return result

        return counted


def fit(tmp_path: Path, algorithm: SemiFL, *callbacks: Any, source: Any = "pooled") -> SemiFL:
    statistics = StaticBatchNorm(source)
    chosen = [*callbacks] if any(isinstance(c, StaticBatchNorm) for c in callbacks) else [*callbacks, statistics]
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=chosen, logger=False)
    trainer.fit(algorithm, ToyData(num_labels=LABELS, validation=VALIDATION / 120))
    return algorithm


def ready(kind: type[SemiFL] = SemiFL, **kwargs: Any) -> SemiFL:
    defaults = toy_semifl(client_epochs=CLIENT_EPOCHS, server_epochs=SERVER_EPOCHS, **kwargs)
    return kind(**defaults.hparams)


class LastRound(Counting):
    """Keeps the counts of the second round, as it ends (the test of the run comes later)."""

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.counts = dict(self.images)
        self.counts["labelled"], self.counts["confident"] = self.labelled, self.confident


@pytest.mark.parametrize("mix_weight", [1.0, 0.0])
def test_a_round_passes_and_views_what_the_method_needs_and_nothing_more(tmp_path: Path, mix_weight: float) -> None:
    """Pseudo-labels once, two passes a step (fix and mix), one statistics sweep, one validation; no strong mix view."""
    count = LastRound()
    fit(tmp_path, ready(mix_weight=mix_weight), count)
    counts = count.counts
    labelled, confident = counts.pop("labelled"), counts.pop("confident")
    assert labelled == 3 * (120 - VALIDATION - LABELS) // 4
    assert 0 < confident <= labelled
    steps, passes, server = CLIENT_EPOCHS * confident, 2 if mix_weight else 1, SERVER_EPOCHS * LABELS
    assert counts == {
        "forward and backward": passes * steps + server,
        "forward": labelled + (120 - VALIDATION) + VALIDATION,
        "strong views": steps,
        "weak views": labelled + (2 * steps if mix_weight else 0) + server,
        "plain views": (120 - VALIDATION) + VALIDATION,
    }


class AsPublished(SemiFL):
    """With what the authors' loop does besides: a third pass over the weak view, logged, and strong views for D_mix."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        accuracy = (self(batch["x_weak"]).argmax(1) == batch["y_fix"]).double().mean()
        self.log("client/accuracy", accuracy, batch_size=len(batch["y_fix"]))
        return loss

    def on_client_start(self, data: LocalData) -> LocalWork:
        work = super().on_client_start(data)

        def batch(step: int) -> Batch:
            made = work.batch(step)
            data.strong(data.unlabeled[: len(made["y_mix"])], "mix strong", step)
            data.weak(data.unlabeled[: len(made["y_mix"])], "mix weak", step)
            return made

        return replace(work, batch=batch)


class EverySweep(StaticBatchNorm):
    """Statistics before the broadcast and again before the evaluation, though the weights are the same."""

    sweeps = 0

    def _refresh(self, trainer: Any, algorithm: Any) -> None:
        self.version = -1
        self.sweeps += 1
        super()._refresh(trainer, algorithm)


@pytest.mark.parametrize("source", ["pooled", "server", "moments"])
def test_leaving_it_out_changes_no_bit(tmp_path: Path, source: Any) -> None:
    lean, count, sweeps = ready(), LastRound(), EverySweep(source)
    fit(tmp_path, lean, source=source)
    published = fit(tmp_path, ready(AsPublished), count, sweeps)
    assert sweeps.sweeps >= 2 * 2
    assert count.counts["forward and backward"] > 3 * CLIENT_EPOCHS * count.counts["confident"]
    assert_same(weights(published), weights(lean))
    assert_same(momentum_of(published), momentum_of(lean))
    assert published.clients.state_dict().keys() == lean.clients.state_dict().keys()
    for client, state in lean.clients.state_dict().items():
        assert_same(published.clients.state_dict()[client], state)
