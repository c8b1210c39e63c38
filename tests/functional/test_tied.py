"""Networks with tied weights are trained, saved, loaded, frozen and started from a file as others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedssl.algorithms import FedMatch, MeanTeacher, SemiFL
from lightning_fedssl.export import load_network
from lightning_fedssl.functional.frozen import freeze, frozen_names
from lightning_fedssl.functional.tied import first_names
from lightning_fedssl.models import build_network
from lightning_fedssl.models.pretrained import load_weights
from tests.toy import ToyData, assert_same, images_of, labeled_clients, toy_semifl, toy_trainer, weights


class Tied(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.l = nn.Linear(8, 8)
        self.m = nn.Linear(8, 8)
        self.m.weight = self.l.weight
        self.classifier = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        logits: Tensor = self.classifier(self.m(self.l(self.first(x.flatten(1)).relu()).relu()).relu())
        return logits


def built() -> Any:
    return build_network(Tied, 3, (1, 8, 8))


@pytest.mark.parametrize("method", [SemiFL, MeanTeacher, FedMatch])
def test_a_trained_model_is_loaded_from_every_file_of_a_run(tmp_path: Path, method: type[Any]) -> None:
    model = toy_semifl(network=Tied) if method is SemiFL else method(network=Tied)
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(model, labeled_clients() if method is MeanTeacher else ToyData())
    images = images_of(torch.arange(6) % 3, 0).float() / 255
    logits = torch.func.functional_call(model.eval(), model.evaluated_model(), (images,))
    folder = Path(str(trainer.log_dir)) / "checkpoints"
    assert torch.equal(load_network(folder, trust=["tests"])[0].eval()(images), logits)
    loaded = method.load_from_checkpoint(folder / "last.ckpt", trust=["tests"]).eval()
    assert torch.equal(loaded(images), logits)
    network = model.network.sigma if method is FedMatch else model.network
    assert network.m.weight is network.l.weight
    if method is SemiFL:
        started = toy_semifl(network=Tied, init_from=str(folder / "last.ckpt"), num_classes=3, in_shape=(1, 8, 8))
        started.configure_model()
        assert_same(weights(model), {n: p.detach() for n, p in started.named_parameters()})


def test_a_file_may_have_a_tied_weight_under_any_of_its_names(tmp_path: Path) -> None:
    state = built().state_dict()
    assert {name: first for name, first in first_names(built()).items() if name != first} == {"m.weight": "l.weight"}
    for left_out in ("l.weight", "m.weight"):
        torch.save({name: t for name, t in state.items() if name != left_out}, tmp_path / "weights.pt")
        network = built()
        load_weights(network, tmp_path / "weights.pt")
        assert_same(network.state_dict(), state)


def test_a_state_with_the_first_names_alone_is_loaded_into_a_module_that_contains_the_network() -> None:
    state = {f"a.{name}": p.detach() for name, p in built().named_parameters()}
    whole = nn.ModuleDict({"a": built()})
    whole.load_state_dict(dict(state))
    assert torch.equal(whole.get_parameter("a.m.weight"), state["a.l.weight"])
    del state["a.first.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*a\.first\.weight"):
        whole.load_state_dict(state)


@pytest.mark.parametrize("name", ["l.weight", "m.weight"])
def test_a_tied_weight_is_frozen_by_any_of_its_names(name: str) -> None:
    network = built()
    freeze(network, [name])
    assert frozen_names(network) == {"l.weight"}
    assert not network.m.weight.requires_grad


class TwoNames(Tied):
    """The first layer has a second name."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, in_shape)
        self.again = self.first


@pytest.mark.parametrize("method", [MeanTeacher, FedMatch])
def test_a_layer_with_two_names_is_trained_as_one_with_one_name(tmp_path: Path, method: type[Any]) -> None:
    """Passes with other weights (a teacher's, the sum of two) leave its own in the layer."""
    results = []
    for network in (Tied, TwoNames):
        model = method(network=network)
        data = labeled_clients() if method is MeanTeacher else ToyData()
        toy_trainer(tmp_path, max_rounds=2, logger=False).fit(model, data)
        results.append(weights(model))
    assert_same(*results)
