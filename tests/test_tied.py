"""Networks with tied weights are exported, loaded, frozen and started from a file as others are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_fedssl.algorithms import FedMatch, MeanTeacher, SemiFL
from lightning_fedssl.callbacks import ClientEvaluation
from lightning_fedssl.cli import main
from lightning_fedssl.export import load_network
from lightning_fedssl.functional.frozen import freeze, frozen_names
from lightning_fedssl.functional.tied import call_with, complete, tied_names
from lightning_fedssl.models import CNN, build_network
from lightning_fedssl.models.pretrained import load_weights
from tests.test_export import evaluated, normalized, some_images
from tests.test_trainer import labeled_clients
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer, weights


class Tied(nn.Module):
    """Two layers with one weight and biases of their own, and a layer under two names."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(in_shape[0] * in_shape[1] * in_shape[2], 8)
        self.l = nn.Linear(8, 8)
        self.m = nn.Linear(8, 8)
        self.m.weight = self.l.weight
        self.again = self.first
        self.classifier = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        x = torch.relu(self.m(torch.relu(self.l(torch.relu(self.again(x.flatten(1)))))))
        logits: Tensor = self.classifier(x)
        return logits


def built(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    network = build_network(Tied, 3, (1, 8, 8))
    assert isinstance(network, Tied)
    return network


def train(
    folder: Path, method: type[Any] = SemiFL, callbacks: Sequence[Callback] = (), **arguments: Any
) -> tuple[Any, Path]:
    """A trained model, and the folder of its checkpoints."""
    model = toy_semifl(network=Tied, **arguments) if method is SemiFL else method(network=Tied, **arguments)
    trainer = toy_trainer(folder, max_rounds=1, callbacks=[*callbacks])
    trainer.fit(model, ToyData() if method in (SemiFL, FedMatch) else labeled_clients())
    return model, Path(str(trainer.log_dir)) / "checkpoints"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[SemiFL, Path]:
    return train(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("format", ["safetensors", "torch_export", "hub"])
def test_every_format_gives_the_logits_of_the_trained_model(
    tmp_path: Path, run: tuple[SemiFL, Path], format: str
) -> None:
    model, folder = run
    checkpoint = str(folder / "last.ckpt")
    assert main(["export", "--ckpt_path", checkpoint, "--format", format, "--output", str(tmp_path)]) == 0
    images = some_images()
    expected = evaluated(model, normalized(images))
    if format != "torch_export":
        assert torch.equal(load_network(tmp_path)[0](normalized(images)), expected)
        own = Tied(3, (1, 8, 8))
        own.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(own.eval()(normalized(images)), expected)
    if format != "safetensors":
        program = torch.export.load(tmp_path / "model.pt2").module()
        torch.testing.assert_close(program(images), expected)


@pytest.mark.parametrize("method", [SemiFL, MeanTeacher])
def test_lightning_loads_a_checkpoint(tmp_path: Path, method: type[Any]) -> None:
    model, folder = train(tmp_path, method)
    loaded = method.load_from_checkpoint(folder / "last.ckpt").eval()
    assert loaded.network.m.weight is loaded.network.l.weight
    images = normalized(some_images())
    assert torch.equal(loaded(images), evaluated(model, images))


@pytest.mark.parametrize("name", ["model.safetensors", "last.ckpt"])
def test_a_run_starts_from_its_weights(run: tuple[SemiFL, Path], name: str) -> None:
    model, folder = run
    started = toy_semifl(network=Tied, init_from=str(folder / name), num_classes=3, in_shape=(1, 8, 8))
    started.configure_model()
    assert_same(weights(model), {n: p.detach() for n, p in started.named_parameters() if n in weights(model)})


def test_a_state_is_completed_under_a_prefix_and_in_copies() -> None:
    network = built()
    assert tied_names(network) == [
        ["first.weight", "again.weight"], ["first.bias", "again.bias"], ["l.weight", "m.weight"]
    ]  # fmt: skip
    state = {f"a.{name}": p.detach() for name, p in built(1).named_parameters()}
    assert "a.m.weight" not in state
    both = nn.ModuleDict({"a": copy.deepcopy(network)})
    both.load_state_dict(dict(state))
    assert torch.equal(both.get_parameter("a.m.weight"), state["a.l.weight"])
    known = {"m.weight": torch.zeros(8, 8)}
    complete(known, network)
    assert known.keys() == {"l.weight", "m.weight"}


def test_what_a_state_lacks_under_every_name_is_still_missed() -> None:
    state = {name: p for name, p in built().named_parameters() if name != "l.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "l\.weight", "m\.weight"'):
        built().load_state_dict(state)


def test_networks_without_tied_weights_are_left_alone() -> None:
    network = build_network(CNN, 3, (1, 8, 8))
    assert not tied_names(network)
    assert not network._load_state_dict_pre_hooks


def saved(path: Path, **changes: Tensor) -> Path:
    """A file with the weights of another tied network, of which some are changed."""
    state = {name: t.clone() for name, t in built(1).state_dict().items()}
    save_file({**state, **{name.replace("__", "."): t for name, t in changes.items()}}, path)
    return path


def test_a_file_that_unties_the_weights_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.safetensors", m__weight=torch.zeros(8, 8))
    message = r"does not fit Tied: one tensor in the network, but not in the file: l\.weight, m\.weight\. Choose"
    with pytest.raises(ValueError, match=message):
        load_weights(built(), path)


def test_a_tied_weight_that_may_differ_is_kept_under_all_its_names(tmp_path: Path) -> None:
    network, before = built(), built()
    load_weights(network, saved(tmp_path / "w.safetensors"), ["m"])
    assert torch.equal(network.l.weight, before.l.weight)
    assert torch.equal(network.m.bias, before.m.bias)
    assert torch.equal(network.l.bias, built(1).l.bias)


def test_a_file_that_unties_a_weight_that_may_differ_is_read(tmp_path: Path) -> None:
    network = built()
    load_weights(network, saved(tmp_path / "w.safetensors", m__weight=torch.zeros(8, 8)), ["l.weight"])
    assert torch.equal(network.m.weight, built().m.weight)


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["m.weight"], {"l.weight"}),
        (["m"], {"l.weight", "m.bias"}),
        (["again"], {"first.weight", "first.bias"}),
        (["l", "!m.weight"], {"l.bias"}),
        (["*", "!classifier"], {"first.weight", "first.bias", "l.weight", "l.bias", "m.bias"}),
    ],
)
def test_a_tied_weight_is_frozen_by_any_of_its_names(patterns: list[str], frozen: set[str]) -> None:
    network = built()
    freeze(network, patterns)
    assert frozen_names(network) == frozen
    assert {name for name, p in network.named_parameters() if not p.requires_grad} == frozen


def test_every_weight_frozen_by_other_names_leaves_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="selects every weight of the network"):
        freeze(built(), ["again", "m", "l.bias", "classifier"])


def test_a_run_leaves_a_frozen_tied_weight_as_it_was(tmp_path: Path) -> None:
    start = toy_semifl(network=Tied, num_classes=3, in_shape=(1, 8, 8))
    start.configure_model()
    model, _ = train(tmp_path, freeze=["m.weight"])
    assert dict(start.named_parameters()).keys() - weights(model).keys() == {"network.l.weight"}
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, start.get_parameter(n))}
    assert dict(start.named_parameters()).keys() - moved == {"network.l.weight"}


def test_fedmatch_trains_and_exports_tied_weights(tmp_path: Path) -> None:
    model, folder = train(tmp_path, FedMatch, lr_patience=None)
    assert main(["export", "--ckpt_path", str(folder / "last.ckpt"), "--output", str(tmp_path)]) == 0
    images = normalized(some_images())
    assert torch.equal(load_network(tmp_path)[0](images), evaluated(model, images))


def test_a_pass_with_other_weights_leaves_the_module_as_it_was() -> None:
    network, other = built(), built(1)
    parameters = dict(network.named_parameters())
    images = normalized(some_images())
    logits = call_with(network, {n: p.detach() for n, p in other.named_parameters()}, images)
    assert torch.equal(logits, other(images))
    assert all(network.get_parameter(name) is p for name, p in parameters.items())
    assert network.m.weight is network.l.weight


@pytest.mark.parametrize("method", [SemiFL, MeanTeacher, FedMatch])
def test_a_run_leaves_parameters_in_every_layer(tmp_path: Path, method: type[Any]) -> None:
    model, _ = train(tmp_path, method, callbacks=[ClientEvaluation()])
    network = model.network.sigma if method is FedMatch else model.network
    assert all(isinstance(layer.weight, nn.Parameter) for layer in (network.first, network.l, network.m))
    assert network.m.weight is network.l.weight


class OneName(Tied):
    """The same layers, of which none has two names."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__(num_classes, in_shape)
        del self.again

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        hidden = self.first(x.flatten(1))
        x = torch.relu(self.m(torch.relu(self.l(torch.relu(hidden)))))
        logits: Tensor = self.classifier(x)
        return logits


@pytest.mark.parametrize("method", [MeanTeacher, FedMatch])
def test_a_layer_under_two_names_is_trained_as_one_under_one_name(tmp_path: Path, method: type[Any]) -> None:
    data = ToyData(label_location="clients", num_labels=24) if method is MeanTeacher else ToyData()
    results = []
    for network in (Tied, OneName):
        model = method(network=network)
        toy_trainer(tmp_path, max_rounds=2, logger=False).fit(model, data)
        results.append(weights(model))
    assert_same(*results)
