"""How the clients of a round are trained on one device."""

from lightning_fedssl.local_training.engine import ClientsAtOnce, LocalTraining, stack_size
from lightning_fedssl.local_training.sequential import LocalTrainingObserver

__all__ = ["ClientsAtOnce", "LocalTraining", "LocalTrainingObserver", "stack_size"]
