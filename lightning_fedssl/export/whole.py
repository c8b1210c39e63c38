"""A frozen backbone and the network that was trained on its features, as one network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedssl.export.description import Description
from lightning_fedssl.functional.dictionaries import select
from lightning_fedssl.models.network import NetworkFactory, build_network
from lightning_fedssl.storage.named_value import object_of


class WithBackbone(nn.Module):
    """Backbone, normalisation of its features, and the trained network.

    Args:
        backbone: The class of the backbone with its arguments, or a function that is one.
        head: The trained network's class with its arguments.
        width: Number of features.
        num_classes: Number of classes.
        in_shape: Shape of a sample.
    """

    def __init__(
        self,
        backbone: Callable[..., Any],
        head: NetworkFactory,
        width: int,
        num_classes: int,
        in_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        is_class = isinstance(getattr(backbone, "func", backbone), type)
        self.backbone = backbone() if is_class else backbone
        with torch.no_grad():
            self.backbone(torch.zeros(2, *in_shape))  # random kernels are drawn for the shape
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.head = build_network(head, num_classes, (width,))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of samples ``(batch, ...)``."""
        logits: Tensor = self.head((self.backbone(x) - self.mean) / self.std)
        return logits


def with_backbone(
    network: nn.Module, description: Description, trust: Sequence[str] = ()
) -> tuple[nn.Module, Description]:
    """The network that takes samples, and its description, for one that takes features.

    Args:
        network: The trained network.
        description: Its description, with the entry ``backbone``.
        trust: See :func:`~lightning_fedssl.export.load_network`.

    Raises:
        ValueError: If the backbone has no import path, is not trusted or cannot be built again, as
            where its file of weights is missing.
    """
    described = dict(description)
    samples = described.pop("backbone")
    head = description["network"]
    of_backbone, of_head = (select(part, ("class_path", "init_args")) for part in (samples, head))
    if of_backbone["class_path"] is None:
        raise ValueError(
            "export: the backbone has no import path (a lambda, or a network that was built before "
            "the run); give data.backbone as a class, or a function, of a module"
        )
    (width,), in_shape = head["in_shape"], samples["in_shape"]
    backbone, factory = object_of(of_backbone, trust), object_of(of_head, trust)
    whole = WithBackbone(backbone, factory, width, head["num_classes"], tuple(in_shape))
    whole.head = network
    for name, values in description["normalization"].items():
        whole.get_buffer(name).copy_(torch.tensor(values))
    # The weights are in the file that is written, so that of the backbone is not needed again.
    if "weights" in of_backbone["init_args"]:
        of_backbone["init_args"] = {**of_backbone["init_args"], "weights": None}
    described["network"] = {
        "class_path": f"{WithBackbone.__module__}.{WithBackbone.__qualname__}",
        "init_args": {"backbone": of_backbone, "head": of_head, "width": width},
        "num_classes": head["num_classes"],
        "in_shape": in_shape,
    }
    described |= select(samples, ("input", "normalization"))
    return whole.eval(), described
