from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_fedssl.models.teacher import Teacher


def test_teacher_shares_no_storage_and_follows_weights_and_buffers() -> None:
    network: Any = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    teacher: Any = Teacher({"network": network})
    shared = {t.data_ptr() for t in (*network.parameters(), *network.buffers())}
    assert not shared & {t.data_ptr() for t in (*teacher.parameters(), *teacher.buffers())}
    before = {name: t.clone() for name, t in teacher["network"].state_dict().items()}
    network.train()
    network(torch.randn(4, 1, 2, 2))
    with torch.no_grad():
        network[0].weight.add_(1.0)
    teacher.follow({"network": network}, 0.9)
    for name, t in teacher["network"].state_dict().items():
        s = network.state_dict()[name]
        expected = 0.9 * before[name] + 0.1 * s if t.is_floating_point() else s
        torch.testing.assert_close(t, expected)
    assert not any(p.requires_grad for p in teacher.parameters())
    assert not teacher.train().training
    assert not teacher["network"][1].training
