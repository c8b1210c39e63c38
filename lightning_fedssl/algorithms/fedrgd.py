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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm, Federation, labeled_work
from lightning_fedssl.algorithms.paired_work import side_by_side, unlabeled_work
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, WeightedSum, sizes_of
from lightning_fedssl.functional.losses import consistency_loss
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.schedules import FractionalCosine, Schedule
from lightning_fedssl.state import (
    Batch,
    ClientUpdate,
    LocalWork,
    load_optimizer_state,
    optimizer_state,
)

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

_log = logging.getLogger(__name__)

_UNUSED: dict[str, Any] = {
    "client_epochs": 1,
    "server_epochs": 0,
    "server_phase": "after",
    "server_weight": 0.5,
    "server_momentum": 0.0,
    "server_lr": 1.0,
    "client_weighting": "samples",
}
"""Arguments of other methods, with their defaults: here local_steps and groups say it all."""


class FedRGD(FederatedAlgorithm):
    """FedRGD with its baselines: FedAvg is ``groups=1``.

    Args:
        groups: S, groups of as equal size as C allows; or the sizes of the groups, as in ``[10, 10, 10, 10, 7]``.
        local_steps: T, steps of every user and of the server in a round.
        objective: What users train on their unlabelled images: ``crl`` (Eq. 4); ``self_training`` (Eq. 5): the weak
            view, on the label that the model gives it in evaluation mode; ``supervised`` (Eq. 6): labelled images only.
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        server_replicas: ``one`` server model, or one ``per_group``, each trained on batches of its own (S times the
            server's work).
        bn_buffers: Batch-norm statistics stay with the ``slot``, or are an ``average`` like the weights.
        keep_client_optimizer: A slot keeps its momentum from round to round, whichever user sits in it.
        keep_server_optimizer: The server keeps its momentum.
        schedule: The learning rate over the rounds; a 7/16 cosine if left out.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(
        self,
        groups: int | list[int] = 2,
        local_steps: int = 16,
        objective: Literal["crl", "self_training", "supervised"] = "crl",
        threshold: float = 0.95,
        server_replicas: Literal["one", "per_group"] = "one",
        bn_buffers: Literal["slot", "average"] = "slot",
        keep_client_optimizer: bool = True,
        keep_server_optimizer: bool = True,
        schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        for key, default in _UNUSED.items():
            if kwargs.get(key, default) != default:
                raise ValueError(f"model.{key} has no effect on FedRGD: set model.local_steps (T) and model.groups (S)")
        super().__init__(
            keep_client_optimizer=keep_client_optimizer,
            keep_server_optimizer=keep_server_optimizer,
            schedule=schedule or FractionalCosine(),
            **kwargs,
        )
        if local_steps < 1 or not 0 <= threshold <= 1:
            raise ValueError(
                "model.local_steps must be at least 1, model.threshold a probability; the paper's are 16, 0.95"
            )
        if min([groups] if isinstance(groups, int) else groups, default=0) < 1:
            raise ValueError(f"model.groups is {groups}: give a number of groups from 1 on, or the groups' sizes")
        self.groups = groups
        self.local_steps = local_steps
        self.objective = objective
        self.threshold = threshold
        self.server_replicas = server_replicas
        self.bn_buffers = bn_buffers
        self.server_takes_part = True
        self.num_groups = groups if isinstance(groups, int) else len(groups)
        self.slot_of: dict[int, int] = {}
        self.group_of_slot: list[int] = []
        self.replica = 0
        self._replicas: list[State] = []

    def check_data(self, data: FederatedDataModule) -> None:
        """Users need images for the objective; the server takes part if it has labelled ones."""
        self.server_takes_part = len(data.split.server_labeled) > 0
        if self.objective == "supervised" and data.label_location != "clients":
            raise ValueError("model.objective is supervised: users need labels: set data.label_location to clients")
        if self.objective != "supervised" and not any(len(client.unlabeled) for client in data.split.clients):
            raise ValueError(
                f"model.objective {self.objective} needs unlabelled images at the clients: lower data.num_labels"
            )

    def group_sizes(self, clients_per_round: int) -> list[int]:
        """|G_i| of every group.

        Args:
            clients_per_round: C.

        Raises:
            ValueError: There are more groups than users, or given sizes that do not add up to C.
        """
        if isinstance(self.groups, list):
            if sum(self.groups) != clients_per_round:
                raise ValueError(
                    f"model.groups {self.groups} has {sum(self.groups)} places, but trainer.clients_per_round is "
                    f"{clients_per_round}: make them equal"
                )
            return self.groups
        if self.groups > clients_per_round:
            raise ValueError(
                f"model.groups is {self.groups}, but trainer.clients_per_round is only {clients_per_round}: give at "
                "most one group per user"
            )
        each, more = divmod(clients_per_round, self.groups)
        return [each + 1] * more + [each] * (self.groups - more)

    def group_of(self, client: int) -> int:
        """The group of a user's slot."""
        return self.group_of_slot[self.slot_of[client]]

    def keeper(self, client: int) -> int:
        """What is kept belongs to the slot."""
        return self.slot_of[client]

    @property
    def steps_per_round(self) -> int:
        """T: the schedule sets the rate at every step."""
        return self.local_steps

    @property
    def keeps_client_state(self) -> bool:
        """Slots keep momentum, and batch-norm statistics if the network has them."""
        return self.keep_client_optimizer or (self.bn_buffers == "slot" and bool(self.uploaded_buffers()))

    # What a user does.

    def broadcast(self, client: int) -> State:
        """The mean of the group of the user's slot, with the slot's batch-norm statistics."""
        slot, extra = self.slot_of[client], self.server.extra
        buffers = {**extra["buffers"], **self.clients.get(slot, "buffers")}
        if not self.server_takes_part and slot in self._bridges():
            return {**buffers, **self.server.parameters}
        return {**buffers, **extra[f"group {self.group_of_slot[slot]}"]}

    def download_sizes(self, client: int, received: State) -> dict[str, int]:
        """The broadcast, and the momentum that the slot's last user has left."""
        return super().download_sizes(client, received) | self._momentum_sizes(client)

    def upload_sizes(self, update: ClientUpdate) -> dict[str, int]:
        """The update, and the momentum for the slot's next user."""
        return super().upload_sizes(update) | self._momentum_sizes(update.client)

    def _momentum_sizes(self, client: int) -> dict[str, int]:
        kept = self.clients.get(self.keeper(client), "optimizer")
        return {f"optimizer.{name}": size for name, size in sizes_of(kept).items()}

    def on_client_start(self, data: LocalData) -> LocalWork:
        """T batches of labelled images, of unlabelled ones, or of both side by side."""
        labeled = labeled_work(data, steps=self.local_steps)
        if self.objective == "supervised":
            return labeled
        unlabeled = unlabeled_work(data, steps=self.local_steps, strong=self.objective == "crl")
        return side_by_side(labeled, unlabeled)

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

    def on_server_start(self, data: LocalData) -> LocalWork:
        """T labelled batches, others for each replica."""
        if self.replica:
            data = replace(data, seed=sampling.stream_key(data.seed, "replica", self.replica))
        return labeled_work(data, steps=self.local_steps)

    def round(self, federation: Federation) -> None:
        """Server and users train, each from its own weights; then the groups average."""
        self._take_seats(federation)
        if self.server_takes_part:
            self._train_server(federation)
        self.aggregate(federation.reduce(self.accumulate(federation.train_clients())))

    def _take_seats(self, federation: Federation) -> None:
        """Give every user of the cohort a slot, and every group its first weights."""
        sizes = self.group_sizes(federation.clients_per_round)
        if federation.round_index == 1 and len(set(sizes)) > 1:
            _log.warning("the groups are of unequal size: %s users; each weighs 1/%d", sizes, self.num_groups)
        self.group_of_slot = [group for group, size in enumerate(sizes) for _ in range(size)]
        self.slot_of = {client: slot for slot, client in enumerate(federation.cohort)}
        if not self.server.extra:
            self.server.extra["buffers"] = _copy(self.server.buffers)
            for group in range(self.num_groups):
                self.server.extra[f"group {group}"] = _copy(self.server.parameters)

    def _train_server(self, federation: Federation) -> None:
        """Train the server model, or the groups' one after another, each with momentum and statistics of its own."""
        if self.server_replicas == "one":
            federation.train_server()
            return
        start, extra, self._replicas = _copy(self.server.parameters), self.server.extra, []
        for replica in range(self.num_groups):
            self.replica = replica
            buffers, optimizer = f"buffers {replica}", f"optimizer {replica}"
            self.server.update(start, extra.get(buffers, extra["buffers"]))
            if self.keep_server_optimizer:
                load_optimizer_state(federation.server_optimizer, extra.get(optimizer, {}))
            federation.train_server()
            self._replicas.append(_copy(self.server.model()))
            extra[buffers] = _copy(self.server.buffers)
            if self.keep_server_optimizer:
                extra[optimizer] = _copy(optimizer_state(federation.server_optimizer))
        self.replica = 0
        self.server.update(buffers=extra["buffers 0"])

    def accumulate(self, updates: Iterable[ClientUpdate]) -> dict[str, WeightedSum]:
        """One sum per group; batch-norm statistics stay with the slot, or are summed too."""
        sums = {f"group {group}": WeightedSum() for group in range(self.num_groups)}
        for update in updates:
            summed = dict(update.parameters)
            if self.bn_buffers == "average":
                summed |= update.buffers
            elif update.buffers:
                self.clients.put(self.slot_of[update.client], "buffers", update.buffers)
            sums[f"group {self.group_of(update.client)}"].add(summed)
        return sums

    def aggregate(self, sums: dict[str, WeightedSum]) -> None:
        """Eq. 7. A group without users is its server; without a server, too, it stays as it is."""
        extra, average = self.server.extra, WeightedSum()
        summed = self._averaged_names()
        for group in range(self.num_groups):
            name = f"group {group}"
            if self.server_takes_part:
                model = self._replicas[group] if self._replicas else self.server.model()
                sums[name].add({key: model[key] for key in summed})
            extra[name] = {**extra[name], **(sums[name].mean() or {})}
            average.add({key: extra[name][key] for key in summed if key in extra[name]})
        mean = average.mean() or {}
        buffers = {key: mean.pop(key) for key in list(mean) if key in self.server.buffers}
        if not self.server_takes_part and self.bn_buffers == "slot":
            buffers = self.clients.get(0, "buffers")
        self.server.update(mean, buffers)

    def _averaged_names(self) -> list[str]:
        weights = [name for name, p in self.named_parameters() if p.requires_grad]
        return weights + (self.uploaded_buffers() if self.bn_buffers == "average" else [])

    def _bridges(self) -> set[int]:
        """The slots that start from w_avg where no server model ties the groups together."""
        first = [self.group_of_slot.index(group) for group in range(self.num_groups)]
        return {*first[:-1], len(self.group_of_slot) - 1}


def _copy(state: State) -> State:
    return {name: t.clone() for name, t in state.items()}


__all__ = ["FedRGD"]
