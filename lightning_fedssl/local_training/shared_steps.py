"""The server's steps shared among the ranks: each computes the gradient of its rows of a batch, and they add up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CodeType

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm, averages_images
from lightning_fedssl.distributed import collectives
from lightning_fedssl.distributed.synchronised_norm import synchronised_batch_norm
from lightning_fedssl.local_training.ops.keyed_dropout import rows_from
from lightning_fedssl.local_training.sequential import Loop
from lightning_fedssl.state import Batch


def refuse_unshareable(algorithm: FederatedAlgorithm) -> None:
    """Refuse a method whose server's loss is no mean over the images of a batch.

    Raises:
        ValueError: With the key to change.
    """
    name = type(algorithm).__name__
    if not averages_images(algorithm.server_training_step):
        raise ValueError(
            f"trainer.share_server_steps: the server's loss of {name} is not marked as a mean over the images of a "
            "batch (lightning_fedssl.algorithm.mean_over_images), so its batches cannot be divided among ranks; leave "
            "the key out"
        )
    marked = _definer(type(algorithm), "server_training_step")
    if overridden := [part for part in _parts_of_step(marked) if _definer(type(algorithm), part) not in marked.__mro__]:
        raise ValueError(
            f"trainer.share_server_steps: {name} overrides {' and '.join(overridden)}, which the server's loss of "
            f"{marked.__name__} calls, so it may be no mean over the images of a batch; if it is one, override "
            "server_training_step, too, and mark it (lightning_fedssl.algorithm.mean_over_images), else leave the key "
            "out"
        )


def _definer(kind: type, name: str) -> type:
    """The class from which a class has a function."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _parts_of_step(marked: type) -> list[str]:
    """The functions of a class that its ``server_training_step`` calls, and those that these call, by their names."""
    parts, waiting = set[str](), ["server_training_step", "forward"]
    own = [base for base in marked.__mro__ if base not in LightningModule.__mro__]
    while waiting:
        name = waiting.pop()
        codes = [vars(base)[name].__code__ for base in own if inspect.isfunction(vars(base).get(name))]
        if codes and name not in parts:
            parts.add(name)
            waiting += [found for code in codes for found in _names_in(code)]
    return sorted(parts)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names of attributes that a function reads, those inside its comprehensions and lambdas included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


class SharedLoop(Loop):
    """The loop over batches in which every rank computes its rows of each batch, and all make the same step.

    In 64-bit arithmetic the weights are those of one rank up to rounding: batch norm uses the statistics of the whole
    batch (:mod:`lightning_fedssl.distributed.synchronised_norm`), dropout the masks of the rows' positions, and the
    gradient is summed before it is clipped. A batch of fewer images than ranks is computed by every rank.
    """

    def loss_and_gradients(
        self, batch: Batch, step: int, step_loss: Callable[[Batch, int], Tensor | None]
    ) -> Tensor | None:
        """The loss of the whole batch; the weights' gradients are those of the whole batch."""
        rank, ranks = self.fabric.global_rank, self.fabric.world_size
        size = len(next(iter(batch.values())))
        if size < ranks:
            return super().loss_and_gradients(batch, step, step_loss)
        first, end = size * rank // ranks, size * (rank + 1) // ranks
        own = {name: t[first:end] if t.dim() and len(t) == size else t for name, t in batch.items()}

        def share_of_loss(rows: Batch, step: int) -> Tensor | None:
            loss = step_loss(rows, step)
            return None if loss is None else loss * ((end - first) / size)

        with synchronised_batch_norm(self.algorithm, self.fabric), rows_from(first):
            loss = super().loss_and_gradients(own, step, share_of_loss)
        return None if loss is None else self._sum(loss.detach())

    def _sum(self, loss: Tensor) -> Tensor:
        """Add up the ranks' gradients, in place, and their losses."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        own = [*(gradient.flatten() for gradient in gradients), loss.reshape(1).to(gradients[0].dtype)]
        flat = collectives.add_up(torch.cat(own))
        parts = flat.split([*(gradient.numel() for gradient in gradients), 1])
        for gradient, total in zip(gradients, parts, strict=False):
            gradient.copy_(total.view_as(gradient))
        return flat[-1]
