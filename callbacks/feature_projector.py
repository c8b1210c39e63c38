"""Writes features of validation images to TensorBoard's embedding projector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.trainer import FederatedTrainer


class HasFeatures(Protocol):
    """A method that computes features of images with its global model."""

    def embed(self, x: Tensor) -> Tensor:
        """Features ``(batch, dimension)`` of images, computed by the working module."""


class FeatureProjector(FederatedCallback):
    """Writes the global teacher's features of evaluation images to TensorBoard's projector, with their true classes.

    Each time, it costs a forward pass of the images, and ``images * dimension`` numbers as text in the run folder.

    Args:
        every_n_rounds: Interval of writing, in rounds; the last round is always written.
        images: Maximum number of images: the first validation images, or the first test images without validation.
    """

    def __init__(self, every_n_rounds: int = 50, images: int = 1000) -> None:
        if every_n_rounds < 1 or images < 2:
            raise ValueError("FeatureProjector: give every_n_rounds of at least 1 and at least 2 images")
        self.every_n_rounds = every_n_rounds
        self.images = images

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject a method without features."""
        if not hasattr(pl_module, "embed"):
            raise ValueError(
                f"FeatureProjector needs a method with a split network, such as SemiSFL, not "
                f"{type(pl_module).__name__}: leave it out of trainer.callbacks"
            )

    def on_pictures(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm, is_last: bool) -> None:
        """Write the features at the interval."""
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if boards and trainer.is_global_zero and (is_last or trainer.round_index % self.every_n_rounds == 0):
            features, labels = self.features(trainer, algorithm)
            for board in boards:
                board.experiment.add_embedding(
                    features, metadata=labels.tolist(), global_step=trainer.round_index, tag="teacher_features"
                )

    @torch.no_grad()
    def features(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> tuple[Tensor, Tensor]:
        """Features ``(images, dimension)`` and classes ``(images,)`` of the first images."""
        load_state(algorithm, algorithm.evaluated_model())
        algorithm.eval()
        stage = "validate" if trainer.datamodule.has_validation else "test"
        batches = trainer.datamodule.evaluation_batches(stage, trainer.dtype)  # type: ignore[arg-type]
        features, labels, missing = [], [], self.images
        for x, y in batches:
            if missing <= 0:
                break
            features.append(cast(HasFeatures, algorithm).embed(x[:missing]).float().cpu())
            labels.append(y[:missing].cpu())
            missing -= len(x)
        return torch.cat(features), torch.cat(labels)
