"""The server's steps shared among the ranks: each computes the gradient of its rows of a batch, and they add up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_fedssl.distributed import collectives
from lightning_fedssl.distributed.synchronised_norm import synchronised_batch_norm
from lightning_fedssl.keyed_dropout import rows_from
from lightning_fedssl.local_training.sequential import Loop
from lightning_fedssl.state import Batch


class SharedLoop(Loop):
    """The loop over batches in which every rank computes its rows of each batch, and all make the same step.

    In 64-bit arithmetic the weights are those of one rank up to rounding: batch norm uses the statistics of the whole
    batch (:mod:`lightning_fedssl.distributed.synchronised_norm`), dropout the masks of the rows' positions, and the
    gradient is summed before it is clipped. A batch of fewer images than ranks is computed by every rank.
    """

    def loss_and_gradients(
        self, batch: Batch, step: int, step_loss: Callable[[Batch, int], Tensor | None]
    ) -> Tensor | None:
        """The loss of the whole batch; the weights' gradients are those of the whole batch.

        Raises:
            ValueError: The step skipped a share: the other ranks would wait for this rank for ever.
        """
        rank, ranks = self.fabric.global_rank, self.fabric.world_size
        size = len(next(iter(batch.values())))
        if size < ranks:
            return super().loss_and_gradients(batch, step, step_loss)
        first, end = size * rank // ranks, size * (rank + 1) // ranks
        own = {name: t[first:end] if t.dim() and len(t) == size else t for name, t in batch.items()}

        def share_of_loss(rows: Batch, step: int) -> Tensor:
            if (loss := step_loss(rows, step)) is None:
                raise ValueError(
                    f"trainer.share_server_steps: {type(self.algorithm).__name__}.server_training_step returned None "
                    f"for {end - first} of the {size} images of a batch, which ranks share; leave the key out"
                )
            self._check_loss(loss)
            return loss * ((end - first) / size)

        with synchronised_batch_norm(self.algorithm, self.fabric), rows_from(first):
            loss = super().loss_and_gradients(own, step, share_of_loss)
        return None if loss is None else self._sum(loss.detach())

    def _sum(self, loss: Tensor) -> Tensor:
        """Add up the ranks' gradients, in place, and their losses; a weight may have a gradient on some ranks only."""
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self.weights]
        own_reached = [weight.grad is not None for weight in self.weights]
        reached = loss.new_tensor(own_reached, dtype=gradients[0].dtype)
        own = [*(gradient.flatten() for gradient in gradients), reached, loss.reshape(1).to(gradients[0].dtype)]
        flat = collectives.add_up(torch.cat(own))
        *totals, ranks, _ = flat.split([*(gradient.numel() for gradient in gradients), len(reached), 1])
        # Reading the other ranks' counts waits for a GPU, so they are read only where they can say more.
        counts = own_reached if all(own_reached) else ranks.tolist()
        for weight, gradient, total, count in zip(self.weights, gradients, totals, counts, strict=True):
            weight.grad = gradient.copy_(total.view_as(gradient)) if count else None
        return flat[-1]
