"""The files of a trained network, for programs that do not use this package."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from lightning_fedssl.data.sources.base import read_csv
from lightning_fedssl.data.sources.reading import Reading
from lightning_fedssl.data.table_rows import Input, encode_rows
from lightning_fedssl.export.description import Description, dtype_of
from lightning_fedssl.functional.device_copies import on_cpu
from lightning_fedssl.functional.dictionaries import exclude, first_number, map_values, select
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
    tensors = map_values(Tensor.contiguous, on_cpu(network.state_dict()))
    built = description["network"]
    of_data = {name: built[name] for name in ("num_classes", "in_shape") if built[name]}
    contents = {
        # One key: of several the order would change from run to run.
        WEIGHTS: save(tensors, metadata={"format": "pt"}),
        DESCRIPTION: described(network, description),
        CONSTRUCTOR: _json({**built["init_args"], **of_data}),
    }
    for name, content in contents.items():
        write_bytes(folder / name, content)
    return list(map(folder.joinpath, contents))


def described(network: nn.Module, description: Description) -> bytes:
    """The content of ``model.json``: without the settings, which may name files.

    Args:
        network: The network.
        description: What :func:`~lightning_fedssl.export.describe_model` returned.
    """
    public = exclude(description, ["settings"])
    return _json({**public, "dtype": dtype_of(network)})


def _json(values: dict[str, Any]) -> bytes:
    return f"{as_json(values, indent=2)}\n".encode()


class LoadedNetwork(NamedTuple):
    """A trained network of a file.

    Attributes:
        network: In evaluation mode; it takes normalised samples.
        description: The content of ``model.json``.
    """

    network: nn.Module
    description: Description

    def predict(self, rows: Rows) -> list[dict[str, float]]:
        """The probability of each class by its name, for every row of a table; of a regression the
        predicted numbers.

        Args:
            rows: A CSV file, a data frame, or mappings from column names to cells: texts or
                numbers, None for a missing one. Columns that the model does not know play no part.

        Raises:
            ValueError: If a column is missing, or the model is not one of a table.
        """
        samples = encode_rows(rows_of(rows), self.inputs)
        weight = first_number(self.network.parameters())
        normal = map_values(samples.new_tensor, self.description["normalization"])
        with torch.no_grad():
            x = ((samples - normal["mean"]) / normal["std"]).to(weight)
            outputs = self.network(x).double()
        task = self.description["task"]
        if task == "Classification":
            outputs = outputs.softmax(1)
        elif task == "MultiLabel":
            outputs = outputs.sigmoid()
        elif unit := self.description.get("target_normalization"):
            outputs = outputs * outputs.new_tensor(unit["std"]) + outputs.new_tensor(unit["mean"])
        names = self.description["class_names"]
        return [dict(zip(names, row, strict=True)) for row in outputs.tolist()]

    @property
    def inputs(self) -> list[Input]:
        """How the cells of a row become the numbers that the network takes.

        Raises:
            ValueError: If the model is not one of a table.
        """
        if not self.description.get("inputs"):
            raise ValueError(
                "predict takes rows of a table, and this model was not trained on a CSV file by "
                "data.dataset: Table; give normalised samples to its network"
            )
        return list(self.description["inputs"])


Rows = str | Path | Sequence[Mapping[str, Any]] | Any
"""A CSV file, mappings, or a data frame."""


def rows_of(rows: Rows) -> Sequence[Mapping[str, Any]]:
    """New rows as mappings from column names to cells.

    Args:
        rows: A CSV file, mappings, or a data frame.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(rows, (str, Path)):
        rows = read_csv(rows, (), Reading("rows"))
    records = list(rows.to_dict("records") if hasattr(rows, "to_dict") else rows)
    if not records:
        raise ValueError("there is no row to predict")
    return records


def load_network(folder: str | Path, trust: Sequence[str] = ()) -> LoadedNetwork:
    """The network of ``model.safetensors`` and ``model.json`` in a folder, in evaluation mode, and
    the description; of a table also :meth:`LoadedNetwork.predict` for new rows.

    The folder may be somebody else's: only networks of this package, torch, torchvision, timm and
    peft are built.

    Args:
        folder: The folder, for example ``lightning_logs/version_0/checkpoints``.
        trust: Names of modules, such as ``["my_networks"]``; the file may name any class or
            function that they define.

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
    return LoadedNetwork(network.eval(), description)


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
    factory = object_of(select(network, ("class_path", "init_args")), trust)
    out_shape = tuple(network.get("out_shape", ()))
    return build_network(factory, network["num_classes"], tuple(network["in_shape"]), out_shape)
