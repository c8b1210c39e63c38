"""Small networks, and methods with other arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_fedssl.models import CNN


def again(model: Any, **changes: Any) -> Any:
    """The same method with other arguments."""
    return type(model)(**{**model.hparams, **changes})


def small(**kwargs: Any) -> CNN:
    defaults: dict[str, Any] = {"width": 4, "norm": "batch", "num_classes": 3, "in_shape": (1, 8, 8)}
    return CNN(**defaults | kwargs)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in module.state_dict().items()}
