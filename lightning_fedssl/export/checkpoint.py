"""The trained network of a checkpoint."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from torch import nn

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.export.description import Description
from lightning_fedssl.storage import checkpoint_file


def network_of(path: Path) -> tuple[nn.Module, Description]:
    """The trained network of a checkpoint, in evaluation mode, and its description.

    Args:
        path: The checkpoint.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, has weights that are not finite, or was written by an
            earlier version; if its method or its network cannot be imported by name.
    """
    description: Description | None = checkpoint_file.load(path).get("model")
    if description is None or description["network"]["class_path"] is None:
        raise ValueError(
            f"ckpt_path: {path} does not name the class of its network: it has no import path (a "
            "lambda, a module that "
            "was built before the run), or an earlier version wrote the file; use the "
            "model.safetensors that fit wrote"
        )
    module, _, name = description["algorithm"].rpartition(".")
    try:
        algorithm = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"ckpt_path: the checkpoint's method {module}.{name} cannot be imported: {error}"
        ) from error
    if not (isinstance(algorithm, type) and issubclass(algorithm, FederatedAlgorithm)):
        raise ValueError(
            f"ckpt_path: {module}.{name}, which the checkpoint names as its method, is none"
        )
    model = algorithm.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    return model.configured_network().eval(), description
