"""Fed-SHVR: soft pseudo-labels, heterogeneous local steps and variance reduction for clients with a
few labels.

Z. Wang, X. Wang, R. Sun, T.-H. Chang, "Federated Semi-Supervised Learning with Class Distribution
Mismatch", arXiv 2111.00010 (Algorithm 1). No code is published.

A round, for a client k with N_k labelled and M_k unlabelled images:

1. the server sends theta;
2. the client labels all its unlabelled images, ``v_j ~ f_j^(alpha_0 / alpha_1)`` (Eq. 8), and uses
   v for the whole round;
3. it takes ``tau_k = max(M_k, N_k) E / B`` steps ``theta_k <- theta_k - eta (g + d_k)`` (Eq. 16), g
   the gradient of ``CE(labelled) + alpha_0 CE(unlabelled, v) + alpha_2 r_2``, and sends theta_k;
   r_2 is ``KL(uniform || f)``, or, as Eq. 9 prints it, ``KL(f || uniform)`` (``r2: to_uniform``);
4. the server averages normalised steps: ``theta' = theta - tau_bar sum_k w_k (theta - theta_k) /
   tau_k`` (Eq. 14);
5. the client updates its control variate,
   ``d_k <- d_k + (theta - theta') / (eta tau_bar) - (theta - theta_k) / (eta tau_k)`` (Eq. 15).

A round of Algorithm 1 begins with the averaging. Here a round ends with it: the sequence of
operations is the same. The paper updates d_k when a client receives theta'. Here d_k is updated as
soon as theta' is computed, so that a client's persistent state consists of d_k and the number of
its last round. ``alpha_1 KL(v || uniform)`` has no gradient in theta: alpha_1 has an effect through
v only. Labelled and unlabelled images are one forward pass. They are augmented only if
``data.weak`` says so.

The paper does not state three things: the final alpha_0 (here 1), whether the "first 50 epochs" of
its ramp are local epochs (here yes), and which alpha_0 Eq. 8 uses during the ramp. Here Eq. 8 uses
the final value from the second round on. The value of the ramp is below alpha_1 for most of the
ramp: each round would flatten the labels further, and the accuracy would fall (docs/results.md).
In the first round alpha_0 is 0, and v is uniform; with alpha_1 = 0, v is the prediction of the
untrained network.

The paper does not treat partial participation. Here d_k of the other clients does not change, and
the weights are renormalised: ``sum_k w_k d_k = 0`` then holds for the sum over all clients, but not
for the sum over the clients of a round. A client that skipped rounds downloads theta and, for Eq.
15, the theta' of its last round. d_k and v are never sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.labeled_unlabeled import PairedBatches
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State, Sums, WeightedSum, sizes_of
from lightning_fedssl.functional.device_copies import on_cpu
from lightning_fedssl.functional.dictionaries import (
    add_prefix,
    map_values,
    remove_prefix,
    select,
    starting_with,
)
from lightning_fedssl.functional.losses import kl_from_uniform, kl_to_uniform, soft_cross_entropy
from lightning_fedssl.functional.optimizers import plain_sgd, require_plain_sgd
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, sharpen
from lightning_fedssl.local_work import LocalWork, local_steps, paired_work
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

_STEPS = "num_steps"
_PASS = 1000
"""Images per forward pass without gradients."""


@hyperparameters
class FedSHVR(PairedBatches):
    """Fed-SHVR with its ablations.

    Fed-SH is ``control_variate=False``, Fed-SVR is ``averaging="plain"``.

    A client without labelled or without unlabelled images has no loss terms for them.

    Args:
        alpha0: Final value of alpha_0, the weight of the unlabelled cross-entropy. The paper does
            not state it. 1 reproduces its Table I most closely. 3, the value of pseudo-labelling
            (Lee, 2013), on which the paper builds, learns faster after the first rounds.
        alpha1: Weight of r_1, the regulariser of the pseudo-labels; 0 gives one-hot labels.
        alpha2: Weight of r_2, which penalises confident predictions on unlabelled images.
        r2: ``from_uniform``: KL(uniform, f), label smoothing, which reproduces Table I much more
            closely; ``to_uniform``: KL(f, uniform), the confidence penalty, as Eq. 9 prints it.
        ramp_epochs: Local epochs over which alpha_0 grows from 0; 0 for its final value from the
            start.
        label_alpha0: The alpha_0 of Eq. 8. ``final``: the ramp's value in the first round, whose
            labels are those of an untrained model, and the final value afterwards. ``ramped``: the
            ramp's value in every round; while it is below alpha_1, it flattens the labels.
        label_refresh: When v is computed: once a ``round`` by the received model (line 7 of
            Algorithm 1), or at every ``step`` by the model in training.
        control_variate: Correct gradients by d_k. It costs a model's size per client.
        averaging: ``normalized`` (Eq. 14), or the ``plain`` weighted mean of the clients' models.
        optimizer: The optimizer of a client's steps; Eq. 12 and 16 take plain SGD.
        client_epochs: E, local epochs of a client in a round.
    """

    same_step_every_round = True
    server_keeps = frozenset({"last_round"})
    clients_use_statistics = True

    alpha0: float = 1.0
    alpha1: float = 0.75
    alpha2: float = 0.1
    r2: Literal["from_uniform", "to_uniform"] = "from_uniform"
    ramp_epochs: float = 50
    label_alpha0: Literal["final", "ramped"] = "final"
    label_refresh: Literal["round", "step"] = "round"
    control_variate: bool = True
    averaging: Literal["normalized", "plain"] = "normalized"
    optimizer: OptimizerCallable = plain_sgd
    client_epochs: float = 2

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 0, "alpha1", "alpha2")
        if self.control_variate:
            require_plain_sgd(
                self.optimizer,
                "Eq. 15 of Fed-SHVR's paper divides a client's movement by the learning rate, "
                "which is the mean gradient under plain SGD alone (or set model.control_variate: "
                "false)",
                weight_decay=True,
            )
        self.confidence_loss = kl_to_uniform if self.r2 == "to_uniform" else kl_from_uniform
        self._tau_bar: Tensor | None = None

    def control(self, client: int) -> State:
        """d_k of a client by the weights' names: 0 before its first round; empty without control
        variates.
        """
        if not self.control_variate:
            return {}
        zeros = partial(torch.zeros_like, device="cpu", requires_grad=False)
        return self.clients.get(client, "control") or map_values(zeros, self.server.parameters)

    def download_sizes(self, client: int, received: State) -> Sizes:
        """The broadcast and what Eq. 15 needs: tau_bar and theta' of the client's last round, if it
        had one.

        The broadcast is the theta' of the previous round, which is therefore not sent again.
        """
        sizes = super().download_sizes(client, received)
        if last := self.clients.get(client, "last_round"):
            sizes["tau_bar"] = 8
            if int(last["round"]) < self.current_round.index - 1:
                sizes |= add_prefix("last_round.", sizes_of(self.server.parameters))
        return sizes

    def upload_sizes(self, update: ClientUpdate) -> Sizes:
        """The update and, where Eq. 14 or 15 needs it, tau_k."""
        needs_tau = self.control_variate or self.averaging == "normalized"
        return super().upload_sizes(update) | ({"tau": 8} if needs_tau else {})

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Label the client's images and draw its tau_k batches."""
        steps = local_steps(data, self.client_epochs)
        alpha0 = self.ramp.on_device(data, self.client_epochs, steps)
        control_variate_cpu = self.control(data.party)
        control_variate = map_values(
            lambda d: d.to(data.images.device, non_blocking=True), control_variate_cpu
        )
        pseudo = self._labels_of_round(data)

        def beside(rows: Tensor, step: Tensor) -> Batch:
            labels = {} if pseudo is None else {"v": pseudo.labels[rows]}
            return {"alpha0": alpha0[step], **labels}

        unlabeled = beside if self.ramp.final or self.alpha2 else None
        return paired_work(
            data, steps, unlabeled=unlabeled, pseudo_labels=pseudo, control_variate=control_variate
        )

    @torch.no_grad()
    def label_images(self, data: LocalData, alpha0: float) -> PseudoLabels:
        """Soft labels of all the client's unlabelled images (Eq. 8), from plain views in evaluation
        mode.

        Args:
            data: The client's data.
            alpha0: alpha_0 in the exponent.
        """
        self.eval()
        parts = data.unlabeled.split(_PASS) if len(data.unlabeled) else [data.labeled[:1]]
        logits = torch.cat([self(data.plain(part)) for part in parts])[: len(data.unlabeled)]
        labels = sharpen(logits.to(data.dtype), alpha0, self.alpha1)
        confidence = labels.max(dim=-1).values
        return PseudoLabels(labels, confidence, torch.ones_like(confidence, dtype=torch.bool))

    def _labels_of_round(self, data: LocalData) -> PseudoLabels | None:
        """Labels by the received model; None if the loss does not need them, or if each step makes
        its own.
        """
        if self.label_refresh == "step" or not self.ramp.final or not len(data.unlabeled):
            return None
        return self.label_images(data, self.alpha0_of_labels(data.round))

    def alpha0_of_labels(self, round_index: int) -> float:
        """alpha_0 in Eq. 8 in a round."""
        ramped = float(self.ramp.values(round_index, self.client_epochs, 1)[0])
        return self.ramp.final if round_index > 1 and self.label_alpha0 == "final" else ramped

    def unlabeled_terms(self, logits: Tensor, batch: Batch) -> list[Tensor]:
        """``alpha_0 CE(u, v)`` and ``alpha_2 r_2(f(u))``, each a mean over the images."""
        terms = [self.alpha2 * self.confidence_loss(logits).mean()]
        if self.ramp.final:
            v = batch["v"] if self.label_refresh == "round" else self._labels_now(logits.detach())
            terms.insert(0, (batch["alpha0"] * soft_cross_entropy(logits, v)).mean())
        return terms

    def _labels_now(self, logits: Tensor) -> Tensor:
        """Labels of a batch by the model in training (Eq. 8): ``(batch, classes)``."""
        return sharpen(logits, self.alpha0_of_labels(self.current_round.index), self.alpha1)

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Store the client's mean step for Eq. 15."""
        if self.control_variate:
            self.clients.put(update.client, "mean_step", self._mean_step(update))
        return update

    def on_result(self, client: int, result: State) -> None:
        """Apply Eq. 15 when theta' and tau_bar arrive."""
        tau = result["tau_bar"]
        after = remove_prefix("last_round.", starting_with("last_round.", result))
        before = select(self.server.parameters, after)
        moved = map_values(lambda p, new: (p - new) / tau.to(p), before, after)
        self._correct(client, on_cpu(moved))

    def on_round_start(self) -> None:
        """Refuse a learning rate of 0, by which Eq. 15 divides."""
        self._tau_bar = None
        rate_is_valid = not self.control_variate or self.current_round.client_lr > 0
        checks.require(
            rate_is_valid,
            "optimizer.init_args.lr",
            0,
            "Eq. 15 divides by it; end model.schedule above 0",
        )

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the clients' steps, normalised by their number."""
        total = WeightedSum()
        this_round = torch.tensor(self.current_round.index)
        for update in updates:
            mean_step = self._mean_step(update)
            if self.control_variate:
                self.clients.put(update.client, "last_round", {"round": this_round})
            steps = next(iter(mean_step.values())).new_tensor(float(update.num_steps))
            if self.averaging == "plain":
                mean_step = map_values(steps.mul, mean_step)
            total.add({**mean_step, **update.buffers, _STEPS: steps}, self.client_weight(update))
        return {"model": total}

    def aggregate(self, sums: Sums) -> None:
        """Apply Eq. 14 to the mean over the clients, then Eq. 15. Without an update, all values
        stay as they are.
        """
        mean = sums["model"].mean()
        if mean is None:
            return
        tau = mean.pop(_STEPS)
        scale = tau if self.averaging == "normalized" else torch.ones_like(tau)
        before = map_values(Tensor.clone, self.server.parameters)
        steps = select(mean, before)
        model = WeightedSum()
        model.add(mean | map_values(lambda step, theta: theta - scale * step, steps, before))
        super().aggregate({"model": model})
        if self.control_variate:
            self._tau_bar = tau
            trained = select(before, steps)
            moved = on_cpu(
                map_values(lambda p, new: (p - new) / tau, trained, self.server.parameters)
            )
            for client in self.clients.with_state("mean_step"):
                self._correct(client, moved)

    def result_for_clients(self) -> State:
        """tau_bar and theta', by which a client of the round updates its control
        variate (Eq. 15).
        """
        if self._tau_bar is None:
            return {}
        return {
            "tau_bar": self._tau_bar.double(),
            **add_prefix("last_round.", self.server.parameters),
        }

    def _mean_step(self, update: ClientUpdate) -> State:
        """``(theta - theta_k) / tau_k``."""
        return map_values(
            lambda p, theta: (theta - p) / update.num_steps,
            update.parameters,
            self.server.parameters,
        )

    def _correct(self, client: int, mean_step: State) -> None:
        """Apply Eq. 15 to a client of the round.

        Args:
            client: The client.
            mean_step: ``(theta - theta') / tau_bar``, on the CPU.
        """
        lr = self.current_round.client_lr
        client_step = self.clients.get(client, "mean_step")
        change = map_values(lambda step, mean: (mean - step) / lr, client_step, mean_step)
        self.clients.put(client, "control", map_values(torch.add, change, self.control(client)))
        self.clients.put(client, "mean_step", {})
