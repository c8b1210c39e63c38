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
class by class do not tell how frequent the classes are at the clients.

A client that knows its own shares (``data.class_shares``) draws its probabilities to them: its
labels are ``y = softmax(logits + shift)``, with the shift by which the mean of y is the shares
(:func:`~lightning_fedssl.functional.class_shares.shift_to_shares`), and every sample has weight 1.
The more clients differ, the more their shares say about each sample: learning from label
proportions (N. Quadrianto et al., JMLR 2009), with a site in place of each bag. Clients then know
more than the labels do, so the server weighs less, and its steps have momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.algorithms.common.site_shares import shifted
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, Sums
from lightning_fedssl.functional.dictionaries import clone_state, map_values
from lightning_fedssl.functional.optimizers import plain_sgd, require_plain_sgd
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, at_least_float32
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

LABELS_ALONE, EXACT = 0.5, 0.1
"""The weight of the server's labels where no site states its shares, and where all are exact."""

MOMENTUM = 0.9
"""Where sites state their shares. Both were chosen on 13 tables (docs/class_shares.md)."""

STEP = "self-training step"
"""Where ``server.extra`` has the last step."""


@hyperparameters
class SelfTraining(ServerPhases):
    """Self-training with one full-batch gradient of every client in a round.

    The optimizer is SGD without momentum; its ``weight_decay`` is the regularisation of the
    classifier, and ``data.server_batch_size`` takes all labels at once if it is at least their
    number. All clients should take part in a round (``trainer.clients_per_round``); with some of
    them the gradient is an estimate.

    Args:
        momentum: Of the server's steps: the step to the mean of both halves, and ``momentum`` times
            the step before. Left out: 0, and :data:`MOMENTUM` with ``data.class_shares``.
        server_weight: The weight of the labels. Left out: 0.5 without ``data.class_shares``, 0.1
            with exact ones, and between them according to how sure sites are.
        server_phase: In parallel with the clients, on the same weights, so that both send gradients
            of one model.
        server_steps: Steps of the server in a round: one, on all labels.
        optimizer: SGD without momentum: the step of any other optimizer is not a gradient.

    Example:
        >>> from lightning_fedssl import MLP
        >>> SelfTraining(network=MLP, init_head="labels").server_phase
        'parallel'
    """

    labels_at = "server"
    needs_unlabeled = True
    uses_class_shares = True

    momentum: float | None = None
    server_weight: float | None = None  # type: ignore[assignment]
    server_phase: Literal["after", "before", "parallel"] = "parallel"
    server_steps: int | None = 1
    optimizer: OptimizerCallable = plain_sgd

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        if self.server_weight is None:
            self.server_weight = LABELS_ALONE
        super().check_arguments()
        reason = "SelfTraining's mean of steps is the pooled gradient under plain SGD alone"
        require_plain_sgd(self.optimizer, reason, weight_decay=True)
        require_plain_sgd(
            self.server_optimizer or self.optimizer,
            reason,
            weight_decay=True,
            key="model.server_optimizer",
        )
        checks.decay(self, "momentum")

    def check_data(self, data: FederatedDataModule) -> None:
        """Set what is left out, as the docstring says."""
        super().check_data(data)
        if self.hparams["momentum"] is None:
            self.momentum = 0.0 if data.class_shares is None else MOMENTUM
        if self.hparams["server_weight"] is None:
            self.server_weight = LABELS_ALONE + data.sureness_of_shares * (EXACT - LABELS_ALONE)

    @property
    def client_payload(self) -> State:
        """A tensor like the one that a client sends in addition to its model: ``sum c``."""
        weight = next(iter(self.server.parameters.values()))
        return {"weight": at_least_float32(weight).new_zeros(())}

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """A sum of at most 1 for each sample."""
        return {"weight": (0, update.num_samples)}

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the updates, and keep the weights that they start from."""
        self._start = clone_state(self.server.parameters)
        return super().accumulate(updates)

    def aggregate(self, sums: Sums) -> None:
        """Average both halves, and add ``momentum`` times the step before."""
        super().aggregate(sums)
        momentum = self.momentum
        if not momentum:
            return
        step = map_values(torch.sub, self.server.parameters, self._start)
        before = self.server.extra.get(STEP)
        if before:
            step = map_values(lambda new, old: new + momentum * old, step, before)
        self.server.extra[STEP] = step
        self.server.update(map_values(torch.add, self._start, step))

    def anew(self) -> SelfTraining:
        """The same method, before a run."""
        names = ("server_phase", "server_steps", "client_weighting", "momentum", "server_weight")
        return self.like(self, **{name: self.hparams[name] for name in names})

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Label all samples of a client: ``y = argmax p``, with their confidence ``c = max p``; or
        ``y = p``, drawn to the client's shares.
        """
        x = data.plain(data.unlabeled)
        with torch.no_grad():
            logits = self(x)
        y: Tensor
        if data.shares is None:
            weight, y = confidence, hard = logits.softmax(1).max(1)
        else:
            y = shifted(self, data, logits).softmax(1)
            confidence, hard = y.max(1)
            weight = torch.ones_like(confidence)
        batch = {"x": x, "y": y, "weight": weight}
        pseudo = PseudoLabels(hard, confidence, torch.ones_like(hard, dtype=torch.bool))
        return LocalWork(
            len(y), min(len(y), 1), lambda step: batch, pseudo, payload={"weight": weight.sum()}
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``sum c CE(x, y) / sum c``."""
        loss = self.task.entry_losses(self(batch["x"]), batch["y"])
        return (batch["weight"] * loss).sum() / batch["weight"].sum()

    def client_weight(self, update: ClientUpdate) -> float:
        """``sum c``, of all of the client's samples."""
        most = update.num_samples  # a client may send anything
        return float(update.payload["weight"].clamp(0, most))
