"""The callbacks of a federated run, imported as ``lightning_fedssl.callbacks``."""

from .checkpoint import FederatedCheckpoint
from .client_evaluation import ClientEvaluation
from .collapse_detector import CollapseDetector
from .communication_ledger import CommunicationLedger
from .ema_teacher import EMATeacher
from .global_update_frequency import GlobalUpdateFrequency
from .labels_alone import LabelsAlone
from .logging import RoundProgress
from .pseudo_label_quality import PseudoLabelQuality
from .run_report import RunReport
from .run_result import RunResult
from .static_batch_norm import StaticBatchNorm
from .system_clock import SystemClock

__all__ = [
    "ClientEvaluation",
    "CollapseDetector",
    "CommunicationLedger",
    "EMATeacher",
    "FederatedCheckpoint",
    "GlobalUpdateFrequency",
    "LabelsAlone",
    "PseudoLabelQuality",
    "RoundProgress",
    "RunReport",
    "RunResult",
    "StaticBatchNorm",
    "SystemClock",
]
