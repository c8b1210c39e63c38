"""The check that a training step returns a loss: one number. A method of the user's own may return anything."""

from __future__ import annotations

from torch import Tensor, nn


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


def described(value: object) -> str:
    """The type of a value as text, or the shape if it is a tensor."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
