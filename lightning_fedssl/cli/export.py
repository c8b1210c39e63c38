"""The ``export`` command: writes the trained network of a checkpoint for programs that do not use this package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lightning_fedssl.cli.config_sources import content_of, lookup, options_of, with_options_last
from lightning_fedssl.cli.parser import ConfigFile, PlainArgumentParser, refuse_json
from lightning_fedssl.export import export, network_of
from lightning_fedssl.export.description import dtype_of
from lightning_fedssl.storage import checkpoint_file

USAGE = "lightning-fedssl export [--ckpt_path PATH] [--format FORMAT] [--output FOLDER] [--default_root_dir FOLDER]"

DESCRIPTION = """\
Writes the trained network of a checkpoint. It reads the checkpoint alone: no configuration and no data are needed.

  safetensors    model.safetensors and model.json: the weights, and the network, classes, normalisation and metrics
  torch_export   model.pt2, which needs PyTorch alone and has the normalisation inside
  onnx           model.onnx, with the normalisation inside; needs pip install ".[onnx]" in a checkout of this package
  hub            a folder for a model hub: the files of the first two formats and a model card

  lightning-fedssl export --ckpt_path best --format torch_export
  lightning-fedssl export --ckpt_path lightning_logs/version_0/checkpoints/last.ckpt --format hub --output my_model

Export only a checkpoint that you trust: it names the class of the network, and that class is imported.
"""

_UNREAD = ("seed_everything", "json", "model", "data")
"""Keys of a configuration of ``fit`` that ``export`` ignores."""


def main(arguments: Sequence[str]) -> int:
    """Run ``export``.

    Args:
        arguments: What follows the command's name.

    Returns:
        The exit code, 0.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If the checkpoint cannot be exported in this format.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    options = parser().parse_args(list(arguments))
    refuse_json(options, "leave it out")
    root = options.default_root_dir or _root_of_fit(arguments) or "."
    checkpoint = checkpoint_file.find(options.ckpt_path or "best", Path(root))
    network, description = network_of(checkpoint)
    folder = Path(options.output) if options.output else _run_folder(checkpoint) / "export"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"read: {checkpoint}, round {description['rounds']}")
    for path in export(network, description, folder, options.format):
        console.print(f"written: {path}")
    trained, written = description.get("trained_dtype"), dtype_of(network)
    if trained not in (None, written):
        console.print(f"the run trained {trained} weights; they are written as {written}")
    return 0


def parser() -> PlainArgumentParser:
    """The parser: which checkpoint, which format, and where to write."""
    made = PlainArgumentParser(
        prog="lightning-fedssl export", usage=USAGE, description=DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, default_env=True, env_prefix="FEDSSL_EXPORT_",
    )  # fmt: skip
    made.add_argument("-c", "--config", action=ConfigFile, help="A file with these keys, or a configuration of fit.")
    made.add_argument(
        "--ckpt_path", type=str | None, default="best", help="A checkpoint, or best or last of the newest run."
    )
    made.add_argument(
        "--format", type=Literal["safetensors", "torch_export", "onnx", "hub"], default="safetensors", help="See above."
    )
    made.add_argument("--output", type=str | None, default=None, help="Output folder; default: export/ in the run.")
    made.add_argument("--default_root_dir", type=str | None, default=None, help="Folder to search for best and last.")
    for key in ("trainer", *_UNREAD):
        made.add_argument(f"--{key}", type=Any, default=None, help=argparse.SUPPRESS)
    made.options = ("config", "ckpt_path", "format", "output", "default_root_dir")
    return made


def _root_of_fit(arguments: Sequence[str]) -> str | None:
    """The last ``trainer.default_root_dir``, as ``fit`` takes it: as an option, or in a configuration."""
    found = None
    for option, value in options_of(with_options_last(arguments)):
        content = {option: value} if option != "config" else content_of(option, value)
        found = next(lookup(content, "trainer.default_root_dir"), found)
    return found


def _run_folder(checkpoint: Path) -> Path:
    folder = checkpoint.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder
