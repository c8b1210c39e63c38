"""The formats that ``lightning-fedssl export`` writes."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fedssl.export.description import Description
from lightning_fedssl.export.model_card import model_card
from lightning_fedssl.export.model_file import DESCRIPTION, WEIGHTS, save_model
from lightning_fedssl.storage.files import write_synced


class NormalizedNetwork(nn.Module):
    """A network with the normalisation in front: it takes pixels scaled to 0..1, or numbers as the data set holds them.

    Args:
        network: The trained network.
        mean: Mean per first dimension of a sample: channel or feature.
        std: Standard deviation, likewise.
        dimensions: Dimensions of a sample: 3 for images, 2 for signals, 1 for tables.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: list[float], std: list[float], dimensions: int = 3) -> None:
        super().__init__()
        self.network = network
        weight = next((p for p in network.parameters() if p.is_floating_point()), torch.empty(0))
        for name, values in (("mean", mean), ("std", std)):
            tensor = torch.tensor(values, dtype=weight.dtype, device=weight.device)
            self.register_buffer(name, tensor.reshape(-1, *[1] * (dimensions - 1)))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of samples ``(batch, ...)``."""
        logits: Tensor = self.network((images - self.mean) / self.std)
        return logits


def export(network: nn.Module, description: Description, folder: Path, format: str) -> list[Path]:
    """Write a trained network in one of the :data:`FORMATS`.

    Args:
        network: The network.
        description: What :func:`~lightning_fedssl.export.describe_model` returned.
        folder: The output folder; it is made.
        format: ``safetensors``, ``torch_export``, ``onnx`` or ``hub``.

    Returns:
        The files.

    Raises:
        ValueError: If the format is unknown, needs a package that is missing, or cannot hold this network.
        OSError: If a file cannot be written; an older one is left as it was.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format}: give one of {', '.join(FORMATS)}")
    if format == "onnx":
        _require_onnx()
    folder.mkdir(parents=True, exist_ok=True)
    return FORMATS[format](network.eval(), description, folder)


def _safetensors(network: nn.Module, description: Description, folder: Path) -> list[Path]:
    save_model(network, description, folder)
    return [folder / WEIGHTS, folder / DESCRIPTION]


def _torch_export(network: nn.Module, description: Description, folder: Path) -> list[Path]:
    """``model.pt2``, which PyTorch runs without the network's class: ``torch.export.load(path).module()``."""
    whole, images = _with_example(network, description)
    try:
        program = torch.export.export(whole, (images,), dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    except Exception as error:
        raise ValueError(f"torch.export cannot trace {type(network).__name__}: {error}") from error
    content = io.BytesIO()  # PyTorch's own writer of files aborts the process if the disk is full
    torch.export.save(program, content)
    write_synced(folder / "model.pt2", lambda file: file.write(content.getbuffer()))
    return [folder / "model.pt2"]


def _require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"format onnx: {' and '.join(missing)} cannot be imported; install what the format needs, in a checkout of "
            'this package: pip install ".[onnx]"'
        )


def _onnx(network: nn.Module, description: Description, folder: Path) -> list[Path]:
    """``model.onnx``, with input ``images`` and output ``logits``; the batch size is variable."""
    whole, images = _with_example(network, description)
    program = torch.onnx.export(
        whole, (images,), dynamo=True, input_names=["images"], output_names=["logits"],
        dynamic_shapes={"images": {0: torch.export.Dim("batch")}}, verbose=False,
    )  # fmt: skip
    assert program is not None
    content = program.model_proto.SerializeToString()
    write_synced(folder / "model.onnx", lambda file: file.write(content))
    return [folder / "model.onnx"]


def _hub(network: nn.Module, description: Description, folder: Path) -> list[Path]:
    """A folder for a model hub: weights, description, and a model card that names data, metrics and citation."""
    files = _safetensors(network, description, folder)
    card = folder / "README.md"
    write_synced(card, lambda file: file.write(model_card(description).encode()))
    return [*files, *_torch_export(network, description, folder), card]


FORMATS: dict[str, Callable[[nn.Module, Description, Path], list[Path]]] = {
    "safetensors": _safetensors,
    "torch_export": _torch_export,
    "onnx": _onnx,
    "hub": _hub,
}
"""The function that writes each format."""


def _with_example(network: nn.Module, description: Description) -> tuple[NormalizedNetwork, Tensor]:
    """The network with its normalisation, and two samples of the value 0.5: grey images."""
    mean, std = description["normalization"]["mean"], description["normalization"]["std"]
    in_shape = description["network"]["in_shape"]
    whole = NormalizedNetwork(network, mean, std, len(in_shape)).eval()
    return whole, torch.full((2, *in_shape), 0.5, dtype=whole.mean.dtype)
