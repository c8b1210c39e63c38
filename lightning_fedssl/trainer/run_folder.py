"""The folder of a run: its version number, its loggers, and the file of predictions."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor


def reserve_version(root: str) -> int:
    """Make the next free folder ``lightning_logs/version_N`` and return N; two runs never get the same folder.

    Raises:
        ValueError: If the folder cannot be made.
    """
    folder = Path(root) / "lightning_logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"trainer.default_root_dir: the folder {folder} cannot be made ({error.strerror}); give a folder that you "
            "may write to"
        ) from error
    numbers = [int(p.name[8:]) for p in folder.glob("version_*") if p.name[8:].isdecimal()]
    for version in count(max(numbers, default=-1) + 1):
        try:
            (folder / f"version_{version}").mkdir()
        except FileExistsError:
            continue
        return version
    raise AssertionError("there is no last number")


def release(folder: Path) -> None:
    """Remove the folder of a command that was refused before it had done anything."""
    shutil.rmtree(folder, ignore_errors=True)


def default_loggers(root: str, version: int) -> list[Logger]:
    """TensorBoard and CSV in one folder below ``root``."""
    board = TensorBoardLogger(root, version=version, default_hp_metric=False)
    return [board, CSVLogger(root, version=version, flush_logs_every_n_steps=1)]


def as_list(logger: Logger | list[Logger] | None) -> list[Logger]:
    """The user's loggers."""
    return [] if logger is None else [logger] if isinstance(logger, Logger) else list(logger)


def write_predictions(
    probabilities: Tensor, path: Path, class_names: Sequence[str] = (), files: Sequence[str] = ()
) -> None:
    """Write the most probable class and all probabilities of each image as CSV.

    Args:
        probabilities: ``(images, classes)``.
        path: The file; its folder is made.
        class_names: A name for each class; with none, there is no column ``class_name``.
        files: A file for each image; with none, there is no column ``file``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ["file"] * bool(files) + ["prediction"] + ["class_name"] * bool(class_names)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *names, *(f"probability_{k}" for k in range(probabilities.shape[1]))])
        for index, (best, row) in enumerate(zip(probabilities.argmax(1).tolist(), probabilities.tolist(), strict=True)):
            cells = [*files[index : index + 1], best, *class_names[best : best + 1]]
            writer.writerow([index, *cells, *(f"{p:.6g}" for p in row)])
