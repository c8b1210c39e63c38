"""Pretrained networks of timm with adapters of peft: what is trained and sent, and weights under timm's names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_fedssl.algorithms import FixMatch
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.models import TimmLoRA
from lightning_fedssl.models.head import start_head
from lightning_fedssl.models.pretrained import load_weights
from tests.models.helpers import tensors
from tests.toy import Transfers, toy_trainer

timm = pytest.importorskip("timm")
pytest.importorskip("peft")
SMALL = {"img_size": 8, "patch_size": 2, "depth": 2}


def network(num_classes: int = 10) -> TimmLoRA:
    return TimmLoRA("vit_tiny_patch16_224", 4, arguments=SMALL, num_classes=num_classes, in_shape=(1, 8, 8))


def test_adapters_and_classifier_alone_are_trained_and_sent(tmp_path: Path) -> None:
    seen = Transfers()
    factory = partial(TimmLoRA, model_name="vit_tiny_patch16_224", rank=4, arguments=SMALL)
    method = FixMatch(network=factory, threshold=0.0)
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=[seen])
    trainer.fit(method, FederatedDataModule("digits", num_clients=5, num_labels=50))
    trained = {name for name, w in method.named_parameters() if w.requires_grad}
    assert all(".lora_" in name or ".modules_to_save." in name for name in trained)
    sizes = {(direction, sum(found.values())) for _, _, direction, found in seen.seen}
    assert sizes == {("down", 32_296), ("up", 32_296)}
    assert sum(w.numel() for w in method.parameters()) * 4 > 3_600_000
    assert all(w.any() for name, w in method.named_parameters() if "lora_B" in name)  # zeros before training


def test_weights_under_the_names_of_timm_go_below_the_adapters(tmp_path: Path) -> None:
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=10, in_chans=1, **SMALL).eval()
    save_file(tensors(plain), tmp_path / "vit.safetensors")
    adapted = network().eval()
    before = {name: w.clone() for name, w in adapted.named_parameters() if "lora_" in name}
    load_weights(adapted, tmp_path / "vit.safetensors")
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(adapted(x), plain(x))  # new adapters add 0
    assert before
    assert all(torch.equal(adapted.get_parameter(name), w) for name, w in before.items())


def test_images_get_the_size_of_the_network() -> None:
    sized = TimmLoRA("vit_tiny_patch16_224", 4, size=8, arguments=SMALL, num_classes=10, in_shape=(1, 4, 4)).eval()
    torch.nn.init.normal_(sized.get_parameter("adapted.base_model.model.head.modules_to_save.default.weight"))
    x = torch.rand(3, 1, 4, 4)
    enlarged = torch.nn.functional.interpolate(x, (8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(sized(x), sized.adapted(enlarged))


def test_another_classifier_is_left_out_by_name(tmp_path: Path) -> None:
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=7, in_chans=1, **SMALL)
    save_file(tensors(plain), tmp_path / "vit.safetensors")
    adapted = network()
    with pytest.raises(ValueError, match=r"modules_to_save\.default\.weight is \(7, 192\) instead of \(10, 192\)"):
        load_weights(adapted, tmp_path / "vit.safetensors")
    load_weights(adapted, tmp_path / "vit.safetensors", ["*head*"])
    weight = adapted.get_parameter("adapted.base_model.model.blocks.0.attn.qkv.base_layer.weight")
    assert torch.equal(weight, plain.get_parameter("blocks.0.attn.qkv.weight"))


def test_a_file_of_another_network_names_what_differs(tmp_path: Path) -> None:
    save_file({"head.weight": torch.zeros(10, 192), "stem.weight": torch.zeros(3)}, tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"missing in the file: .*patch_embed.*unknown to the network: stem\.weight"):
        load_weights(network(), tmp_path / "vit.safetensors")


def test_weights_with_adapters_are_taken_as_they_are(tmp_path: Path) -> None:
    trained, other = network(), network()
    torch.nn.init.ones_(trained.get_parameter("adapted.base_model.model.blocks.0.attn.qkv.lora_B.default.weight"))
    save_file(tensors(trained), tmp_path / "trained.safetensors")
    load_weights(other, tmp_path / "trained.safetensors")
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in trained.state_dict().items())


def test_logits_are_calm_at_the_start_and_the_classifier_can_start_from_labels() -> None:
    adapted, x, labels = network(3), torch.randn(12, 1, 8, 8), torch.arange(12) % 3
    assert not adapted(x).any()
    start_head(adapted, 3, [x], labels)
    assert (adapted.eval()(x).argmax(1) == labels).float().mean() > 0.6
