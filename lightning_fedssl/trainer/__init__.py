"""The trainer: its keys and commands, the loop over rounds, evaluation, checkpoints and the start
of processes.
"""

from lightning_fedssl.trainer.trainer import FederatedTrainer

__all__ = ["FederatedTrainer"]
