"""The folder of a run: its version number, its loggers, and the file of predictions."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor

from lightning_fedssl.storage.files import versions, write_table


class RunFolder:
    """The loggers of a trainer, and the folder in which they write.

    Args:
        logger: ``None`` or ``True``: TensorBoard and CSV, opened by the first command; ``False``:
            none; or the user's.
        writes: Whether anything is written; False drops all loggers.

    Attributes:
        loggers: The loggers.
        history: The scalars of the run by round, also of the rounds before it was resumed as far as
            a CSV file has them.
    """

    def __init__(self, logger: Logger | list[Logger] | bool | None, writes: bool) -> None:
        loggers = logger if isinstance(logger, list) else [logger]
        self.loggers = [one for one in loggers if writes and not isinstance(one, bool | None)]
        self._wants_default = logger in (None, True) and writes
        self._log_dir: str | None = None
        self._reserved: Path | None = None
        self._in_use = False
        self._has_run = False
        self.history: dict[int, dict[str, float]] = {}

    @property
    def log_dir(self) -> str | None:
        """The folder, the same on every rank once it is open; None without loggers.

        That of the first logger that brings one for this run alone. Where none does, as those of
        Weights & Biases and MLflow, it is the next ``lightning_logs/version_N``, from
        :meth:`open` on.
        """
        if self._log_dir is None:
            self._log_dir = next(filter(None, map(_folder_of_run, self.loggers)), None)
        return self._log_dir

    def begin_run(self) -> None:
        """Leave the folder of an earlier run, whose checkpoints this run would replace.

        Loggers of the user stay.
        """
        if self._has_run:
            self._forget()
        self._has_run = True
        self.history = {}

    def open(self, root: str, fabric: Fabric) -> None:
        """Make the folder and open the files of its loggers; every rank must call it.

        Args:
            root: The folder that holds the folders of all runs.
            fabric: The ranks; rank 0 chooses the folder.
        """
        if self.log_dir is None and (self.loggers or self._wants_default):
            version = fabric.broadcast(reserve_version(root) if fabric.is_global_zero else 0)
            self._reserved = Path(root) / f"lightning_logs/version_{version}"
            self._log_dir = str(self._reserved)
            self.loggers = self.loggers or [
                TensorBoardLogger(root, version=version, default_hp_metric=False),
                CSVLogger(root, version=version, flush_logs_every_n_steps=1),
            ]
        # ``experiment`` opens the files of a logger. CSV first: that logger refuses a folder that
        # is not empty.
        for logger in reversed(self.loggers):
            getattr(logger, "experiment", None)
        self._log_dir = fabric.broadcast(self.log_dir)

    def adopt(self, log_dir: str | None) -> None:
        """Take over the folder that spawned processes wrote."""
        self._log_dir = log_dir

    def use(self) -> None:
        """Keep the folder: a round or an evaluation begins."""
        self._in_use = True

    def remove_if_unused(self, fabric: Fabric) -> None:
        """Remove the folder of a command that was refused before it had done anything.

        The next one takes another.
        """
        if self._reserved is not None and not self._in_use:
            if fabric.is_global_zero:
                shutil.rmtree(self._reserved, ignore_errors=True)
            self._forget()

    def _forget(self) -> None:
        """Leave the folder; with the default loggers, the next command opens another."""
        self.loggers = [] if self._wants_default else self.loggers
        self._log_dir = self._reserved = None
        self._in_use = False

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write scalars to every logger; those of single classes to the CSV file alone."""
        self.history.setdefault(step, {}).update(metrics)
        curves = {name: value for name, value in metrics.items() if "/class_" not in name}
        for logger in self.loggers:
            is_table = isinstance(logger, CSVLogger)
            logger.log_metrics(metrics if is_table else curves, step=step)
            logger.save()

    def log_hyperparams(self, hyperparameters: dict[str, Any]) -> None:
        """Write the arguments of the algorithm to every logger."""
        for logger in self.loggers:
            logger.log_hyperparams(hyperparameters)

    def finalize(self, status: str) -> None:
        """Close the files of every logger."""
        for logger in self.loggers:
            logger.finalize(status)


def _folder_of_run(logger: Logger) -> str | None:
    """The folder that a logger has for one run; None if it has none, or one that it shares with
    others: the working directory, or the folder that all of its runs are in.
    """
    if logger.log_dir is None:
        return None
    shared = {Path().resolve(), Path(logger.save_dir or "").resolve()}
    return None if Path(logger.log_dir).resolve() in shared else logger.log_dir


def reserve_version(root: str) -> int:
    """Make the next free folder ``lightning_logs/version_N`` and return N.

    Two runs never get the same folder.

    Raises:
        ValueError: If the folder cannot be made.
    """
    folder = Path(root) / "lightning_logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"trainer.default_root_dir: the folder {folder} cannot be made ({error.strerror}); "
            "give a folder that you may write to"
        ) from error
    before = versions(Path(root))
    for version in count(int(before[-1].name[8:]) + 1 if before else 0):
        try:
            (folder / f"version_{version}").mkdir()
        except FileExistsError:
            continue
        return version
    raise AssertionError("count() never ends")


def write_predictions(
    probabilities: Tensor,
    path: Path,
    class_names: Sequence[str] = (),
    files: Sequence[str] = (),
    one_class: bool = True,
) -> None:
    """Write the most probable class and all probabilities of each image as CSV.

    Args:
        probabilities: ``(images, classes)``.
        path: The file; its folder is made.
        class_names: A name for each class, also in the head; with none, there is no column
            ``class_name``.
        files: A file for each image; with none, there is no column ``file``.
        one_class: Whether an image has one class; if not, the columns are the values alone, under
            the names of the classes.
    """
    names = ["image"] + ["file"] * bool(files)
    columns = list(class_names)
    if one_class or not columns:
        names_of_columns = columns or map(str, range(probabilities.shape[1]))
        columns = [f"probability_{name}" for name in names_of_columns]
    if one_class:
        names += ["prediction"] + ["class_name"] * bool(class_names)
    rows: list[list[object]] = [[*names, *columns]]
    most_probable = probabilities.argmax(1).tolist()
    for index, (best, row) in enumerate(zip(most_probable, probabilities.tolist(), strict=True)):
        cells = [best, *class_names[best : best + 1]] if one_class else []
        values = map("{:.6g}".format, row)
        rows.append([index, *files[index : index + 1], *cells, *values])
    write_table(path, rows)


def write_masks(
    masks: Tensor,
    folder: Path,
    files: Sequence[str] = (),
    sizes: Sequence[tuple[int, int]] = (),
) -> None:
    """Write the class of each pixel as grey PNG files, under the images' numbers or names.

    A mask has the size of its image; 255 is what was cropped.

    Args:
        masks: ``(images, height, width)``, classes below 256; with ``sizes`` squares.
        folder: The folder; it is made.
        files: A file for each image, whose path below the folder the mask gets; none: numbers.
        sizes: Width and height of each image; none: those of the masks.
    """
    from PIL import Image

    for index, mask in enumerate(masks.to(torch.uint8)):
        path = folder / Path(files[index] if files else f"{index}").with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(mask.cpu().numpy())
        if sizes:
            width, height = sizes[index]
            side = min(width, height)
            square = image.resize((side, side), Image.Resampling.NEAREST)
            image = Image.new("L", (width, height), 255)
            image.paste(square, ((width - side) // 2, (height - side) // 2))
        image.save(path)
