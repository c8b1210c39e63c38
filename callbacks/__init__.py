"""The callbacks of a federated run, imported as ``lightning_fedssl.callbacks``."""

from .checkpoint import FederatedCheckpoint
from .logging import PartitionReport, PseudoLabelQuality, RoundProgress
from .static_batch_norm import StaticBatchNorm

__all__ = ["FederatedCheckpoint", "PartitionReport", "PseudoLabelQuality", "RoundProgress", "StaticBatchNorm"]
