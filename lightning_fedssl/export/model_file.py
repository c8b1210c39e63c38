"""The files of a trained network, for programs that do not use this package."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from safetensors.torch import load_file, save
from torch import Tensor, nn

from lightning_fedssl.export.description import Description, dtype_of
from lightning_fedssl.functional.by_name import first_number, mapped, only
from lightning_fedssl.functional.device_copies import on_cpu
from lightning_fedssl.models import build_network
from lightning_fedssl.storage.files import as_json, write_bytes
from lightning_fedssl.storage.named_value import object_of

WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
CONSTRUCTOR = "config.json"
"""The arguments of the network's constructor; Hugging Face's ``PyTorchModelHubMixin`` reads them.
"""


def save_model(network: nn.Module, description: Description, folder: Path) -> list[Path]:
    """Write a network's weights and its description; each file is written completely or not at all.

    The description gets ``dtype``, the type of the weights in the file. A metric that is NaN or
    infinite, which JSON does not have, becomes ``null``.

    Args:
        network: Its parameters and buffers are written under their own names.
        description: What :func:`~lightning_fedssl.export.describe_model` returned.
        folder: The folder; it is made.

    Returns:
        The files.

    Raises:
        OSError: If a file cannot be written.
    """
    tensors = mapped(Tensor.contiguous, on_cpu(network.state_dict()))
    built = description["network"]
    of_data = {name: built[name] for name in ("num_classes", "in_shape") if built[name]}
    contents = {
        # One key: of several the order would change from run to run.
        WEIGHTS: save(tensors, metadata={"format": "pt"}),
        DESCRIPTION: _json({**description, "dtype": dtype_of(network)}),
        CONSTRUCTOR: _json({**built["init_args"], **of_data}),
    }
    for name, content in contents.items():
        write_bytes(folder / name, content)
    return list(map(folder.joinpath, contents))


def _json(values: dict[str, Any]) -> bytes:
    return f"{as_json(values, indent=2)}\n".encode()


def load_network(folder: str | Path, trust: Sequence[str] = ()) -> tuple[nn.Module, Description]:
    """The network of ``model.safetensors`` and ``model.json`` in a folder, in evaluation mode, and
    the description.

    The folder may be somebody else's: only networks of this package, torch, torchvision, timm and
    peft are built.

    Args:
        folder: The folder, for example ``lightning_logs/version_0/checkpoints``.
        trust: Names of modules of which the file may name any class or function that they define,
            such as ``["my_networks"]``.

    Raises:
        FileNotFoundError: If one of the two files is missing.
        ValueError: If the network's class is not known by name or not trusted, or the weights do
            not fit it.
    """
    weights, text = (Path(folder) / name for name in (WEIGHTS, DESCRIPTION))
    try:
        description = json.loads(text.read_text(encoding="utf-8"))
        network = build_described(description["network"], trust)
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{text} is damaged, or no description of a network ({error!r}): export the run again"
        ) from error
    state = load_file(weights)
    network.to(first_number(state.values()).dtype)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"{weights} does not fit the network that {text} names: {error}"
        ) from error
    return network.eval(), description


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether a metric has a value: neither NaN nor infinite, nor the ``null`` of a file that was
    read.

    Args:
        value: The metric.
    """
    return value is not None and math.isfinite(value)


def build_described(network: dict[str, Any], trust: Sequence[str]) -> nn.Module:
    """A network of the class and with the arguments that a description names, with new weights.

    Args:
        network: The entry ``network`` of a description.
        trust: See :func:`load_network`.

    Raises:
        ValueError: If the class is not known by name, not trusted or no network.
    """
    if network["class_path"] is None:
        raise ValueError(
            "the network's class has no import path (a function inside a function, a lambda, or a "
            "network that was built before the run), so it cannot be built again; load "
            "model.safetensors into a network of your own"
        )
    factory = object_of(only(network, ("class_path", "init_args")), trust)
    out_shape = tuple(network.get("out_shape", ()))
    return build_network(factory, network["num_classes"], tuple(network["in_shape"]), out_shape)
