"""Error messages for what fails after the arguments were parsed: one line that names the key or file and the remedy."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType

import torch
from torch.multiprocessing.spawn import ProcessExitedException

_USER_ERRORS = (ValueError, OSError, ModuleNotFoundError, RuntimeError)
_ONE_VALUE = (
    "model.network: batch norm got a single value per channel, from a batch of one sample (of an image, in a "
    "layer of 1x1 pixels); use norm: group, a network that shrinks images less, or another batch size"
)
_SEED = re.compile(r"(-?\d+) is not in bounds, numpy accepts from (\d+) to (\d+)")
_MISCONFIGURED = "lightning.fabric.utilities.exceptions.MisconfigurationException"
_PACKAGES = ("lightning_fedssl", "lightning")


def describe(error: BaseException, command: str = "") -> str | None:
    """The message of an error that the user can fix, or None for an error that needs its traceback.

    The user can fix errors that this package or Lightning itself raised, and errors of the machine: a full disk, too
    little memory, a rank that died. jsonargparse wraps errors of constructors, so the causes of an error are searched,
    too.

    Args:
        error: The error.
        command: The command that it ended, such as ``fit``; some remedies depend on it.
    """
    if "Expected more than 1 value per channel" in str(error):
        return _ONE_VALUE
    if match := _SEED.search(str(error)):
        return f"seed_everything is {match[1]}: give a whole number from {match[2]} to {match[3]}"
    for each in _causes(error):
        if _is_ours(each) and not (isinstance(each, OSError) and each.strerror):
            return str(each)
    for each in _causes(error):
        if message := _of_the_machine(each, command):
            return message
    return _of_a_constructor(error)


def _of_a_constructor(error: BaseException) -> str | None:
    """The message of an error in the constructor of a user's or another library's class that a key names."""
    for each in _causes(error):
        frames = [frame for frame, _ in walk_tb(each.__traceback__)]
        parsers = [n for n, frame in enumerate(frames) if _package_of(frame) == "jsonargparse"]
        called = frames[parsers[-1] + 1 :][:1] if parsers else []
        if called and called[0].f_code.co_name == "__init__" and _package_of(called[0]) != _PACKAGES[0]:
            name = type(called[0].f_locals["self"]).__name__
            if isinstance(each, ValueError):
                return f"{name}: {each}"
            return f"{name}: {type(each).__name__}: {each} (FEDSSL_TRACEBACK=1 shows where it comes from)"
    return None


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        yield from _of_other_types(current)
        current = current.__cause__


def _of_other_types(error: BaseException) -> Iterator[BaseException]:
    """Errors of the types that jsonargparse tried for one value; it raises a new error from the first of them alone."""
    for frame, _ in walk_tb(error.__traceback__):
        if _package_of(frame) == "jsonargparse":
            tried = frame.f_locals.get("exceptions")
            yield from (each for each in tried or () if isinstance(each, BaseException))


_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPACE_FOR = {
    "fit": (
        ", or set trainer.default_root_dir to a folder on another disk; a run that has saved a checkpoint resumes with "
        "--ckpt_path last"
    ),
    "compare": "; the same command resumes",
    "export": ", or give a folder on another disk as --output",
}
"""What can be done about a full disk besides freeing space, by command."""

_REMEDIES = {
    (errno.EACCES, errno.EPERM, errno.EROFS): "change the permissions, or give a folder that you may write to",
    (errno.ENAMETOOLONG,): "give a shorter path",
    (errno.ENOTDIR, errno.EEXIST, errno.EISDIR): "a file and a folder have the same path: give another path",
    (errno.ENOENT, errno.ELOOP): "give another path",
    (errno.EMFILE, errno.ENFILE): "close other programs, or raise the limit of open files (ulimit -n)",
}
_NO_MEMORY = (
    "not enough memory: make model.network smaller, lower data.client_batch_size, data.eval_batch_size, "
    "data.image_size or trainer.clients_at_once, or use fewer samples (data.max_train_images)"
)


def _of_the_machine(error: BaseException, command: str) -> str | None:
    """The message of an error that the operating system, the memory or another rank has caused."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"{_NO_MEMORY} ({_first_line(error)})" if str(error) else _NO_MEMORY
    if isinstance(error, OSError) and error.strerror:
        remedies = {_FULL_DISK: f"free some space{_SPACE_FOR.get(command, '')}", **_REMEDIES}
        remedy = next((text for numbers, text in remedies.items() if error.errno in numbers), "")
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}" + (f"; {remedy}" if remedy else "")
    if isinstance(error, ProcessExitedException):
        return f"rank {error.error_index} died ({_first_line(error)}); resume with --ckpt_path last"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _is_ours(error: BaseException) -> bool:
    traceback = error.__traceback__
    if not (isinstance(error, _USER_ERRORS) or _is_lightnings(error)) or traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    if isinstance(error, RuntimeError):  # raised by EarlyStopping for a monitor that does not exist
        return module.startswith("lightning.pytorch.callbacks")
    return module.partition(".")[0] in _PACKAGES


def _is_lightnings(error: BaseException) -> bool:
    """Whether Lightning refuses a setting; compared by name, because an import of Lightning takes seconds."""
    return any(f"{c.__module__}.{c.__name__}" == _MISCONFIGURED for c in type(error).__mro__)
