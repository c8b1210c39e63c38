"""Functions of a module with other weights than its own."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.func import functional_call

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import add_prefix


class CallOf(nn.Module):
    """A function of a module as a forward pass, so that ``functional_call`` can run it with other
    weights.

    Args:
        algorithm: The module.
        function: The function's name.
    """

    def __init__(self, algorithm: nn.Module, function: str) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.function = function

    def forward(self, *arguments: object) -> object:
        """What the function returns."""
        return getattr(self.algorithm, self.function)(*arguments)

    def of_client(self, leaves: State, rest: State, *arguments: Any) -> tuple[Any, State]:
        """What the function returns with one client's tensors, and the buffers that it has replaced
        by new tensors, instead of changing them in place.

        Args:
            leaves: The client's weights.
            rest: Its other tensors.
            arguments: Those of the function.
        """
        tensors = add_prefix("algorithm.", {**leaves, **rest})
        returned = functional_call(self, tensors, arguments, tie_weights=False)
        after = {name: tensors[f"algorithm.{name}"] for name in rest}
        return returned, {name: t for name, t in after.items() if t is not rest[name]}
