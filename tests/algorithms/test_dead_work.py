"""Work that the authors' SemiFL round does and no weight depends on is not done."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.local_work import LocalWork
from tests.toy import ToyData, toy_semifl, toy_trainer

CLIENT_EPOCHS, SERVER_EPOCHS, LABELS, VALIDATION, TEST = 2, 3, 12, 12, 60


class Counting(FederatedCallback):
    """Counts images: forward passes by what they are for, and views by kind; and notes how many clients labelled."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.labelled = 0
        self.confident = 0

    def on_fit_start(self, trainer: Any, algorithm: Any) -> None:
        algorithm.network.register_forward_pre_hook(self._forward)
        views: Views = trainer.datamodule.inputs.views()
        counted = {name: self._counted(name, getattr(views, name)) for name in ("plain", "weak", "strong")}
        vars(trainer.datamodule.inputs)["views"] = lambda dtype: replace(views, **counted)

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.images.clear()
        self.labelled = self.confident = 0

    def on_client_start(self, trainer: Any, algorithm: Any, data: LocalData, work: LocalWork) -> None:
        self.labelled += len(data.unlabeled)
        self.confident += work.num_samples

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.last_round = self.labelled, self.confident, dict(self.images)  # the test of the run comes later

    def _forward(self, network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        training = network.training and torch.is_grad_enabled()
        self.images["forward and backward" if training else "forward"] += len(inputs[0])

    def _counted(self, name: str, view: Any) -> Any:
        def counted(images: Tensor, keys: Tensor) -> Tensor:
            self.images[f"{name} views"] += len(images)
            result: Tensor = view(images, keys)
            return result

        return counted


@pytest.mark.parametrize("mix_weight", [1.0, 0.0])
def test_a_round_passes_and_views_what_the_method_needs_and_nothing_more(tmp_path: Path, mix_weight: float) -> None:
    """Pseudo-labels once, two passes a step (fix and mix), one statistics sweep, one validation; no strong mix view."""
    count = Counting()
    algorithm = toy_semifl(client_epochs=CLIENT_EPOCHS, server_epochs=SERVER_EPOCHS, mix_weight=mix_weight)
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=[count, StaticBatchNorm("pooled")], logger=False)
    trainer.fit(algorithm, ToyData(num_labels=LABELS, validation=VALIDATION / 120))
    labelled, confident, counts = count.last_round
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
