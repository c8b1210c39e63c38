"""Federated self-training of a classifier on frozen features: the safe default of pretrained
networks.

H. J. Scudder, "Probability of Error of Some Adaptive Pattern-Recognition Machines", IEEE
Transactions on Information Theory 1965, with labels weighted by confidence and no threshold, as the
full-batch gradients of FedSGD (B. McMahan et al., AISTATS 2017, arXiv 1602.05629).

A round is one step of gradient descent on all samples of the federation:

1. the server sends the classifier w;
2. each client labels its samples, ``y = argmax p``, with confidence ``c = max p``, and sends the
   gradient of ``sum c CE(x, y) / sum c``, as the weights after one step, and ``sum c``;
3. the server makes the same step on its labels, and averages: the clients by ``sum c``, then both
   halves, so that labels weigh as much as all other samples together.

The mean of gradients is that of the pooled data, however these are partitioned: skewed clients do
no harm. Predictions are not aligned with the class shares of the labels: labels that were collected
class by class do not tell those of the clients.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.optimizers import plain_sgd, require_plain_sgd
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate


class SelfTraining(ServerPhases):
    """Self-training with one full-batch gradient of every client in a round.

    The optimizer is SGD without momentum; its ``weight_decay`` is the regularisation of the
    classifier, and ``data.server_batch_size`` takes all labels at once if it is at least their
    number. All clients should take part in a round (``trainer.clients_per_round``); with some of
    them the gradient is an estimate.

    Args:
        server_phase: In parallel with the clients, on the same weights, so that both send gradients
            of one model.
        server_steps: Steps of the server in a round: one, on all labels.
        optimizer: SGD without momentum: the step of any other optimizer is no gradient.
        kwargs: The arguments of
            :class:`~lightning_fedssl.algorithms.common.server_phases.ServerPhases`.

    Example:
        >>> from lightning_fedssl import MLP
        >>> SelfTraining(network=MLP, init_head="labels").server_phase
        'parallel'
    """

    labels_at = "server"
    needs_unlabeled = True

    def __init__(
        self,
        server_phase: Literal["after", "before", "parallel"] = "parallel",
        server_steps: int | None = 1,
        optimizer: OptimizerCallable = plain_sgd,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            server_phase=server_phase, server_steps=server_steps, optimizer=optimizer, **kwargs
        )
        reason = "SelfTraining's mean of steps is the pooled gradient under plain SGD alone"
        for key in ("optimizer", "server_optimizer"):
            factory = getattr(self, f"{key}_factory")
            require_plain_sgd(factory, reason, weight_decay=True, key=f"model.{key}")

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Label all samples of a client: ``y = argmax p``, with their confidence ``c = max p``."""
        x = data.plain(data.unlabeled)
        with torch.no_grad():
            confidence, y = self(x).softmax(1).max(1)
        batch = {"x": x, "y": y, "weight": confidence}
        pseudo = PseudoLabels(y, confidence, torch.ones_like(y, dtype=torch.bool))
        return LocalWork(
            len(y), min(len(y), 1), lambda step: batch, pseudo, payload={"weight": confidence.sum()}
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``sum c CE(x, y) / sum c``."""
        loss = self.task.entry_losses(self(batch["x"]), batch["y"])
        return (batch["weight"] * loss).sum() / batch["weight"].sum()

    def client_weight(self, update: ClientUpdate) -> float:
        """``sum c``, of all of the client's samples."""
        return float(update.payload["weight"])
