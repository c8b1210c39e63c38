"""The teacher: an exponential moving average of the weights that are trained (of the student)."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from lightning_fedssl.functional.dictionaries import map_values, tensors_of
from lightning_fedssl.functional.ema import ema_update
from lightning_fedssl.functional.frozen import tensors_that_change

_Self = TypeVar("_Self", bound=nn.Module)


class Teacher(nn.ModuleDict):
    """Copies of modules that track the originals by a moving average, always in evaluation mode and
    without gradients.

    The copies share no storage with the originals.

    Args:
        originals: The students by name.
    """

    def __init__(self, originals: dict[str, nn.Module]) -> None:
        super().__init__(map_values(copy.deepcopy, originals))
        self.requires_grad_(False)
        self.eval()

    def train(self: _Self, mode: bool = True) -> _Self:
        """Stay in evaluation mode: the teacher's output for an image must not depend on the rest of
        the batch.
        """
        return super().train(False)

    def follow(self, originals: dict[str, nn.Module], decay: float) -> None:
        """Update weights and buffers to ``decay * teacher + (1 - decay) * student``.

        Frozen ones are equal in both.

        Args:
            originals: The students by name.
            decay: From 0, which copies the students, to below 1.
        """
        for name, module in originals.items():
            ema_update(tensors_that_change(self[name]), tensors_of(module), decay)
