"""RSCFed: random sampling consensus, for a few fully labelled clients beside clients without
labels.

X. Liang, Y. Lin, H. Fu, L. Zhu, X. Li, "RSCFed: Random Sampling Consensus Federated Semi-Supervised
Learning", CVPR 2022, arXiv 2203.13993. Authors' code: github.com/XMed-Lab/RSCFed.

M rounds here are one synchronisation round of the paper. In each, K clients
(``trainer.clients_per_round``) are drawn anew:

1. they receive the global model w, which changes after M rounds only;
2. a labelled client trains with cross-entropy; an unlabelled one with the mean teacher that it
   keeps, ``lambda_u ||f(x') - sharpen(teacher(x))||^2`` on two weak views, after each step
   ``teacher <- a teacher + (1 - a) student`` with ``a = min(1 - 1/(s + 1), 0.999)`` at its s-th
   step of the run;
3. the server averages by the number of images n_i, then once more by
   ``n_i exp(-beta ||w_i - mean|| / n_i)``: this is a sub-consensus model;
4. after M rounds the global model is the mean of the M sub-consensus models.

As the code has it: the distance is the sum of the norms of all tensors; beta is lower where a
labelled client is in the draw; a factor raises a labelled client's n_i in the first average, and
once more in the second one. (The published code reads an option ``un_dist`` that it does not
define; this is what it computes with the option empty. Its instructions of March 2022 set it to
``avg``: then the factor acts in the second average alone, and one labelled client out of five
otherwise equal ones has a weight of 0.6, here of 0.9.) Its lower rate for unlabelled clients, 0.021
against 0.03, is here part of lambda_u: 0.02 * 0.7; weight decay and clipped gradients are not. The
code starts from a model that was trained on the labelled clients: ``warmup_rounds``, or
``init_from``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData, Visits
from lightning_fedssl.functional.averaging import State, Sums, WeightedSum
from lightning_fedssl.functional.dictionaries import clone_state, map_values, tensors_of
from lightning_fedssl.functional.frozen import tensors_that_change
from lightning_fedssl.local_work import NO_WORK, LocalWork, epochs_of, labeled_work
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import Batch, ClientUpdate, load_state
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class RSCFed(FederatedAlgorithm):
    """Random sampling consensus with distance-reweighted aggregation.

    Args:
        sub_consensus: M, sub-consensus models of a new global model; ``trainer.max_rounds`` is a
            multiple of it.
        distance_scale: beta of a draw without a labelled client; 0 averages by the number of
            images.
        labeled_distance_scale: beta of a draw with a labelled client.
        labeled_factor: Raises the weight of labelled clients in both averages.
        unlabeled_weight: lambda_u, of the unlabelled clients' loss.
        temperature: T of the sharpened target ``p^(1/T) / sum p^(1/T)``.
        warmup_rounds: Rounds at the beginning in which labelled clients alone train.
        teacher_decay: Largest decay of a teacher.
        gradient_clip_norm: Largest gradient norm of a step.
        keep_client_optimizer: A client's momentum persists until its next participation.
    """

    not_deployable = "needs to know which clients have labels, which a node does not send"
    labels_at = "clients"
    no_static_batch_norm = checks.HAS_TEACHER

    local_modules = frozenset({"teacher"})

    sub_consensus: int = 3
    distance_scale: float = 1e4
    labeled_distance_scale: float = 100.0
    labeled_factor: float = 6.0
    unlabeled_weight: float = 0.014
    temperature: float = 0.5
    warmup_rounds: int = 0
    teacher_decay: float = 0.999
    gradient_clip_norm: float | None = 5.0
    keep_client_optimizer: bool = True

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.require(
            self.client_weighting == "samples",
            "client_weighting",
            self.client_weighting,
            "give samples",
        )
        checks.at_least(self, 1, "sub_consensus", "labeled_factor")
        scales = ("distance_scale", "labeled_distance_scale", "unlabeled_weight", "warmup_rounds")
        checks.at_least(self, 0, *scales)
        checks.above_zero(self, "temperature")
        checks.decay(self, "teacher_decay")

    def build_parts(self) -> None:
        """Build the teacher, which counts its steps."""
        self.teacher = Teacher({"network": self.network})
        self.teacher.register_buffer("steps", torch.zeros(()))

    def check_data(self, data: FederatedDataModule) -> None:
        """Every client has labels for all of its images or for none."""
        super().check_data(data)
        checks.fully_labeled_clients(data, "RSCFed")

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Epochs on labelled images, or on two views of unlabelled ones with the teacher of the
        client's last round.
        """
        if not len(data.unlabeled):
            payload = {"is_labeled": self.teacher.get_buffer("steps").new_ones(())}
            return replace(labeled_work(data, self.client_epochs), payload=payload)
        if data.round <= self.warmup_rounds:
            return NO_WORK
        if teacher := self.clients.get(data.party, "teacher"):
            load_state(self.teacher, teacher)
        else:
            self.teacher.follow({"network": self.network}, 0.0)
            self.teacher.get_buffer("steps").zero_()

        def make_batch(rows: Tensor, visits: Visits) -> Batch:
            images = data.unlabeled[rows]
            weight = torch.full_like(
                rows, self.unlabeled_weight / data.batch_size, dtype=data.dtype
            )
            return {
                "x_teacher": data.weak(images, "x_teacher", visits=visits),
                "x_student": data.weak(images, "x_student", visits=visits),
                "weight": weight,
            }

        count = len(data.unlabeled)
        order = partial(data.permutation, count, "order")
        return epochs_of(data, make_batch, order, count, epochs=self.client_epochs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The task's loss at a labelled client; at another one the squared distance to the
        teacher's sharpened probabilities.
        """
        if "y" in batch:
            return self.task.labeled_loss(self(batch["x"]), batch["y"])
        if batch_idx:
            self.teacher_follows()
        with torch.no_grad():
            logits = self.teacher["network"](batch["x_teacher"])
            target = torch.softmax(logits / self.temperature, dim=-1)
        distance = (self(batch["x_student"]).softmax(dim=-1) - target).square().sum(dim=-1)
        loss: Tensor = (batch["weight"] * distance).sum()
        return loss

    @torch.no_grad()
    def teacher_follows(self) -> None:
        """One step of the moving average of the weights. Buffers stay those of the model that the
        client received first.
        """
        steps = self.teacher.get_buffer("steps")
        decay = (1 - 1 / (steps + 1)).clamp(max=self.teacher_decay)
        student = tensors_of(self.network)
        changing = tensors_that_change(self.teacher["network"])
        for name in changing.keys() & dict(self.network.named_parameters()).keys():
            tensor = changing[name]
            tensor.copy_(decay * tensor + (1 - decay) * student[name])
        steps.add_(1)

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Store an unlabelled client's teacher, which has followed the last step, too."""
        if not update.payload:
            self.teacher_follows()
            self.clients.put(update.client, "teacher", clone_state(tensors_of(self.teacher)))
        return update

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """Whether the client has labels."""
        return {"is_labeled": (0, 1)}

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """The sub-consensus of the drawn clients, whose models are all in memory: they are weighed
        twice.
        """
        device = self.teacher.get_buffer("steps").device
        on_device = [update.to(device, copy=True) for update in updates]
        models = [update.model() for update in on_device]
        total = WeightedSum()
        for model, weight in zip(models, self.consensus_weights(on_device, models), strict=True):
            total.add(model, weight)
        return {"model": total}

    def consensus_weights(
        self, updates: Sequence[ClientUpdate], models: Sequence[State]
    ) -> list[float]:
        """The weights of the drawn clients: ``n_i exp(-beta distance_i / n_i)``, which sum to 1.

        Args:
            updates: The updates.
            models: Their weights and buffers.
        """
        if not updates:
            return []
        images = torch.tensor([update.num_samples for update in updates], dtype=torch.float64)
        factor = torch.tensor(
            [self.labeled_factor if update.payload else 1.0 for update in updates],
            dtype=torch.float64,
        )
        first = WeightedSum()
        for model, weight in zip(models, (images * factor).tolist(), strict=True):
            first.add(model, weight)
        mean = first.mean() or {}
        norms = torch.zeros_like(images)
        for place, model in enumerate(models):
            norms[place] = sum(float((model[name] - t).norm()) for name, t in mean.items())
        has_labels = any(update.payload for update in updates)
        scale = self.labeled_distance_scale if has_labels else self.distance_scale
        exponents = -scale * norms / images
        return torch.softmax(exponents + (images * factor.square()).log(), dim=0).tolist()

    def aggregate(self, sums: Sums) -> None:
        """Collect the sub-consensus model; after M rounds their mean is the global model."""
        collected = self.server.extra.get("sub_consensus", {})
        if (mean := sums["model"].mean()) is not None:
            mean["count"] = torch.ones(())
            collected = map_values(torch.add, mean, collected) if collected else mean
        if self.current_round.index % self.sub_consensus == 0 and collected:
            count = collected.pop("count")
            self.server.update(map_values(lambda t: t / count.to(t), collected))
            collected = {}
        self.server.extra["sub_consensus"] = collected
