"""FedRGD: consistency loss, group norm and grouping-based averaging reduce the gradient diversity
of the users.

Z. Zhang, Y. Yang, Z. Yao, Y. Yan, J. Gonzalez, K. Ramchandran, M. Mahoney, "Improving
Semi-supervised Federated Learning by Reducing the Gradient Diversity of Models", IEEE BigData 2021,
arXiv 2008.11364.

A round, with S groups and C users, who are divided among the groups at random in every round:

1. the server takes T steps of cross-entropy on its labelled images from w_avg, which gives w_s;
2. in parallel, each user takes T steps on its unlabelled images, from the mean w_avg,i of its group
   in the previous round: the strong view is trained with the weak view's pseudo-label if this is
   confident, ``sum(mask CE) / batch`` (CRL, Eq. 4);
3. each group averages its users and the server, ``w_avg,i = (w_s + sum of G_i) / (|G_i| + 1)``, and
   w_avg is the mean of the groups (Eq. 7). With one group that is FedAvg (Eq. 8).

Group norm is an option of the network (``norm: group``); ``GradientDiversity`` of
``examples/diagnostics/`` measures gradient diversity. Only weights are averaged. Momentum and
batch-norm statistics belong to the cohort slot (the user's position in the cohort), as in the
authors' code; the paper does not state it. The server's batch-norm statistics are evaluated.

The paper does not state the initial weights of a user that was not in the previous round; here they
are the mean of a random group.

Deviations from the authors' code:

* In the code a group is a fixed set of cohort slots, and a user starts from the mean of the group
  of its slot (``regroup: slots``). The groups are then S separate models, which have only the
  server's model in common, and a group whose users agree on wrong labels cannot recover.
* Every round has T steps; in the code the first round of each epoch has T + 1.
* There is one server model, as in Eq. 7; in the code each group has its own (``server_replicas:
  per_group``).
* With labels at the clients users train on Eq. 3 + Eq. 4; in the code each view is trained on its
  own label.

With ``regroup: slots``, labels at the clients and no server model, one user of each group restarts
from w_avg, as in the code: the user of the group's first slot, but of the last slot in the last
group. Otherwise the groups would not influence each other.

The mean w_avg can be accurate although every group mean predicts a single class;
``pseudo_label/confident_accuracy``, of labels by the group means, shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.cohort_slots import SlotAlgorithm, clone, group_sizes
from lightning_fedssl.algorithms.common.views import logits_of_views
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, Sums, WeightedSum
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.dictionaries import select
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.losses import added
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_work import LocalWork, labeled_work, side_by_side, unlabeled_work
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.round import Federation

_GROUP_OF_USER = "group of each user of the last round"


@hyperparameters
class FedRGD(SlotAlgorithm):
    """FedRGD with its baselines: FedAvg is ``groups=1``.

    Args:
        groups: S, the number of groups, which differ in size by at most one; or the sizes of the
            groups, as in ``[10, 10, 10, 10, 7]``.
        regroup: ``each_round`` divides the users of every round among the groups at random, and a
            user starts from the mean of the group that it was in (the paper); with ``slots`` a
            group is a fixed set of cohort slots (the authors' code).
        objective: What users train on their unlabelled images: ``crl`` (Eq. 4); ``self_training``
            (Eq. 5): the weak view, on the label that the model gives it in evaluation mode;
            ``supervised`` (Eq. 6): labelled images only.
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        server_replicas: ``one`` server model, or one ``per_group``, each trained on batches of its
            own (S times the server's work).
        server_votes: The weight of the server in each group's mean, where a user's weight is 1; 1
            in the paper. The server's share of w_avg is ``server_votes / (|G_i| + server_votes)``.
        consistency_weight: Weight of the users' loss on unlabelled images; 1 in the paper. With 0
            the users' weights change by weight decay alone: a control experiment that trains on
            labels alone, with the same share of the server in the average.
        server_only_rounds: Rounds at the start in which users do not train and w_avg is w_s; 0 in
            the paper.
        bn_buffers: Batch-norm statistics stay with the ``slot``, or are an ``average`` like the
            weights.
    """

    same_step_every_round = True
    needs = "confidence"
    no_static_batch_norm = "no statistics are measured for the means of FedRGD's groups"

    groups: int | list[int] = 2
    regroup: Literal["each_round", "slots"] = "each_round"
    objective: Literal["crl", "self_training", "supervised"] = "crl"
    threshold: float = 0.95
    server_replicas: Literal["one", "per_group"] = "one"
    server_votes: float = 1.0
    consistency_weight: float = 1.0
    server_only_rounds: int = 0
    bn_buffers: Literal["slot", "average"] = "slot"

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.probability(self, "threshold")
        checks.above_zero(self, "server_votes")
        checks.at_least(self, 0, "consistency_weight", "server_only_rounds")
        smallest = min([self.groups] if isinstance(self.groups, int) else self.groups, default=0)
        checks.require(
            smallest >= 1,
            "groups",
            self.groups,
            "give a number of groups from 1 on, or the groups' sizes",
        )
        self.needs_unlabeled = self.objective != "supervised"
        vars(self)["labels_at"] = None if self.needs_unlabeled else "clients"
        self.num_groups = self.groups if isinstance(self.groups, int) else len(self.groups)
        self.group_of_slot: list[int] = []
        self.start_of_slot: list[int] = []
        self._servers: list[State] = []

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse data without the images that the objective needs."""
        super().check_data(data)
        rounds = self.server_only_rounds
        checks.require(
            self.server_takes_part or not rounds,
            "server_only_rounds",
            rounds,
            "it needs server labels",
        )

    # What a user does.

    def broadcast(self, client: int) -> State:
        """w_avg,i of the group that the user starts from, with the batch-norm statistics of its
        slot.
        """
        slot = self.slot_of[client]
        average = self.server.model() if self.bn_buffers == "average" else self.server.parameters
        start = average if slot in self._bridges() else self.group_means()[self.start_of_slot[slot]]
        return {**self.slot_buffers(slot), **start}

    def replica_buffers(self, replica: int) -> State:
        """The batch-norm statistics of a server replica at the start of a round: averaged ones, or
        its own.
        """
        return (
            self.server.buffers
            if self.bn_buffers == "average"
            else super().replica_buffers(replica)
        )

    def on_client_start(self, data: LocalData) -> LocalWork:
        """T batches of labelled images, of unlabelled ones, or of both side by side."""
        steps = 0 if data.round <= self.server_only_rounds else self.local_steps
        labeled = labeled_work(data, steps=steps)
        if self.objective == "supervised":
            return labeled
        return side_by_side(
            labeled, unlabeled_work(data, steps=steps, strong=self.objective == "crl")
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Eq. 3 on labelled images plus Eq. 4 or 5 on unlabelled ones, from one forward pass of all
        views.
        """
        pseudo = self._labels_in_evaluation(batch) if self.objective == "self_training" else None
        logits = logits_of_views(self, batch, ("x", "x_weak", "x_strong"))
        losses = [self.task.labeled_loss(logits["x"], batch["y"])] if "x" in logits else []
        if "x_weak" in logits:
            pseudo = pseudo or self.task.label(logits["x_weak"].detach(), self.threshold)
            trained = logits["x_strong" if "x_strong" in logits else "x_weak"]
            losses.append(self.consistency_weight * self.task.consistency_loss(trained, pseudo))
            self.log("client/mask_rate", pseudo.mask.double().mean(), batch_size=len(pseudo.mask))
        return added(losses)

    def _labels_in_evaluation(self, batch: Batch) -> PseudoLabels | None:
        """Labels of the weak views in evaluation mode."""
        if "x_weak" not in batch:
            return None
        with evaluating(self):
            return self.task.label(self(batch["x_weak"]), self.threshold)

    # What the server does.

    def group_of(self, client: int) -> int:
        """The group whose mean contains the user in this round."""
        return self.group_of_slot[self.slot_of[client]]

    def group_means(self) -> list[State]:
        """w_avg,i of every group after the last round, not copied; none before the first round."""
        names = [f"group {group}" for group in range(self.num_groups)]
        return [self.server.extra[name] for name in names if name in self.server.extra]

    def on_round_start(self) -> None:
        """Assign slots, divide them among the groups, and give every group its first weights."""
        super().on_round_start()
        sizes = group_sizes(self.groups, self.current_round.clients_per_round)
        self.group_of_slot = [group for group, size in enumerate(sizes) for _ in range(size)]
        self.start_of_slot = self.group_of_slot
        if self.regroup == "each_round":
            self._divide()
        for group in range(self.num_groups):
            self.server.extra.setdefault(f"group {group}", clone(self.server.parameters))

    def _divide(self) -> None:
        """Divide the cohort at random.

        A user starts from the mean of the group that it was in before, a new user from that of a
        random group.
        """
        draw = sampling.rng(sampling.global_seed(), "groups", self.current_round.index)
        random_start = draw.permutation(self.group_of_slot).tolist()
        self.group_of_slot = draw.permutation(self.group_of_slot).tolist()
        before = self.server.extra.get(_GROUP_OF_USER, {})
        self.start_of_slot = []
        now = self.server.extra[_GROUP_OF_USER] = {}
        for client, slot in self.slot_of.items():
            self.start_of_slot.append(int(before.get(str(client), random_start[slot])))
            now[str(client)] = torch.tensor(self.group_of_slot[slot])

    def train_servers(self, federation: Federation) -> None:
        """Train w_s: one for all groups, or one for each; none if the server has no labelled
        images.
        """
        count = self.num_groups if self.server_replicas == "per_group" else 1
        self._servers = self.train_replicas(federation, count) if self.server_takes_part else []

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """One sum per group; batch-norm statistics stay with the slot, or are summed too."""
        sums = {f"group {group}": WeightedSum() for group in range(self.num_groups)}
        for update in updates:
            tensors = update.parameters
            if self.bn_buffers == "average":
                tensors = update.model()
            elif update.buffers:
                self.clients.put(self.slot_of[update.client], "buffers", update.buffers)
            sums[f"group {self.group_of(update.client)}"].add(tensors)
        return sums

    def aggregate(self, sums: Sums) -> None:
        """Eq. 7: ``w_avg,i = (w_s + sum of G_i) / (|G_i| + 1)`` for every group, and w_avg is their
        mean.

        The mean of a group without users is its server's model; without a server, it does not
        change.
        """
        average = WeightedSum()
        summed = self._averaged_names()
        for group, old_mean in enumerate(self.group_means()):
            total = sums[f"group {group}"]
            if self._servers:
                server = self._servers[group % len(self._servers)]
                total.add(select(server, summed), self.server_votes)
            mean = self.server.extra[f"group {group}"] = {**old_mean, **(total.mean() or {})}
            average.add(select(mean, summed))
        new = average.mean() or {}
        if not self._servers and self.bn_buffers == "slot":
            new |= self.clients.get(0, "buffers")
        self.server.update(new)

    def _averaged_names(self) -> list[str]:
        weights = [*trained_weights(self)]
        return weights + (self.uploaded_buffers() if self.bn_buffers == "average" else [])

    def _bridges(self) -> set[int]:
        """The slots that start from w_avg: one per group where groups would not influence each
        other otherwise.
        """
        if self.server_takes_part or self.regroup == "each_round":
            return set()
        first = list(map(self.group_of_slot.index, range(self.num_groups)))
        return {*first[:-1], len(self.group_of_slot) - 1}
