"""Checks of what the functions of a method return: one of the user's own may return anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")


class LossError(ValueError):
    """A step of a method has returned something else than a loss, so that it cannot be trained at all."""


def loss_of(returned: object, algorithm: nn.Module, function: str, may_skip: bool = True) -> Tensor | None:
    """The loss of a step, which returns it alone or in a dictionary, as Lightning's steps may; None skips the batch.

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
            f"{type(algorithm).__name__}.{function} returned {described(loss)}: return the loss of the batch as one "
            f"number, such as the mean over its images{skip}"
        )
    return loss


def checked(result: Result, expected: type, algorithm: nn.Module, function: str, remedy: str) -> Result:
    """What a function of a method returned, if it has the type that the caller expects.

    Args:
        result: What the function returned.
        expected: The type.
        algorithm: The method, whose class the message names.
        function: The name of the function.
        remedy: What to return instead.

    Raises:
        ValueError: Names the class and the function.
    """
    if not isinstance(result, expected):
        raise ValueError(f"{type(algorithm).__name__}.{function} returned {described(result)}: return {remedy}")
    return result


def described(value: object) -> str:
    """The type of a value as text, or the shape if it is a tensor."""
    if value is None:
        return "None"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
