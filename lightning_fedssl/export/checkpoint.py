"""The trained network of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.export.description import Description
from lightning_fedssl.export.whole import with_backbone
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.storage.named_value import imported


def network_of(path: Path, trust: Sequence[str] = ()) -> tuple[nn.Module, Description]:
    """The trained network of a checkpoint, in evaluation mode, and its description.

    A network that was trained on features has the backbone in front.

    Args:
        path: The checkpoint.
        trust: Names of modules; the checkpoint may name any class or function that they define.
            Without them, only those of this package, torch, torchvision, timm and peft are built.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, has weights that are not finite, or was written by an
            earlier version; if its method or its network cannot be imported by name, or is not
            trusted.
    """
    description = checkpoint_file.load(path)["model"]
    if description["network"]["class_path"] is None:
        raise ValueError(
            f"ckpt_path: {path} does not name the class of its network: it has no import path (a "
            "lambda, a module that was built before the run); use the model.safetensors that fit "
            "wrote"
        )
    algorithm = imported(description["algorithm"], (FederatedAlgorithm,), trust)
    if not (isinstance(algorithm, type) and issubclass(algorithm, FederatedAlgorithm)):
        raise ValueError(
            f"ckpt_path: the checkpoint names {description['algorithm']} as its method, but that "
            "is another kind of class; use a checkpoint written by this package"
        )
    model = algorithm.load_from_checkpoint(path, map_location="cpu", trust=trust)
    network = model.configured_network().eval()
    if "backbone" in description:
        return with_backbone(network, description, trust)
    return network, description
