"""The callbacks of a federated run, imported as ``lightning_fedssl.callbacks``."""

from .checkpoint import FederatedCheckpoint
from .gradient_diversity import GradientDiversity
from .local_steps import LocalSteps
from .logging import PartitionReport, PseudoLabelQuality, RoundProgress
from .loss_landscape import LossLandscape
from .optimality_gap import OptimalityGap
from .static_batch_norm import StaticBatchNorm

__all__ = [
    "FederatedCheckpoint",
    "GradientDiversity",
    "LocalSteps",
    "LossLandscape",
    "OptimalityGap",
    "PartitionReport",
    "PseudoLabelQuality",
    "RoundProgress",
    "StaticBatchNorm",
]
