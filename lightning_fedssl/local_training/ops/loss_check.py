"""Checks of what the functions of a method return: one of the user's own may return anything."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")


class LossError(ValueError):
    """A step of a method has returned something else than a loss, so that no local trainer can train it."""


def check_loss(loss: object, algorithm: nn.Module, function: str, may_skip: bool = True) -> None:
    """Refuse a loss that is not one number.

    Args:
        loss: What the function returned; under ``vmap`` for one client.
        algorithm: The method, whose class the message names.
        function: The name of the function.
        may_skip: Whether the function may also return None; only for the text of the message.

    Raises:
        LossError: Names the class, the function and the shape.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        skip = ", or None to skip the batch" if may_skip else ""
        raise LossError(
            f"{type(algorithm).__name__}.{function} returned {described(loss)}: return the loss of the batch as one "
            f"number, such as the mean over its images{skip}"
        )


def check_gradient(loss: Tensor, algorithm: nn.Module, function: str) -> None:
    """Refuse a loss without a gradient.

    Args:
        loss: What the function returned.
        algorithm: The method, whose class the message names.
        function: The name of the function.

    Raises:
        LossError: Names the class and the function.
    """
    if not loss.requires_grad:
        raise LossError(
            f"{type(algorithm).__name__}.{function} returned a loss that depends on no weight: compute it from the "
            "network's output, without detach() or torch.no_grad(), or return None to skip the batch"
        )


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
