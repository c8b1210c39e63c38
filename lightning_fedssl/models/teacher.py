"""Teachers: exponential moving averages of the weights that are trained (of the student).

:class:`Teacher` is a separate network in evaluation mode. :class:`AveragedWeights` holds weights only. Mean Teacher
uses it, because its teacher runs the student's layers in training mode, including dropout.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.ema import ema_update

_Self = TypeVar("_Self", bound=nn.Module)


def tensors_of(module: nn.Module) -> State:
    """A module's weights and buffers by name, not copied."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class Teacher(nn.ModuleDict):
    """Copies of modules that track the originals by a moving average; always in evaluation mode, without gradients.

    The copies share no storage with the originals.

    Args:
        originals: The students by name.
    """

    def __init__(self, originals: dict[str, nn.Module]) -> None:
        super().__init__({name: copy.deepcopy(module) for name, module in originals.items()})
        self.requires_grad_(False)
        self.eval()

    def train(self: _Self, mode: bool = True) -> _Self:
        """Stay in evaluation mode: the teacher's output for an image must not depend on the rest of the batch."""
        return super().train(False)

    def follow(self, originals: dict[str, nn.Module], decay: float | Tensor, when: bool | Tensor = True) -> None:
        """Update weights and buffers to ``decay * teacher + (1 - decay) * student``.

        Args:
            originals: The students by name.
            decay: From 0, which copies the students, to below 1.
            when: Whether to update at all.
        """
        for name, module in originals.items():
            ema_update(tensors_of(self[name]), tensors_of(module), decay, when)


class AveragedWeights(nn.Module):
    """A moving average of a network's weights, stored as buffers so that they are stacked and moved with the module.

    Args:
        network: The student.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.names = [name for name, _ in network.named_parameters()]
        for index, weight in enumerate(network.parameters()):
            self.register_buffer(f"weight_{index}", weight.detach().clone(), persistent=False)

    def weights(self) -> State:
        """The averaged weights by the network's names."""
        return {name: self.get_buffer(f"weight_{index}") for index, name in enumerate(self.names)}

    def follow(self, network: nn.Module, decay: float | Tensor) -> None:
        """Update the average to ``decay * average + (1 - decay) * student``.

        Args:
            network: The student.
            decay: From 0, which copies the student, to below 1.
        """
        ema_update(self.weights(), dict(network.named_parameters()), decay)
