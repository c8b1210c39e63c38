from __future__ import annotations

import torch

from lightning_fedssl.models import CNN13


def test_cnn13_has_the_published_size_and_nine_convolutions() -> None:
    with torch.device("meta"):
        network = CNN13()
    assert sum(p.numel() for p in network.parameters()) == 3_121_802
    assert [conv.get_parameter("weight").shape[:1] for conv in network.convs] == [
        (128,), (128,), (128,), (256,), (256,), (256,), (512,), (256,), (128,)
    ]  # fmt: skip
    small = CNN13(num_classes=4, in_shape=(1, 12, 12), width=2)
    small.eval()
    assert small(torch.rand(3, 1, 12, 12)).shape == (3, 4)


def test_cnn13_shrinks_maps_as_mean_teacher_s_does() -> None:
    network, sizes = CNN13(width=2).eval(), []
    for conv in network.convs:
        conv.register_forward_hook(lambda module, args, output: sizes.append(output.shape[-1]))
    network(torch.rand(1, 3, 32, 32))
    assert sizes == [32, 32, 32, 16, 16, 16, 6, 6, 6]


def test_cnn13_drops_values_in_training_only() -> None:
    network, x = CNN13(width=8, norm="group"), torch.rand(2, 3, 32, 32)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
