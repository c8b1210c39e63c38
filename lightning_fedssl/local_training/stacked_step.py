"""One step of several clients over stacked weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.calls import CallOf
from lightning_fedssl.functional.gradients import add_to_gradients, clip_gradients
from lightning_fedssl.functional.recorded import Values
from lightning_fedssl.functional.returned import loss_of
from lightning_fedssl.functional.stacked_layers import StackedLayers
from lightning_fedssl.local_training.sequential import (
    ClientPhase,
    recording,
)
from lightning_fedssl.state import Batch

Part = tuple[list[int], Batch]
"""Rows of a stack, and a batch of each, ``(rows, batch, ...)``."""


@dataclass(eq=False)
class StackedStep:
    """A step of stacked clients, which changes their tensors in place.

    Attributes:
        phase: What they are trained with; the algorithm's own weights are not used.
        leaves: The weights that are trained, ``(clients, ...)`` each.
        rest: All other tensors, ``(clients, ...)`` each.
        optimizer: Over the leaves.
        corrected: Pairs of leaves and control variates, ``(clients, ...)`` each.
    """

    phase: ClientPhase
    leaves: State
    rest: State
    optimizer: Optimizer
    corrected: list[tuple[Tensor, Tensor]]

    def __call__(self, parts: list[Part], number: int | Tensor) -> list[Values]:
        """Make a step; the losses ``(rows,)`` of each part, and the values that it logs.

        Args:
            parts: Batches of different shapes have separate passes.
            number: The number of the step, ``(rows,)`` where clients are at different ones.
        """
        algorithm, fabric = self.phase.algorithm, self.phase.fabric
        self.optimizer.zero_grad()
        with fabric.autocast():
            passes = [self._pass(rows, batch, number) for rows, batch in parts]
        fabric.backward(torch.cat([values[0][0] for values in passes]).sum())
        if algorithm.gradient_clip_norm is not None:
            clip_gradients(self.leaves.values(), algorithm.gradient_clip_norm)
        add_to_gradients(self.corrected)
        self.optimizer.step()
        return [[(t.detach(), name, x) for t, name, x in values] for values in passes]

    def _pass(self, rows: list[int], batch: Batch, number: int | Tensor) -> Values:
        """The losses of the clients in these rows, and the values that they log.

        Buffers are updated.
        """
        leaves = self.leaves
        rest = self.rest
        if all_rows := len(rows) == len(next(iter(leaves.values()))):
            index: Any = slice(None)
        else:
            index = torch.tensor(rows, device=next(iter(leaves.values())).device)
            leaves = {name: t[index] for name, t in leaves.items()}
            rest = {name: t[index] for name, t in rest.items()}
        losses, values, replaced = self._losses(leaves, rest, batch, number)
        for name, new in (replaced if all_rows else {**rest, **replaced}).items():
            self.rest[name][index] = new.detach()
        return [(losses, "client/loss", len(next(iter(batch.values()))[0])), *values]

    def _losses(
        self, leaves: State, rest: State, batch: Batch, number: int | Tensor
    ) -> tuple[Tensor, Values, State]:
        """Each client's loss ``(clients,)``, what it logs, and the buffers that the step
        replaced.
        """
        algorithm = self.phase.algorithm
        module = CallOf(algorithm, "training_step")
        logged: Values = []

        def of_one_client(
            leaves: State, rest: State, batch: Batch, number: int | Tensor
        ) -> tuple[Tensor, list[Tensor], State]:
            with recording(algorithm, logged):
                returned, replaced = module.of_client(leaves, rest, batch, number)
            if (loss := loss_of(returned, algorithm, "training_step")) is None:
                raise ValueError("training_step returned None, to skip the batch")
            return loss.reshape(()), [value for value, *_ in logged], replaced

        each = 0 if isinstance(number, Tensor) else None
        with StackedLayers():
            step_of_all = vmap(of_one_client, (0, 0, 0, each), randomness="different")
            losses, values, replaced = step_of_all(leaves, rest, batch, number)
        of_clients = [
            (value, name, weight) for value, (_, name, weight) in zip(values, logged, strict=True)
        ]
        return losses, of_clients, replaced
