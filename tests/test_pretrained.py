"""Initial weights from a file (``model.init_from``) and frozen layers (``model.freeze``), with every method."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_fedssl.algorithms import FedAvg, FedMatch
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.export import load_network
from lightning_fedssl.functional.frozen import FrozenBatchNorm, freeze, frozen_names, select_names
from lightning_fedssl.models import CNN, ResNet18
from lightning_fedssl.models.pretrained import load_weights
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import frozen_state
from lightning_fedssl.storage import checkpoint_file
from tests.test_ranks import run as run_on_ranks
from tests.test_resume import METHODS, StopAfter
from tests.test_semi_sfl import toy_semi_sfl
from tests.test_trainer import labeled_clients, toy_fedavg
from tests.toy import ToyData, Transfers, assert_same, images_of, toy_semifl, toy_trainer, weights

FREEZABLE = [name for name in METHODS if not name.startswith("fedmatch") and name != "fed_shvr_dropout"]
"""FedMatch refuses to freeze; the other has another network."""


def again(model: Any, **changes: Any) -> Any:
    """The same method with other arguments."""
    return type(model)(**{**model.hparams, **changes})


def small(**kwargs: Any) -> CNN:
    defaults: dict[str, Any] = {"width": 4, "norm": "batch", "num_classes": 3, "in_shape": (1, 8, 8)}
    return CNN(**defaults | kwargs)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A file with the weights of a network whose statistics are not the initial ones."""
    network = small()
    network(torch.rand(20, 1, 8, 8))
    save_file(tensors(network), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", tensors(network)


# The file.


@pytest.mark.parametrize(
    ("suffix", "wrapped"),
    [
        ("safetensors", None),
        ("pt", lambda state: state),
        ("pth", lambda state: {"epoch": 3, "state_dict": state}),
        ("ckpt", lambda state: {"state_dict": {f"model.{n}": t for n, t in state.items()}, "optimizer": {"lr": 0.1}}),
        ("bin", lambda state: {"model": {f"module._orig_mod.{n}": t for n, t in state.items()}}),
    ],
)
def test_weights_come_from_every_usual_format(saved: tuple[Path, dict[str, Tensor]], suffix: str, wrapped: Any) -> None:
    path, state = saved
    if wrapped:
        path = path.with_suffix(f".{suffix}")
        torch.save(wrapped(state), path)
    network = small()
    load_weights(network, path)
    state.pop("norms.0.num_batches_tracked")
    found = tensors(network)
    assert all(torch.equal(found[name], t) for name, t in state.items() if "num_batches" not in name)


def test_a_network_of_static_batch_norm_takes_the_statistics_of_batch_norm(saved: tuple[Path, Any]) -> None:
    network = small(norm="static_batch")
    load_weights(network, saved[0])
    assert torch.equal(network.state_dict()["norms.1.running_var"], saved[1]["norms.1.running_var"])


def test_a_mismatch_names_every_tensor(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = saved
    network = small(num_classes=5, norm="group")
    with pytest.raises(ValueError, match=r"does not fit CNN") as error:
        load_weights(network, path)
    message = str(error.value)
    unknown = [name for name in state if "running" in name]
    assert f"unknown to the network: {', '.join(unknown)};" in message
    assert (
        "of another shape: classifier.weight is (3, 16) instead of (5, 16), classifier.bias is (3,) instead of (5,)"
        in message
    )
    assert "model.init_except" in message
    with pytest.raises(ValueError, match=r"missing in the file: convs.0.bias, convs.1.bias, convs.2.bias"):
        load_weights(small(norm="none"), path)


def test_tensors_that_may_differ_keep_their_initial_values(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = saved
    network = small(num_classes=5, norm="group")
    before = tensors(network)
    load_weights(network, path, ["classifier", "norms.*.running_*"])
    after = tensors(network)
    assert torch.equal(after["convs.1.weight"], state["convs.1.weight"])
    assert torch.equal(after["norms.1.weight"], state["norms.1.weight"])
    assert torch.equal(after["classifier.weight"], before["classifier.weight"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        (b"not weights", "cannot be read as a file of weights"),
        (b"", "cannot be read as a file of weights"),
        ({"a": [1, 2]}, r"holds no tensors by name; save weights by torch.save\(network.state_dict"),
        (Path("x"), "it is damaged, or holds more than tensors, which could run code"),
        ({n: t.double() * torch.nan for n, t in tensors(small()).items()}, "not finite"),
    ],
)
def test_a_file_that_is_no_file_of_weights_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=rf"^model\.init_from: .*{message}"):
        load_weights(small(), path)


def test_the_folder_of_a_relative_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = rf"there is no file runs/w\.pt in {tmp_path}, the folder that the command runs in; give the path"
    with pytest.raises(ValueError, match=expected):
        load_weights(small(), "runs/w.pt")
    with pytest.raises(ValueError, match=rf"there is no file {tmp_path}/w\.pt; give the path"):
        load_weights(small(), tmp_path / "w.pt")


def test_a_damaged_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"weights\.safetensors cannot be read as a file of weights: "):
        load_weights(small(), tmp_path / "weights.safetensors")


def test_the_names_of_torchvision_and_timm_fit_a_resnet18(tmp_path: Path) -> None:
    """torchvision's network with the stem for small images computes the same as ours after loading its weights."""
    theirs = torchvision.models.resnet18(num_classes=3, weights=None)
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    theirs(torch.rand(4, 3, 16, 16))  # statistics that are not the initial ones
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = ResNet18(num_classes=3, in_shape=(3, 16, 16), norm="batch")
    load_weights(ours, tmp_path / "theirs.pth")
    images = torch.rand(4, 3, 16, 16)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))
    torch.save(torchvision.models.resnet18(num_classes=3).state_dict(), tmp_path / "imagenet.pth")
    with pytest.raises(ValueError, match=r"stem\.0\.weight is \(64, 3, 7, 7\) instead of \(64, 3, 3, 3\)"):
        load_weights(ours, tmp_path / "imagenet.pth")
    load_weights(ours, tmp_path / "imagenet.pth", ["stem"])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_starts_from_a_file(tmp_path: Path, method: str) -> None:
    """The global model before the first round computes what the saved network computes."""
    model = METHODS[method][0]()
    factory = model.network_factory if isinstance(model.network_factory, partial) else partial(CNN, width=4)
    network = factory(num_classes=3, in_shape=(1, 8, 8))
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    changes: dict[str, Any] = {
        "network": factory,
        "init_from": tmp_path / "weights.pt",
        "num_classes": 3,
        "in_shape": (1, 8, 8),
    }
    if isinstance(model, FedMatch):
        with pytest.raises(ValueError, match=r"model\.variance_scaling"):
            again(model, **changes)
        changes |= {"variance_scaling": False, "psi_scale": 0.0}
    model = again(model, **changes)
    model.configure_model()
    images = images_of(torch.arange(6) % 3, 0).float() / 255
    assert torch.equal(model.configured_network().eval()(images), network.eval()(images))
    assert torch.equal(model.eval()(images), network(images))


def test_a_run_starts_from_the_model_of_another_run(tmp_path: Path) -> None:
    """Exported weights and both checkpoints of a run give the same start, from the command line as from Python."""
    first = toy_fedavg()
    trainer = toy_trainer(tmp_path / "first", max_rounds=2)
    trainer.fit(first, labeled_clients())
    folder = Path(str(trainer.log_dir)) / "checkpoints"
    for name in ("model.safetensors", "last.ckpt", "best.ckpt"):
        second = toy_fedavg(init_from=str(folder / name))
        second.configure_model()
        if name != "best.ckpt":
            assert_same(tensors(second.network), tensors(first.network))
    result = toy_trainer(tmp_path / "second", logger=False).test(second, labeled_clients())
    assert result["test/accuracy"] == float(trainer.callback_metrics["test/accuracy"])


# Frozen layers.


def test_patterns_select_names_of_tensors_and_layers() -> None:
    names = ["convs.0.weight", "convs.1.weight", "convs.10.weight", "head.weight"]
    assert select_names(names, ["convs.1"], "k") == ["convs.1.weight"]
    assert select_names(names, ["convs", "!convs.1"], "k") == ["convs.0.weight", "convs.10.weight"]
    assert select_names(names, ["*", "!head"], "k") == names[:3]
    assert select_names(names, [], "k") == []
    with pytest.raises(ValueError, match=r"'conv' matches no tensor .* has the layers convs\.0, convs\.1"):
        select_names(names, ["conv"], "k")


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze: \* selects every weight of the network"):
        toy_fedavg(freeze="*").configure_model()


@pytest.mark.parametrize("method", FREEZABLE)
def test_frozen_layers_stay_and_are_not_sent_with_every_method(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    model = again(make(), freeze=["convs.0", "norms.0"])
    transfers = Transfers()
    statistics = StaticBatchNorm("moments") if method.startswith("semifl") else StaticBatchNorm()
    start = again(make(), freeze=["convs.0", "norms.0"], num_classes=3, in_shape=(1, 8, 8))
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


@pytest.mark.parametrize("method", FREEZABLE)
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
    assert isinstance(layers[0], FrozenBatchNorm)
    assert torch.equal(layers.get_buffer("0.running_mean"), network.norms[0].running_mean)
    assert not torch.equal(layers[1].running_mean, network.norms[1].running_mean)
    x = torch.rand(5, 4, 8, 8)
    torch.testing.assert_close(layers[0].train()(x), network.norms[0].eval()(x))


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
        model = toy_fedavg(freeze=["convs.0", "norms.0"], keep_client_optimizer=True, **options)
        trainer = toy_trainer(tmp_path, clients_at_once=number, precision="64-true", logger=False)
        trainer.fit(model, labeled_clients())
        assert not trainer.local_training.refusal
        results.append({**weights(model), **frozen_state(model)})
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name], t, rtol=1e-10, atol=1e-12)


def test_two_ranks_give_the_weights_of_one(tmp_path: Path) -> None:
    save_file(tensors(small(norm="group")), tmp_path / "weights.safetensors")

    def make() -> FedAvg:
        return toy_fedavg(init_from=str(tmp_path / "weights.safetensors"), freeze=["convs.0", "norms.0"])

    results = [run_on_ranks(tmp_path, ranks, make, labeled_clients)[2] for ranks in (1, 2)]
    for name, t in weights(results[0]).items():
        torch.testing.assert_close(weights(results[1])[name], t, rtol=1e-12, atol=1e-14)
    assert_same(frozen_state(results[0]), frozen_state(results[1]))


def test_what_cannot_be_frozen_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze has no effect on FedMatch"):
        FedMatch(network=small, freeze=["convs"])
    with pytest.raises(ValueError, match=r"model\.freeze selects every weight before model\.split"):
        toy_semi_sfl(freeze=["*", "!classifier"]).configure_model()
    with pytest.raises(ValueError, match=r"model\.init_except is .*: it needs model\.init_from"):
        toy_fedavg(init_except="classifier")
