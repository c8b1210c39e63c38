"""FedRGD: consistency loss, group norm and grouping-based averaging reduce the gradient diversity of the users.

Z. Zhang, Y. Yang, Z. Yao, Y. Yan, J. Gonzalez, K. Ramchandran, M. Mahoney, "Improving Semi-supervised Federated
Learning by Reducing the Gradient Diversity of Models", IEEE BigData 2021, arXiv 2008.11364.

A round, with S groups of slots and C users drawn in random order, the i-th of them in slot i:

1. the server takes T steps of cross-entropy on its labelled images from w_avg, which gives w_s;
2. in parallel, each user takes T steps from the mean of its slot's group, w_avg,i, on its unlabelled images: the strong
   view is trained on the label of the weak one where that is confident, ``sum(mask CE) / batch`` (CRL, Eq. 4);
3. each group averages its users and the server, ``w_avg,i = (w_s + sum of G_i) / (|G_i| + 1)``, and w_avg is the mean
   of the groups (Eq. 7). With one group that is FedAvg (Eq. 8).

Group norm is a matter of the network (``norm: group``); gradient diversity is measured by the callback
``GradientDiversity``. A user that was not in the round before inherits its slot's group mean, and the momentum of the
slot stays whoever sits in it, as in the authors' code; the paper states neither. So it travels with the weights. Only
weights are averaged: the slots and the server keep batch-norm statistics of their own, and the server's are evaluated.

Deviations from the authors' code: every round has T steps (there the first of each epoch has T + 1); one server model,
as Eq. 7 has it (there one per group: ``server_replicas: per_group``); with labels at the clients users train on Eq. 3 +
Eq. 4 (there each view is trained on its own label).
With labels at the clients and no server model, as there, one user of each group restarts from w_avg: the first slot's,
in the last group the last slot's. Nothing else would tie the groups together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithms.common.cohort_slots import (
    RULE_OF_OTHERS,
    SlotAlgorithm,
    check_groups,
    clone,
    group_sizes,
    refuse_idle,
)
from lightning_fedssl.algorithms.common.labeled_unlabeled import check_labeled_clients
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.federation import Federation
from lightning_fedssl.functional.averaging import State, WeightedSum
from lightning_fedssl.functional.losses import consistency_loss
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.local_work import LocalWork, labeled_work, side_by_side, unlabeled_work
from lightning_fedssl.state import Batch, ClientUpdate

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

_log = logging.getLogger(__name__)


class FedRGD(SlotAlgorithm):
    """FedRGD with its baselines: FedAvg is ``groups=1``.

    Args:
        groups: S, groups of as equal size as C allows; or the sizes of the groups, as in ``[10, 10, 10, 10, 7]``.
        objective: What users train on their unlabelled images: ``crl`` (Eq. 4); ``self_training`` (Eq. 5): the weak
            view, on the label that the model gives it in evaluation mode; ``supervised`` (Eq. 6): labelled images only.
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        server_replicas: ``one`` server model, or one ``per_group``, each trained on batches of its own (S times the
            server's work).
        bn_buffers: Batch-norm statistics stay with the ``slot``, or are an ``average`` like the weights.
        kwargs: The arguments of :class:`SlotAlgorithm`, T among them, and those every algorithm takes.
    """

    def __init__(
        self,
        groups: int | list[int] = 2,
        objective: Literal["crl", "self_training", "supervised"] = "crl",
        threshold: float = 0.95,
        server_replicas: Literal["one", "per_group"] = "one",
        bn_buffers: Literal["slot", "average"] = "slot",
        **kwargs: Any,
    ) -> None:
        refuse_idle("FedRGD", kwargs, RULE_OF_OTHERS, "its average is Eq. 7; set model.groups (S)")
        super().__init__(**kwargs)
        if not 0 <= threshold <= 1:
            raise ValueError(f"model.threshold is {threshold}: give a probability between 0 and 1; the paper's is 0.95")
        check_groups(groups)
        self.groups = groups
        self.objective = objective
        self.threshold = threshold
        self.server_replicas = server_replicas
        self.bn_buffers = bn_buffers
        self.num_groups = groups if isinstance(groups, int) else len(groups)
        self.group_of_slot: list[int] = []
        self._servers: list[State] = []

    def check_data(self, data: FederatedDataModule) -> None:
        """Users need images for the objective."""
        super().check_data(data)
        if self.objective == "supervised":
            check_labeled_clients(data, "model.objective supervised")
        elif not any(len(client.unlabeled) for client in data.split.clients):
            raise ValueError(
                f"model.objective {self.objective} needs unlabelled images at the clients: lower data.num_labels"
            )

    # What a user does.

    def broadcast(self, client: int) -> State:
        """The mean of the group of the user's slot, with the slot's batch-norm statistics."""
        slot = self.slot_of[client]
        restarts = not self.server_takes_part and slot in self._bridges()
        group = self.server.parameters if restarts else self.server.extra[f"group {self.group_of(client)}"]
        return {**self.slot_buffers(slot), **group}

    def on_client_start(self, data: LocalData) -> LocalWork:
        """T batches of labelled images, of unlabelled ones, or of both side by side."""
        labeled = labeled_work(data, steps=self.local_steps)
        if self.objective == "supervised":
            return labeled
        return side_by_side(labeled, unlabeled_work(data, steps=self.local_steps, strong=self.objective == "crl"))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Eq. 3 on labelled images plus Eq. 4 or 5 on unlabelled ones; all views pass the network together."""
        pseudo = self._labels_in_evaluation(batch) if self.objective == "self_training" else None
        views = {name: batch[name] for name in ("x", "x_weak", "x_strong") if name in batch}
        passed = self(torch.cat(list(views.values()))).split([len(view) for view in views.values()])
        logits = dict(zip(views, passed, strict=True))
        losses = [F.cross_entropy(logits["x"], batch["y"])] if "x" in logits else []
        if "x_weak" in logits:
            pseudo = pseudo or pseudo_label(logits["x_weak"].detach(), self.threshold)
            losses.append(consistency_loss(logits["x_strong" if "x_strong" in logits else "x_weak"], pseudo))
            self.log("client/mask_rate", pseudo.mask.double().mean(), batch_size=len(pseudo.mask))
        return sum(losses[1:], start=losses[0])

    @torch.no_grad()
    def _labels_in_evaluation(self, batch: Batch) -> PseudoLabels | None:
        """Labels of the weak views in evaluation mode."""
        if "x_weak" not in batch:
            return None
        self.eval()
        pseudo = pseudo_label(self(batch["x_weak"]), self.threshold)
        self.train()
        return pseudo

    # What the server does.

    def group_of(self, client: int) -> int:
        """The group of a user's slot."""
        return self.group_of_slot[self.slot_of[client]]

    def take_slots(self, federation: Federation) -> None:
        """Give out slots, cut them into groups, and give every group its first weights."""
        super().take_slots(federation)
        sizes = group_sizes(self.groups, federation.clients_per_round)
        if federation.round_index == 1 and len(set(sizes)) > 1:
            _log.warning("the groups are of unequal size: %s users; each weighs 1/%d", sizes, self.num_groups)
        self.group_of_slot = [group for group, size in enumerate(sizes) for _ in range(size)]
        for group in range(self.num_groups):
            self.server.extra.setdefault(f"group {group}", clone(self.server.parameters))

    def train_servers(self, federation: Federation) -> None:
        """w_s, one for all groups or one for each; none if the server has no labelled images."""
        count = self.num_groups if self.server_replicas == "per_group" else 1
        self._servers = self.train_replicas(federation, count) if self.server_takes_part else []

    def accumulate(self, updates: Iterable[ClientUpdate]) -> dict[str, WeightedSum]:
        """One sum per group; batch-norm statistics stay with the slot, or are summed too."""
        sums = {f"group {group}": WeightedSum() for group in range(self.num_groups)}
        for update in updates:
            averaged = self.bn_buffers == "average"
            if update.buffers and not averaged:
                self.clients.put(self.slot_of[update.client], "buffers", update.buffers)
            sums[f"group {self.group_of(update.client)}"].add(update.parameters | (update.buffers if averaged else {}))
        return sums

    def aggregate(self, sums: dict[str, WeightedSum]) -> None:
        """Eq. 7. A group without users is its server; without a server, too, it stays as it is."""
        average, summed = WeightedSum(), self._averaged_names()
        for group in range(self.num_groups):
            total, known = sums[f"group {group}"], self.server.extra[f"group {group}"]
            if self._servers:
                server = self._servers[group % len(self._servers)]
                total.add({name: server[name] for name in summed})
            mean = self.server.extra[f"group {group}"] = {**known, **(total.mean() or {})}
            average.add({name: mean[name] for name in summed if name in mean})
        new = average.mean() or {}
        buffers = {name: new.pop(name) for name in list(new) if name in self.server.buffers}
        if not self._servers and self.bn_buffers == "slot":
            buffers = self.clients.get(0, "buffers")
        self.server.update(new, buffers)

    def _averaged_names(self) -> list[str]:
        weights = [name for name, p in self.named_parameters() if p.requires_grad]
        return weights + (self.uploaded_buffers() if self.bn_buffers == "average" else [])

    def _bridges(self) -> set[int]:
        """The slots that start from w_avg where no server model ties the groups together."""
        first = [self.group_of_slot.index(group) for group in range(self.num_groups)]
        return {*first[:-1], len(self.group_of_slot) - 1}
