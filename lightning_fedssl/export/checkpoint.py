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
        ValueError: If the file is damaged or was written by an earlier version, or if its method or its network cannot
            be imported by name.
    """
    description: Description | None = checkpoint_file.load(path).get("model")
    if description is None:
        raise ValueError(
            f"ckpt_path: {path} was written by a version that did not describe the network; resume the run from it "
            "with fit --ckpt_path, which writes a checkpoint that can be exported"
        )
    if description["network"]["class_path"] is None:
        raise ValueError(
            f"ckpt_path: the network in {path} has no import path (a lambda, a function inside a function, or a module "
            "that was built before the run), so it cannot be built again; use the model.safetensors that fit wrote"
        )
    algorithm = _algorithm_class(description["algorithm"])
    model = algorithm.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    return model.configured_network().eval(), description


def _algorithm_class(class_path: str) -> type[FederatedAlgorithm]:
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"ckpt_path: the checkpoint's method {class_path} cannot be imported ({error}); run the command where it "
            "can, for example in the folder of the file that defines it"
        ) from error
    if not (isinstance(found, type) and issubclass(found, FederatedAlgorithm)):
        raise ValueError(f"ckpt_path: {class_path}, which the checkpoint names as its method, is no FederatedAlgorithm")
    return found
