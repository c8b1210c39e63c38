"""Packages that not every installation has, and the extras that install them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXTRAS = {
    "datasets": "huggingface",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "flwr_datasets": "partitioners",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "peft": "peft",
    "timm": "timm",
}


def optional(name: str) -> Any:
    """A module of an optional package.

    Raises:
        ModuleNotFoundError: It is not installed; the message has the command that installs it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        text = how_to_install(error.name) or str(error)
        raise ModuleNotFoundError(text, name=error.name) from error


def how_to_install(module: str | None) -> str:
    """What to do about a missing module; empty if it belongs to no extra.

    Args:
        module: Its name.
    """
    package = str(module).partition(".")[0]
    if package not in _EXTRAS:
        return ""
    return (
        f'{package} is not installed: pip install ".[{_EXTRAS[package]}]" in a checkout of '
        "lightning_fedssl"
    )
