"""CBAFed: class-balanced adaptive thresholds, for a few fully labelled clients beside clients
without labels.

M. Li, Q. Li, Y. Wang, "Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised
Learning", CVPR 2023. Authors' code: github.com/minglllli/CBAFed.

In the first ``warmup_rounds`` rounds only labelled clients train. In a later round:

1. the server sends the global model, a threshold for each class and the rare classes;
2. an unlabelled client labels its images once (evaluation mode, weak views). An image whose
   confidence is above its class's threshold gets its class; another one gets its second most
   probable class, if that is rare. The client takes one epoch over these views and labels, in the
   order in which it labelled them;
3. a labelled client takes E epochs. Its residual connection: every fifth epoch after the first, its
   weights become ``(4 r + w) / 5``, with r the weights after the first epoch and later those after
   the last such step. So 5 k + 1 epochs move the weights about as far as k + 1 epochs without it
   (the code's 11 as 3, its warm-up of 501 as 101);
4. the server averages by the number of images trained on. Every fifth round it takes the mean of
   this average and of the last such mean, at first the model of the warm-up;
5. with q the shares of the classes in all labels and pseudo-labels, times K/10 for K classes, a
   threshold is ``min(q + base - std(q), cap)``, and a class is rare if its q is below
   ``rare_share``.

As the code has it: a batch of one image is skipped; pseudo-labels of rare classes count. Its lower
rate for unlabelled clients, 0.02 against 0.03, is here ``unlabeled_weight``, which scales their
loss: 2/3 (weight decay and clipped gradients aside). In the code all clients take part in every
round; here the labels of clients that are not drawn, or are drawn without an image to label, count
as of their last round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, Sums
from lightning_fedssl.functional.dictionaries import map_values, tensors_of
from lightning_fedssl.local_work import NO_WORK, LocalWork, labeled_work
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

_EVERY = 5
"""Epochs of a labelled client, and rounds of the server, between two residual connections."""


@hyperparameters
class CBAFed(FederatedAlgorithm):
    """Class-balanced adaptive pseudo-labels with residual weight connections.

    Args:
        warmup_rounds: Rounds in which labelled clients alone train, at least one: they count the
            classes.
        warmup_epochs: E of a labelled client in a warm-up round.
        client_epochs: E of a labelled client in a later round, a whole number; an unlabelled client
            takes one.
        threshold: The base of the classes' thresholds.
        threshold_cap: The largest threshold; 0.9 in the code for SVHN and ISIC 2018.
        rare_share: T_lower, the share below which a class is rare; 0 leaves out second classes.
        residual: Whether labelled clients and server have residual connections.
        unlabeled_weight: Of the unlabelled clients' loss.
        gradient_clip_norm: Largest gradient norm of a step.
        keep_client_optimizer: A client's momentum persists until its next participation.
    """

    not_deployable = "needs the numbers of labels of every client, which a node does not send"
    labels_at = "clients"

    local_modules = frozenset({"record", "classes"})
    clients_use_statistics = True

    warmup_rounds: int = 1
    warmup_epochs: int = 501
    client_epochs: float = 11
    threshold: float = 0.84
    threshold_cap: float = 0.95
    rare_share: float = 0.03
    residual: bool = True
    unlabeled_weight: float = 2 / 3
    gradient_clip_norm: float | None = 5.0
    keep_client_optimizer: bool = True

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 1, "warmup_rounds", "warmup_epochs")
        checks.at_least(self, 0, "unlabeled_weight")
        checks.probability(self, "threshold", "threshold_cap", "rare_share")
        is_whole = self.client_epochs == int(self.client_epochs)
        checks.require(is_whole, "client_epochs", self.client_epochs, "give a whole number")

    def build_parts(self) -> None:
        """Build the record for the residual connection, and what a client receives of the
        classes.
        """
        self.record = Teacher({"network": self.network})
        self.classes = nn.Module()
        self.classes.register_buffer("threshold", torch.ones(self.num_classes or 0))
        self.classes.register_buffer("rare", torch.zeros(self.num_classes or 0))

    def check_data(self, data: FederatedDataModule) -> None:
        """Every client has labels for all of its images or for none."""
        super().check_data(data)
        checks.fully_labeled_clients(data, "CBAFed")

    @property
    def round_after_warmup(self) -> int:
        """The number of the round after the warm-up, from 0; below 0 in the warm-up."""
        return self.current_round.index - self.warmup_rounds - 1

    def broadcast(self, client: int) -> State:
        """The global model, and after the warm-up the classes' thresholds and which classes are
        rare.
        """
        model = super().broadcast(client)
        if self.round_after_warmup < 0 or not self.server.extra.get("counts"):
            return model
        counts = torch.stack(list(self.server.extra["counts"].values())).sum(dim=0)
        share = counts / counts.sum() * (len(counts) / 10)
        threshold = (share + self.threshold - share.std()).clamp(max=self.threshold_cap)
        return {
            **model,
            "classes.threshold": threshold,
            "classes.rare": (share < self.rare_share).to(share),
        }

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Epochs with residual connections on labelled images, or one epoch on pseudo-labels; no
        work in the warm-up.
        """
        if len(data.labeled):
            return self.labeled_work(data)
        if data.round <= self.warmup_rounds or not len(data.unlabeled):
            return NO_WORK
        x, labels = self.label_images(data)
        starts = [
            start for start in range(0, len(labels), data.batch_size) if start != len(labels) - 1
        ]
        weight = torch.full_like(labels, self.unlabeled_weight, dtype=data.dtype)

        def batch(step: int) -> Batch:
            rows = slice(starts[step], starts[step] + data.batch_size)
            return {"x": x[rows], "y": labels[rows], "weight": weight[rows]}

        return LocalWork(len(labels), len(starts), batch, payload={"counts": self.counts(labels)})

    def labeled_work(self, data: LocalData) -> LocalWork:
        """Epochs on labelled images.

        The first batch of an epoch says what to do with the weights before it.
        """
        epochs = self.warmup_epochs if data.round <= self.warmup_rounds else int(self.client_epochs)
        work = labeled_work(data, epochs)
        self.record.follow({"network": self.network}, 0.0)

        def batch(step: int) -> Batch:
            epoch, place = divmod(step, work.epoch_steps)
            if not self.residual or place or epoch % _EVERY != 1:
                return work.batch(step)
            return {**work.batch(step), "records" if epoch == 1 else "connects": torch.ones(1)}

        ends_connected = self.residual and epochs > 1 and epochs % _EVERY == 1
        flag = {"connects": torch.ones(1)} if ends_connected else {}
        return replace(work, batch=batch, payload={"counts": self.counts(data.labels), **flag})

    def counts(self, labels: Tensor) -> Tensor:
        """The number of labels of each class: ``(classes,)``.

        Args:
            labels: ``(n,)`` int64.
        """
        return F.one_hot(labels, self.num_classes or 0).sum(dim=0).to(torch.float32)

    @torch.no_grad()
    def label_images(self, data: LocalData) -> tuple[Tensor, Tensor]:
        """Weak views of the images that get a label, and their labels."""
        self.eval()
        threshold = self.classes.get_buffer("threshold")
        rare = self.classes.get_buffer("rare") > 0
        order = data.unlabeled[data.permutation(len(data.unlabeled), "order")]
        views = []
        labels = []
        for number, part in enumerate(order.split(data.batch_size)):
            x = data.weak(part, "labeling", start=number * data.batch_size)
            top = self(x).to(data.dtype).softmax(dim=-1).topk(2)
            first, second = top.indices.unbind(dim=1)
            confident = top.values[:, 0] > threshold[first]
            takes_second = ~confident & rare[second]
            views += [x[confident], x[takes_second]]
            labels += [first[confident], second[takes_second]]
        return torch.cat(views), torch.cat(labels)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy, after what the batch says to do with the weights."""
        if "records" in batch:
            self.record.follow({"network": self.network}, 0.0)
        if "connects" in batch and batch["connects"].item():
            self.connect()
        logits = self(batch["x"])
        if "weight" not in batch:
            return self.task.labeled_loss(logits, batch["y"])
        return (self.task.entry_losses(logits, batch["y"]) * batch["weight"]).mean()

    @torch.no_grad()
    def connect(self) -> None:
        """The weights become ``(4 r + w) / 5``, and so does r."""
        record = tensors_of(self.record["network"])
        for name, tensor in tensors_of(self.network).items():
            if tensor.is_floating_point():
                tensor.copy_((4 * record[name] + tensor) / 5)
                record[name].copy_(tensor)

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """The last residual connection of a labelled client, in the tensors of the update."""
        if "connects" in update.payload:
            self.connect()
        return replace(update, payload={"counts": update.payload["counts"]})

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """One label for each image."""
        return {"counts": (0, update.num_samples)}

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the models, and keep the counts of every client.

        Those of this round count from the next one on.
        """
        new = {}

        def counted() -> Iterator[ClientUpdate]:
            for update in updates:
                new[str(update.client)] = update.payload["counts"].clone()
                yield update

        sums = super().accumulate(counted())
        self.server.extra["counts"] = self.server.extra.get("counts", {}) | new
        return sums

    def aggregate(self, sums: Sums) -> None:
        """The mean, every fifth round with the residual connection."""
        mean = sums["model"].mean()
        if mean is None:
            return
        after = self.round_after_warmup
        record = self.server.extra.get("record", {})
        if self.residual and after > 0 and after % _EVERY == 0 and record:
            mean = map_values(lambda t, last: (last + t) / 2, mean, record)
        if self.residual and (after < 0 or (after > 0 and after % _EVERY == 0)):
            self.server.extra["record"] = map_values(Tensor.clone, mean)
        self.server.update(mean)
