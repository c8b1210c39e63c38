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
from lightning_fedssl.models import CNN, ResNet18
from lightning_fedssl.models.pretrained import load_weights
from tests.algorithms.helpers import METHODS
from tests.models.helpers import again, small, tensors
from tests.toy import assert_same, images_of, labeled_clients, toy_fedavg, toy_trainer

"""FedMatch refuses to freeze; the other has another network."""


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
    assert "of another shape: classifier.weight is (3, 16) instead of (5, 16), classifier.bias is (3,)" in message
    assert "model.init_except" in message
    options: dict[str, Any] = {"num_classes": 3, "in_shape": (1, 8, 8), "init_from": path}
    FedAvg(network=small, init_except="classifier", **options).configure_model()
    with pytest.raises(ValueError, match=r"missing in the file: convs.0.bias, convs.1.bias, convs.2.bias"):
        load_weights(small(norm="none"), path)


def test_a_network_in_an_attribute_takes_a_file_of_the_network_alone(saved: tuple[Path, dict[str, Tensor]]) -> None:
    holder = nn.ModuleDict({"net": small()})
    load_weights(holder, saved[0])
    loaded = {name.removeprefix("net."): t for name, t in holder.state_dict().items()}
    assert all(torch.equal(loaded[name], t) for name, t in saved[1].items() if "num_batches" not in name)


def test_a_long_list_of_tensors_is_shortened(saved: tuple[Path, dict[str, Tensor]]) -> None:
    with pytest.raises(ValueError, match=r"60 missing in the file: stem\.0\.weight.*\(60 in all\)") as error:
        load_weights(ResNet18(num_classes=3, in_shape=(1, 8, 8)), saved[0])
    assert len(str(error.value)) < 1500


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
        (Path("x"), "cannot be read as a file of weights: it is damaged"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "cannot be read as a file of weights"),
        (b"(lp0\nI1\n", "cannot be read as a file of weights"),
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


@pytest.mark.parametrize("method", [name for name in METHODS if name != "semifl_masks"])  # no CNN
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
    (result,) = toy_trainer(tmp_path / "second", logger=False).test(second, labeled_clients())
    assert result["test/accuracy"] == float(trainer.callback_metrics["test/accuracy"])


# Frozen layers.
