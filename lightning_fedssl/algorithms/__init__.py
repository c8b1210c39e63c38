"""One file per paper."""

from lightning_fedssl.algorithms.fedavg import FedAvg
from lightning_fedssl.algorithms.semifl import SemiFL
from lightning_fedssl.algorithms.supervised import Supervised

__all__ = ["FedAvg", "SemiFL", "Supervised"]
