"""The formats that ``lightning-fedssl export`` writes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedssl.export.description import Description
from lightning_fedssl.export.model_card import model_card
from lightning_fedssl.export.model_file import DESCRIPTION, described, save_model
from lightning_fedssl.functional.dictionaries import first_number
from lightning_fedssl.storage.files import write_bytes
from lightning_fedssl.storage.optional import optional

FORMATS = ("safetensors", "torch_export", "onnx", "hub")


class NormalizedNetwork(nn.Module):
    """A network with the normalisation in front: it takes pixels scaled to 0..1, or numbers as the
    data set holds them, and measured numbers are predicted in the unit of the data.

    Args:
        network: The trained network.
        mean: Mean per first dimension of a sample: channel or feature.
        std: Standard deviation, likewise.
        dimensions: Dimensions of a sample: 3 for images, 2 for signals, 1 for tables.
        unit: ``mean`` and ``std`` of predicted numbers, empty of logits.
    """

    mean: Tensor
    std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        network: nn.Module,
        mean: list[float],
        std: list[float],
        dimensions: int = 3,
        unit: Mapping[str, float | list[float]] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.has_unit = bool(unit)
        weight = first_number(network.parameters())
        for name, numbers in (unit or {}).items():
            tensor = torch.tensor(numbers, dtype=weight.dtype, device=weight.device)
            self.register_buffer(f"target_{name}", tensor)
        for name, values in (("mean", mean), ("std", std)):
            tensor = torch.tensor(values, dtype=weight.dtype, device=weight.device)
            self.register_buffer(name, tensor.reshape(-1, *[1] * (dimensions - 1)))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)``, or predicted numbers, of samples ``(batch, ...)``."""
        outputs: Tensor = self.network((images - self.mean) / self.std)
        return outputs * self.target_std + self.target_mean if self.has_unit else outputs


def export(network: nn.Module, description: Description, folder: Path, format: str) -> list[Path]:
    """Write a trained network in one of the :data:`FORMATS`.

    Args:
        network: The network.
        description: What :func:`~lightning_fedssl.export.describe_model` returned.
        folder: The output folder; it is made.
        format: ``safetensors``; ``torch_export``: ``model.pt2``, which PyTorch runs without the
            network's class; ``onnx``: ``model.onnx``, with input ``images`` and output ``logits``
            (or the predicted numbers), each with ``model.json``; ``hub``: the files of the first
            two and a model card.

    Returns:
        The files.

    Raises:
        ValueError: If the format is unknown, needs a package that is missing, or cannot hold this
            network.
        OSError: If a file cannot be written; an older one is left as it was.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format}: give one of {', '.join(FORMATS)}")
    if format == "onnx":
        optional("onnx"), optional("onnxscript")
    folder.mkdir(parents=True, exist_ok=True)
    contents = {}
    if format == "hub":
        contents["README.md"] = model_card(description).encode()
    if format in ("torch_export", "hub"):
        contents["model.pt2"] = _torch_export(network, description)
    if format == "onnx":
        contents["model.onnx"] = _onnx(network, description)
    if format in ("torch_export", "onnx"):  # classes, and how rows of a table become numbers
        contents[DESCRIPTION] = described(network, description)
    for name, content in contents.items():
        write_bytes(folder / name, content)
    saved = save_model(network, description, folder) if format in ("safetensors", "hub") else []
    return [*saved, *map(folder.joinpath, contents)]


def _torch_export(network: nn.Module, description: Description) -> bytes:
    whole, images, shapes = _with_example(network, description)
    try:
        program = torch.export.export(whole, (images,), dynamic_shapes=shapes)
    except Exception as error:
        raise ValueError(f"torch.export cannot trace {type(network).__name__}: {error}") from error
    content = io.BytesIO()  # PyTorch's own writer of files aborts the process if the disk is full
    torch.export.save(program, content)
    return content.getvalue()


def _onnx(network: nn.Module, description: Description) -> bytes:
    whole, images, shapes = _with_example(network, description)
    program = torch.onnx.export(
        whole,
        (images,),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=shapes,
        verbose=False,
    )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def _with_example(
    network: nn.Module, description: Description
) -> tuple[NormalizedNetwork, Tensor, dict[str, Any]]:
    """The network with its normalisation, two samples, and that their number may vary."""
    in_shape = description["network"]["in_shape"]
    whole = NormalizedNetwork(
        network,
        **description["normalization"],
        dimensions=len(in_shape),
        unit=description.get("target_normalization"),
    ).eval()
    images = torch.full((2, *in_shape), 0.5, dtype=whole.mean.dtype)
    return whole, images, {"images": {0: torch.export.Dim("batch")}}
