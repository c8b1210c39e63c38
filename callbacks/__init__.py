"""The callbacks of a federated run, imported as ``lightning_fedssl.callbacks``."""

from .checkpoint import FederatedCheckpoint
from .communication_ledger import CommunicationLedger
from .ema_teacher import EMATeacher
from .feature_projector import FeatureProjector
from .global_update_frequency import GlobalUpdateFrequency
from .gradient_diversity import GradientDiversity
from .local_steps import LocalSteps
from .logging import PartitionReport, PseudoLabelQuality, RoundProgress
from .loss_landscape import LossLandscape
from .optimality_gap import OptimalityGap
from .static_batch_norm import StaticBatchNorm
from .system_clock import SystemClock

__all__ = [
    "CommunicationLedger",
    "EMATeacher",
    "FeatureProjector",
    "FederatedCheckpoint",
    "GlobalUpdateFrequency",
    "GradientDiversity",
    "LocalSteps",
    "LossLandscape",
    "OptimalityGap",
    "PartitionReport",
    "PseudoLabelQuality",
    "RoundProgress",
    "StaticBatchNorm",
    "SystemClock",
]
