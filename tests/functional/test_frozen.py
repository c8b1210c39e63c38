from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from lightning_fedssl.algorithms import FedAvg, FedMatch
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.export import load_network
from lightning_fedssl.functional.batch_norm import batch_norm_layers
from lightning_fedssl.functional.frozen import freeze, frozen_names, select_names
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import frozen_state
from lightning_fedssl.storage import checkpoint_file
from tests.algorithms.helpers import METHODS, toy_semi_sfl
from tests.models.helpers import again, small, tensors
from tests.toy import (
    ToyData,
    Transfers,
    assert_same,
    images_of,
    labeled_clients,
    toy_fedavg,
    toy_semifl,
    toy_trainer,
    weights,
)
from tests.trainer.helpers import StopAfter

FREEZABLE = [name for name in METHODS if not name.startswith("fedmatch") and name != "fed_shvr_dropout"]


def test_patterns_select_names_of_tensors_and_layers() -> None:
    names = {n: n for n in ("convs.0.weight", "convs.1.weight", "convs.10.weight", "head.weight")}
    assert select_names(names, ["convs.1"], "k") == {"convs.1.weight"}
    assert select_names(names, ["convs", "!convs.1"], "k") == {"convs.0.weight", "convs.10.weight"}
    assert select_names(names, ["*", "!head"], "k") == {*names} - {"head.weight"}
    assert select_names(names, [], "k") == set()
    with pytest.raises(ValueError, match=r"'conv' matches no tensor .* has the layers convs\.0, convs\.1"):
        select_names(names, ["conv"], "k")


def test_weights_that_a_network_does_not_train_are_frozen(tmp_path: Path) -> None:
    class Part(torch.nn.Sequential):
        def __init__(self, num_classes: int) -> None:
            layer, norm = torch.nn.Linear(64, num_classes), torch.nn.BatchNorm1d(64)
            super().__init__(torch.nn.Flatten(), torch.nn.BatchNorm1d(64, affine=False), norm, layer)
            layer.bias.requires_grad_(False)
            norm.requires_grad_(False)

    seen = Transfers()
    method = toy_fedavg(network=Part)
    toy_trainer(tmp_path, max_rounds=1, callbacks=[seen]).fit(method, labeled_clients())
    sent = {direction: set(sizes) for _, _, direction, sizes in seen.seen}
    assert frozen_names(method) == {f"network.2.{name}" for name in torch.nn.BatchNorm1d(64).state_dict()} | {
        "network.3.bias"
    }
    assert not frozen_names(method) & (sent["down"] | sent["up"])
    assert {"network.3.weight", "network.1.running_mean"} <= sent["up"]
    assert not method.network.get_buffer("2.running_mean").any()


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze: \* selects every weight of the network"):
        toy_fedavg(freeze="*").configure_model()


@pytest.mark.parametrize("method", FREEZABLE)
def test_frozen_layers_stay_and_are_not_sent_with_every_method(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    model = again(make(), freeze=["convs.0", "norms.0"])
    transfers = Transfers()
    statistics = StaticBatchNorm("moments") if method.startswith("semifl") else StaticBatchNorm()
    start = again(make(), freeze=["convs.0", "norms.0"])
    start.configure_model()
    trainer = toy_trainer(tmp_path, callbacks=[transfers, statistics], max_rounds=2)
    trainer.fit(model, data())
    frozen = frozen_names(model)
    assert {name.rpartition(".")[0][-7:].replace("_", ".") for name in frozen} == {"convs.0", "norms.0"}
    assert_same(frozen_state(model), frozen_state(start))
    assert not frozen & model.server.model().keys()
    assert any(not torch.equal(t, start.state_dict()[n]) for n, t in model.server.parameters.items())
    sent = {name for *_, sizes in transfers.seen for name in sizes}
    assert not {name for name in sent if any(name.endswith(f) for f in frozen)}
    checkpoint = checkpoint_file.load(Path(str(trainer.log_dir)) / "checkpoints/last.ckpt")
    loaded = type(model).load_from_checkpoint(
        Path(str(trainer.log_dir)) / "checkpoints/last.ckpt", network=model.network_factory
    )
    assert frozen <= checkpoint["state_dict"].keys()
    images = images_of(torch.arange(6) % 3, 0).float() / 255
    logits = torch.func.functional_call(model.eval(), model.evaluated_model(), (images,))
    assert torch.equal(loaded.eval()(images), logits)


@pytest.mark.parametrize("method", ["semifl", "fed_shvr", "semi_sfl"])
def test_a_run_with_frozen_layers_resumes_with_the_same_bits(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    whole, first, second = (again(make(), freeze=["convs.0", "norms.0"]) for _ in range(3))
    toy_trainer(tmp_path / "whole").fit(whole, data())
    toy_trainer(tmp_path / "parts", callbacks=StopAfter(1)).fit(first, data())
    toy_trainer(tmp_path / "parts").fit(second, data(), ckpt_path="last")
    assert_same(weights(second), weights(whole))
    assert_same(frozen_state(second), frozen_state(whole))


def test_a_run_resumes_and_is_tested_without_the_file_of_its_first_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors(small(norm="group")), path)
    options: dict[str, Any] = {"init_from": str(path), "freeze": ["convs"]}
    whole, first = toy_fedavg(**options), toy_fedavg(**options)
    toy_trainer(tmp_path / "whole").fit(whole, labeled_clients())
    toy_trainer(tmp_path / "parts", callbacks=StopAfter(1)).fit(first, labeled_clients())
    path.unlink()
    second = toy_fedavg(freeze=["convs"])
    resumed = toy_trainer(tmp_path / "parts")
    resumed.fit(second, labeled_clients(), ckpt_path="last")
    assert_same(weights(second), weights(whole))
    assert_same(frozen_state(second), frozen_state(whole))
    loaded = FedAvg.load_from_checkpoint(Path(str(resumed.log_dir)) / "checkpoints/last.ckpt")
    assert loaded.init_from is None
    assert_same(frozen_state(loaded), frozen_state(whole))
    network, _ = load_network(Path(str(resumed.log_dir)) / "checkpoints")
    assert_same(tensors(network), tensors(second.configured_network()))


def test_the_ledger_counts_what_moves(tmp_path: Path) -> None:
    """Only the classifier, 16 x 3 weights and 3 biases of 4 bytes, is sent; all weights are 4 + 8 + 16 channels."""
    transfers = Transfers()
    model = toy_fedavg(freeze=["*", "!classifier"])
    trainer = toy_trainer(tmp_path, callbacks=transfers, max_rounds=1, logger=False)
    trainer.fit(model, labeled_clients())
    clients = {client for _, client, _, _ in transfers.seen}
    assert len(clients) == 3
    for client in clients:
        assert transfers.bytes(1, client, "down") == transfers.bytes(1, client, "up") == 4 * (16 * 3 + 3)
    assert [p.shape for group in trainer.client_optimizer.param_groups for p in group["params"]] == [
        (3, 16), (3,)
    ]  # fmt: skip


@pytest.mark.parametrize("norm", ["batch", "static_batch"])
def test_a_frozen_batch_norm_uses_its_statistics_in_training_and_keeps_them(tmp_path: Path, norm: str) -> None:
    network: Any = small(norm="batch")
    network(torch.rand(20, 1, 8, 8))
    save_file(tensors(network), tmp_path / "weights.safetensors")
    model = toy_semifl(
        network=partial(small, norm=norm), init_from=tmp_path / "weights.safetensors",
        freeze=["convs.0", "norms.0"], threshold=0.0,
    )  # fmt: skip
    toy_trainer(tmp_path, callbacks=StaticBatchNorm("moments"), logger=False).fit(model, ToyData())
    layers: Any = model.network.norms
    assert torch.equal(layers.get_buffer("0.running_mean"), network.norms[0].running_mean)
    assert not torch.equal(layers[1].running_mean, network.norms[1].running_mean)
    x = torch.rand(5, 4, 8, 8)
    torch.testing.assert_close(layers[0].train()(x), network.norms[0].eval()(x))


class Foreign(torch.nn.BatchNorm2d):
    """A batch norm that computes more, as timm's do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(input) + 1)


def foreign() -> torch.nn.Module:
    layers = (torch.nn.Conv2d(3, 4, 3), Foreign(4), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    return torch.nn.Sequential(OrderedDict(zip(("conv", "norm", "flat", "classifier"), layers, strict=True)))


NETWORKS = {"foreign": (foreign, "classifier")} | {
    name: (partial(timm.create_model, name, num_classes=10), classifier)
    for name, classifier in {
        "efficientnet_lite0": "classifier", "mobilenetv3_small_050": "classifier", "resnetv2_18": "head.fc",
        "densenet121": "classifier", "regnety_002": "head.fc", "resnet18": "fc",
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_freezing_changes_nothing_in_evaluation_and_keeps_it_in_training(name: str) -> None:
    make, head = NETWORKS[name]
    x = torch.rand(2, 3, 32, 32)
    network = make().eval()
    network(x)
    with torch.no_grad():
        for layer in batch_norm_layers(network).values():
            layer.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
    before, names = network(x), network.state_dict().keys()
    freeze(network, ["*", f"!{head}"])
    assert torch.equal(network(x), before)
    assert network.state_dict().keys() == names
    for trained in (network.train(), copy.deepcopy(network).train()):
        state = tensors(trained)
        torch.testing.assert_close(trained(x), before)
        assert_same(tensors(trained), state)
    assert not batch_norm_layers(network)


def test_copies_and_parts_of_a_network_know_their_frozen_layers() -> None:
    network = small()
    freeze(network, ["convs.0", "norms.0"])
    teacher = Teacher({"network": network})
    names = {"convs.0.weight", *(f"norms.0.{n}" for n in small().norms[0].state_dict())}
    assert frozen_names(network) == names
    assert frozen_names(teacher) == {f"network.{name}" for name in names}
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(1)
    before = tensors(teacher)
    teacher.follow({"network": network}, 0.5)
    changed = {name for name, t in tensors(teacher).items() if not torch.equal(t, before[name])}
    assert changed
    assert not changed & frozen_names(teacher)


@pytest.mark.parametrize("options", [{"optimizer": torch.optim.AdamW}, {"prox_mu": 0.5}])
def test_stacked_clients_train_as_sequential_ones_do(tmp_path: Path, options: dict[str, Any]) -> None:
    results = []
    for number in (1, 3):
        model = toy_fedavg(freeze=["convs.0", "norms.0"], **options)
        trainer = toy_trainer(tmp_path, clients_at_once=number, precision="64-true", logger=False)
        trainer.fit(model, labeled_clients())
        assert not trainer.run.local_training.refusal
        results.append({**weights(model), **frozen_state(model)})
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name], t, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_frozen_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze is .*FedMatch trains every weight"):
        FedMatch(network=small, freeze=["convs"])
    with pytest.raises(ValueError, match=r"model\.freeze selects every weight before model\.split"):
        toy_semi_sfl(freeze=["*", "!classifier"]).configure_model()
    with pytest.raises(ValueError, match=r"model\.init_except is .*: it needs model\.init_from"):
        toy_fedavg(init_except="classifier")
