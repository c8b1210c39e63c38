from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fedssl.callbacks import FederatedCheckpoint, GroupQuality
from lightning_fedssl.storage import checkpoint_file
from tests.algorithms.helpers import toy_rgd
from tests.toy import ToyData, assert_same, toy_trainer


def test_the_predictions_of_group_means_do_not_count_as_those_of_the_global_model(tmp_path: Path) -> None:
    """Two group means predict class 2 for every image, the global model 0 for dark and 1 for bright ones."""

    class ByBrightness(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope, self.third = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-1e6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            brightness = x.flatten(1).sum(1) - x.flatten(1).sum(1).median()
            return torch.stack([0 * brightness, self.slope * brightness, self.third.expand(len(x))], dim=1)

    algorithm, trainer = toy_rgd(network=ByBrightness), toy_trainer(tmp_path, logger=False)
    vars(algorithm)["group_means"] = lambda: [{"network.third": torch.tensor(1e6)}] * 2
    metrics = trainer.validate(algorithm, ToyData(validation=0.5))
    assert metrics["group/largest_class_share"] == 1
    assert metrics["val/largest_class_share"] == 0.5


def test_group_means_are_evaluated_and_the_evaluated_model_is_put_back(tmp_path: Path) -> None:
    """A group mean that predicts class 2 for all, beside a sound one: both scalars name the dead one."""
    algorithm = toy_rgd()
    data, trainer = ToyData(), toy_trainer(tmp_path, clients_per_round=4)
    trainer.fit(algorithm, data)
    before = float(trainer.callback_metrics["group/accuracy_min"])
    assert 0 < before <= 1
    dead = algorithm.server.extra["group 1"]
    dead["network.classifier.weight"].zero_()
    dead["network.classifier.bias"].copy_(torch.tensor([0.0, 0.0, 1.0]))
    metrics = {"val/accuracy": 0.5}
    GroupQuality().on_evaluation_end(trainer, algorithm, metrics)
    labels = torch.cat([y for _, y in data.evaluation_batches("validate")])
    assert metrics["group/largest_class_share"] == 1
    assert metrics["group/accuracy_min"] == pytest.approx(float((labels == 2).double().mean()))
    assert_same(dict(algorithm.state_dict()), {name: algorithm.server.model()[name] for name in algorithm.state_dict()})
    assert "group/accuracy_min" not in toy_trainer(tmp_path).validate(toy_rgd(), ToyData())
    nothing = {"test/accuracy": 0.5}
    GroupQuality().on_evaluation_end(trainer, algorithm, nothing)
    assert nothing == {"test/accuracy": 0.5}


def test_group_means_of_a_checkpoint_are_evaluated_with_its_model(tmp_path: Path) -> None:
    """After two rounds, ``validate`` is given the checkpoint of round 1."""
    algorithm, data = toy_rgd(), ToyData()
    keeps = FederatedCheckpoint(monitor="lr")  # which stays the same, so that round 1 remains the best one
    trainer = toy_trainer(tmp_path, clients_per_round=4, max_rounds=2, callbacks=[keeps], precision="64-true")
    trainer.fit(algorithm, data)
    (file,) = tmp_path.rglob("best.ckpt")
    saved = checkpoint_file.load(file)["federation"]["extra"]
    for used, given in ((trainer, algorithm), (toy_trainer(tmp_path / "new", precision="64-true"), toy_rgd())):
        metrics = used.validate(given, data, ckpt_path=file)
        assert used.round_index == 1
        assert "group/accuracy_min" in metrics
        for group in ("group 0", "group 1"):
            assert_same(given.server.extra[group], saved[group])
