"""What functions of a method return, and the errors if it is something else."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn


class LossError(ValueError):
    """A step of a method has returned something else than a loss, so that it cannot be trained at
    all.
    """


def loss_of(
    returned: object, algorithm: nn.Module, function: str, may_skip: bool = True
) -> Tensor | None:
    """The loss of a step, which returns it alone or in a dictionary, as Lightning's steps may.

    None skips the batch.

    Args:
        returned: What the function returned; under ``vmap`` for one client.
        algorithm: The method, whose class the message names.
        function: The name of the function.
        may_skip: Whether the function may also return None.

    Raises:
        LossError: The loss is not one number; names the class, the function and the shape.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if loss is None and may_skip:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        skip = ", or None to skip the batch" if may_skip else ""
        raise LossError(
            f"{type(algorithm).__name__}.{function} returned {described(loss)}: return the loss of "
            f"the batch as one number, such as the mean over its images{skip}"
        )
    return loss


def wrong_type(result: object, algorithm: nn.Module, function: str, remedy: str) -> ValueError:
    """The error if a function of a method returned another type than the caller expects.

    Args:
        result: What the function returned.
        algorithm: The method, whose class the message names.
        function: The name of the function.
        remedy: What to return instead.
    """
    return ValueError(
        f"{type(algorithm).__name__}.{function} returned {described(result)}: return {remedy}"
    )


def described(value: object) -> str:
    """The type of a value as text, or the shape if it is a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def place_of(error: Exception) -> str:
    """An error's first line, and the line of the method's code that it comes from."""
    package = Path(__file__).parents[1]
    callers = {package / "functional", package / "local_training"}
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.parent not in callers and "torch" not in file.parts:
            return f"{frame.name} ({file.name}:{frame.lineno}, `{frame.line}`): {text}"
    return text
