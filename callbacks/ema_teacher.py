"""Updates a method's global teacher after each of the server's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.ema import warm_decay
from lightning_fedssl.models.teacher import Teacher

if TYPE_CHECKING:
    from lightning_fedssl.run import TrainerView


class EMATeacher(FederatedCallback):
    """Sets a method's global teacher to ``a teacher + (1 - a) student`` after every step of the
    server.

    ``a = min(1 - 1 / (t + 1), decay)`` at the server's t-th step of the run, so that the initial
    random weights have little effect on the teacher. Weights and buffers are averaged in the same
    way.

    Args:
        decay: gamma, from 0 to below 1.
    """

    saved = ("steps",)

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(
                f"EMATeacher.decay is {decay}: give a number from 0 to below 1; 0.99 is usual"
            )
        self.decay = decay
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.steps = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject a method without a teacher."""
        if not isinstance(getattr(pl_module, "teacher", None), Teacher):
            raise ValueError(
                "EMATeacher needs a method with a global teacher, such as SemiSFL, not "
                f"{type(pl_module).__name__}: leave it out of trainer.callbacks"
            )

    def on_server_batch_end(self, trainer: TrainerView, algorithm: Any, step: int) -> None:
        """Update the teacher with the weights of the working module."""
        self.steps += 1
        algorithm.teacher.follow(algorithm.students(), warm_decay(self.steps, self.decay))
