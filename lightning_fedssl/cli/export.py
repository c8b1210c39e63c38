"""The ``export`` command: writes the trained network of a checkpoint for programs that do not use
this package.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_fedssl.cli.parser import ConfigFile, Parser
from lightning_fedssl.export import export, network_of
from lightning_fedssl.export.description import dtype_of
from lightning_fedssl.storage import checkpoint_file

DESCRIPTION = """\
Writes the trained network of a checkpoint; no data are needed. Only classes of this package,
torch, torchvision, timm and peft are built; your own where --trust names their module.

  lightning-fedssl export --config semifl_digits.yaml --ckpt_path best --format hub \\
      --output my_model
"""

FORMAT = """\
safetensors: weights and model.json. torch_export: model.pt2, which needs PyTorch alone, and
model.json. onnx: model.onnx, likewise. hub: a folder for a model hub, with a model card."""

TEXTS = {
    "ckpt_path": "A checkpoint, or best or last of the newest run; left out: its chosen.ckpt "
    "(LabelsAlone), else best.",
    "output": "Output folder; default: export/ in the run.",
    "default_root_dir": "Folder to search for best and last.",
}
"""Options that take a text, and their help."""


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
    checkpoint = checkpoint_of(options)
    network, description = network_of(checkpoint, options.trust)
    folder = Path(options.output or checkpoint.parent.parent / "export")
    print(
        f"read: {checkpoint}, {description['algorithm'].rpartition('.')[2]}, round "
        f"{description['rounds']}"
    )
    for path in export(network, description, folder, options.format):
        print(f"written: {path}")
    trained = description.get("trained_dtype")
    written = dtype_of(network)
    if trained not in (None, written):
        print(f"the run trained {trained} weights; they are written as {written}")
    return 0


def checkpoint_of(options: Any) -> Path:
    """The checkpoint that options name; if none is named ``chosen``, else ``best``.

    Args:
        options: What :func:`parser` has parsed.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
    """
    root = Path(options.default_root_dir or (options.trainer or {}).get("default_root_dir") or ".")
    try:
        return checkpoint_file.find(options.ckpt_path or "chosen", root)
    except FileNotFoundError:
        return checkpoint_file.find(options.ckpt_path or "best", root)


class MergedFile(ConfigFile):
    """``--config`` of ``export``: keys of ``trainer`` that the file does not name stay, as in
    ``fit``.
    """

    def __call__(
        self, parser: Any, cfg: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Merge the file into the configuration; jsonargparse replaces a whole mapping."""
        before = cfg.get("trainer") or {}
        super().__call__(parser, cfg, values, option_string)
        cfg.trainer = {**before, **(cfg.trainer or {})}


def parser(command: str = "export", description: str = DESCRIPTION) -> Parser:
    """The parser: which checkpoint, which format, and where to write.

    Args:
        command: The command.
        description: What its help says.
    """
    made = Parser.of_command(command, description)
    made.add_argument(
        "-c",
        "--config",
        action=MergedFile,
        help="A file with these keys, or a configuration of fit.",
    )
    made.add_argument(
        "--format",
        type=Literal["safetensors", "torch_export", "onnx", "hub"],
        default="safetensors",
        help=FORMAT,
    )
    for name, text in TEXTS.items():
        made.add_argument(f"--{name}", type=str | None, help=text)
    made.add_argument(
        "--trust",
        nargs="+",
        default=[],
        help="Modules of your own whose classes and functions the checkpoint may name.",
    )
    made.add_argument("--trainer", type=dict[str, Any] | None, help=argparse.SUPPRESS)
    for unread in ("seed_everything", "model", "data"):
        made.add_argument(f"--{unread}", type=Any, help=argparse.SUPPRESS)
    return made
