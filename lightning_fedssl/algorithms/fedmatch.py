"""FedMatch: inter-client consistency and disjoint learning on decomposed weights.

W. Jeong, J. Yoon, E. Yang, S. J. Hwang, "Federated Semi-Supervised Learning with Inter-Client
Consistency & Disjoint Learning", ICLR 2021, arXiv 2006.12097.

Every weight is ``theta = sigma + psi``: sigma is trained on labelled images alone, psi on
unlabelled ones alone. A round, with labels at the clients:

1. every 10th round each drawn client k that took part before receives H helpers. The server
   compares the models' class probabilities of a fixed noise image, and sends the last psi of the H
   clients whose models are most similar to k's;
2. a client alternates steps of sigma on ``lambda_s CE(x, y)`` (Eq. 4) and of psi on (Eq. 5)
   ``lambda_ICCS [1/H sum_h KL(p_h || p) + CE(strong(u), vote)] + lambda_L1 |psi|
   + lambda_L2 (sigma - psi)^2``; p are the local model's probabilities of the plain image, p_h
   those of the received sigma with a helper's psi, and the vote is the class that most of these
   models predict. KL and CE are means over the images with ``max p >= tau``; the last two terms are
   always added;
3. entries of sigma and psi that changed by no more than a threshold are set to the server's values,
   and the others are uploaded;
4. the server computes each model's probabilities of the noise image (its embedding), and averages
   sigma and psi with equal weights.

With labels at the server, the server trains sigma before the clients train, and the clients train
and upload psi alone. Entries of psi below a threshold count as zero where the server trains and
where a model is evaluated.

From the authors' code, where the paper does not state a value or the code differs: tau is 0.75
(paper: 0.85), there are no helpers in rounds without a delivery, both thresholds, psi is initially
0.2 sigma, and the learning rate is divided by 3 when the loss of a client's model on the global
validation images has not fallen for some rounds (here each client has its own rate; in the code
several clients share an optimizer). A client downloads these images and their labels once, which
the communication ledger counts. Our decisions: batches are shuffled in every round (code:
``shuffle: false``), log-softmax instead of clipped probabilities, the noise image is not
normalised, and norm layers belong to sigma.

Communication is counted as sparse: the server announces a new value of an entry when it has changed
by more than the threshold, and a client downloads the entries announced since it last took part.
The authors' code compares with the client's weights after its last local training, and counts the
entries of a helper that differ from the client's psi. Here all entries of a helper above the
threshold are counted. ``communication/download_share`` and ``upload_share``, relative to one dense
set of weights, are therefore not comparable with the paper's. The simulation copies all weights.
The bytes include the positions of the entries. The share of psi above the threshold is
``server/psi_share``.

A client's epoch of n images has ``round(n / B)`` steps, as in the code. With 440 images in batches
of 100 it trains on 400 of them, here on others in every round. An epoch of the server contains all
of its images.

With the published rate and ``lambda_L2 = 10`` the last term reduces the distance of psi from sigma
by 2 % per step, which dominates the other terms: theta tends to 2 sigma, and psi is not sparse. The
published strong view is ``data.strong: fedmatch``, with ``data.weak: none``; the published
partition that is not IID is ``ClientTypes``. Not implemented: the paper's streaming setting
(Fashion-MNIST in steps of ten rounds, with evaluation of the local models), and the code's split of
CIFAR-10's 60,000 pooled images; the configurations use the standard split.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData, Visits
from lightning_fedssl.functional.averaging import Sizes, State, Sums, sizes_of
from lightning_fedssl.functional.dictionaries import map_values, remove_prefix, starting_with
from lightning_fedssl.functional.losses import added, masked_mean
from lightning_fedssl.functional.optimizers import require_plain_sgd, slow_plain_sgd
from lightning_fedssl.functional.pseudo_labels import agreement, pseudo_label
from lightning_fedssl.local_work import LocalWork, epochs_of, labeled_work
from lightning_fedssl.models.network import Network
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.round import Federation

_PSI = "network.psi."
_LR_DIVISOR = 3.0
_RATE = "rate"
_ROUND = "round"
_VALUE = "announced"
_SEEN = "seen"
_NEEDS_SGD = (
    "model.lr_patience lowers a party's rate by a factor of its loss, which is a factor of the "
    "rate under plain SGD alone (or set model.lr_patience: null)"
)


class _TrainsDecomposed(FederatedAlgorithm):
    network: Decomposed


@hyperparameters
class FedMatch(_TrainsDecomposed):
    """FedMatch with labels at the clients or at the server, as ``data.label_location`` says.

    Args:
        threshold: tau (inclusive); 0.75 in the code, 0.85 in the paper.
        labeled_weight: lambda_s, the weight of the cross-entropy on labelled images.
        consistency_weight: lambda_i, of the KL to the helpers (the paper's lambda_ICCS).
        agreement_weight: lambda_a, of the cross-entropy on the votes (the paper's lambda_ICCS).
        l1_weight: lambda_L1: 1e-4 with labels at the clients, 1e-5 at the server.
        l2_weight: lambda_L2, the weight of ``(sigma - psi)^2``.
        helpers: H; 0 for none. The server stores the last psi of every client that took part: half
            the size of a model each.
        helper_interval: Rounds from one delivery of helpers to the next.
        l1_threshold: Entries of psi up to this size count as zero in evaluation and at the server:
            5e-6 with labels at the clients, 1e-5 at the server.
        delta_threshold: Entries that a client changed by no more than this are not sent: 5e-5 with
            labels at the clients, 1e-5 at the server.
        psi_scale: The initial psi is this multiple of sigma.
        variance_scaling: Draw sigma from a truncated normal distribution of variance 1 / fan-in, as
            the authors do; if false, sigma has the network's own initial weights.
        lr_patience: Rounds without a lower validation loss after which a party divides its rate by
            3: 5, and 20 with labels at the server; null for a constant rate.
        optimizer: The optimizer of sigma and psi: plain SGD.
        client_epochs: Epochs of a client. It divides its unlabelled images into as many batches as
            it has labelled batches; without labelled images, into batches of
            ``data.client_batch_size``.
        server_epochs: Epochs of the server over its labelled images.
        client_weighting: A client's weight in the mean: its number of ``samples``, or ``uniform``.
    """

    no_personal = "sends clients the whole models of others"
    not_deployable = "sends clients the models of other clients"
    needs_unlabeled = True
    sends_sigma = True
    no_static_batch_norm = "no statistics are measured for the models of FedMatch's helpers"

    threshold: float = 0.75
    labeled_weight: float = 10.0
    consistency_weight: float = 0.01
    agreement_weight: float = 0.01
    l1_weight: float = 1e-4
    l2_weight: float = 10.0
    helpers: int = 2
    helper_interval: int = 10
    l1_threshold: float = 5e-6
    delta_threshold: float = 5e-5
    psi_scale: float = 0.2
    variance_scaling: bool = True
    lr_patience: int | None = 5
    optimizer: OptimizerCallable = slow_plain_sgd
    client_epochs: float = 1
    server_epochs: float = 1
    client_weighting: Literal["samples", "uniform"] = "uniform"

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.probability(self, "threshold")
        checks.at_least(
            self,
            0,
            "labeled_weight",
            "consistency_weight",
            "agreement_weight",
            "l1_weight",
            "l2_weight",
            "helpers",
            "l1_threshold",
            "delta_threshold",
        )
        checks.at_least(self, 1, "helper_interval", "lr_patience")
        self.helper_models: dict[int, list[State]] = {}
        self._check_common_arguments()

    def _check_common_arguments(self) -> None:
        """Refuse what other methods take, but a sum of sigma and psi cannot."""
        frozen = self.freeze_patterns
        checks.require(not frozen, "freeze", frozen, "FedMatch trains every weight")
        keeps = self.init_from is None or not (self.variance_scaling or self.psi_scale)
        remedy = "set model.variance_scaling false and model.psi_scale 0"
        checks.require(keeps, "init_from", self.init_from, remedy)
        if self.lr_patience is not None:
            require_plain_sgd(self.optimizer, _NEEDS_SGD, several_rates=True)

    def configured_network(self) -> nn.Module:
        """The network before it was decomposed, with theta = sigma + psi."""
        return self.network.summed()

    def build_parts(self) -> None:
        """Decompose the network, with weights that are a function of the seed."""
        with sampling.seeded("sigma"):
            self.network = Decomposed(self.network, self.psi_scale, self.variance_scaling)

    def check_data(self, data: FederatedDataModule) -> None:
        """Clients need unlabelled images.

        The rule for the learning rate needs validation images.
        """
        super().check_data(data)
        self.sends_sigma = data.label_location == "clients"
        patience = self.lr_patience
        has_loss = patience is None or data.has_validation
        remedy = "it needs data.validation; give that, or null"
        checks.require(has_loss, "lr_patience", patience, remedy)

    def round(self, federation: Federation) -> None:
        """Deliver helpers, train sigma if the labels are at the server, then train the clients."""
        due = self.current_round.index % self.helper_interval == 0
        self.helper_models = self.choose_helpers(self.current_round.cohort) if due else {}
        federation.train_server()
        self.announce(self.evaluated_model())
        if not self.sends_sigma and self.lr_patience is not None:
            self.server.extra[_RATE] = self._next_rate(self.server.extra.get(_RATE, {}))
        self.aggregate(self.accumulate(federation.train_clients()))
        psi = torch.cat([*map(torch.flatten, starting_with(_PSI, self.server.parameters).values())])
        self.log("server/psi_share", (psi.abs() > self.l1_threshold).double().mean())

    # Step 1: the server delivers helpers, and trains sigma where it has the labels.

    def choose_helpers(self, cohort: Iterable[int]) -> dict[int, list[State]]:
        """The last psi of the H clients whose embeddings are nearest to each client's.

        Args:
            cohort: The drawn clients; a client without an embedding (before its first upload)
                receives no helpers.
        """
        embeddings = {}
        for client in self.clients.with_state("embedding"):
            embeddings[client] = self.clients.get(client, "embedding")["p"]
        chosen = {}
        for client in cohort:
            if client in embeddings:
                others = [other for other in embeddings if other != client]
                embedding = embeddings[client]
                others.sort(key=lambda other: float((embeddings[other] - embedding).norm()))
                nearest = others[: self.helpers]
                chosen[client] = [self.clients.get(other, "psi") for other in nearest]
        return chosen

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Epochs over plain labelled images; none where the clients have the labels."""
        work = labeled_work(data, self.server_epochs, view="plain")
        rate = self.server.extra.get(_RATE, {})
        return replace(work, batch=lambda step: add_rate(work.batch(step), rate))

    def server_training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Eq. 4 with the psi that is evaluated: small entries are 0."""
        return self._with_rate(self._supervised_loss(batch, *self._evaluated_parts()), batch)

    # Step 2: a client alternates steps of sigma and psi.

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Alternate a labelled batch for sigma and an unlabelled one for psi."""
        count = _whole_batches(len(data.labeled), data.batch_size)
        labeled = labeled_work(data, self.client_epochs, view="plain", count=count)
        size = data.batch_size
        count = len(data.unlabeled)
        if labeled.num_steps:
            size = max(1, math.ceil(count * self.client_epochs / labeled.num_steps))
        else:
            count = _whole_batches(count, size)
        unlabeled = self._unlabeled_work(data, size, count)
        rate = self.clients.get(data.party, _RATE)
        order: list[tuple[LocalWork, int]] = []
        for step in range(max(labeled.num_steps, unlabeled.num_steps)):
            order += [(work, step) for work in (labeled, unlabeled) if step < work.num_steps]

        def batch(step: int) -> Batch:
            work, index = order[step]
            return add_rate(work.batch(index), rate)

        return LocalWork(len(data.labeled) + len(data.unlabeled), len(order), batch)

    def _unlabeled_work(self, data: LocalData, batch_size: int, count: int) -> LocalWork:
        helpers = self._helper_probabilities(data)

        def make_batch(rows: Tensor, visits: Visits) -> Batch:
            images = data.unlabeled[rows]
            strong = data.strong(images, "strong", visits=visits)
            batch = {"u": data.plain(images), "u_strong": strong}
            return batch if helpers is None else batch | {"helpers": helpers[rows]}

        order = partial(data.permutation, len(data.unlabeled), "unlabeled")
        epochs = self.client_epochs
        return epochs_of(data, make_batch, order, count, epochs=epochs, batch_size=batch_size)

    @torch.no_grad()
    def _helper_probabilities(self, data: LocalData) -> Tensor | None:
        """p_h of all the client's unlabelled images, ``(images, H, classes)``; None without
        helpers.

        Helpers do not change while the client trains, so each is evaluated once.
        """
        helpers = self.helper_models.get(data.party)
        if not helpers or not len(data.unlabeled):
            return None
        self.eval()
        sigma, _ = self.network.parts()
        answers = []
        for helper in helpers:
            _, psi = self._parts_of(helper)
            psi = map_values(lambda t: t.to(data.images.device, non_blocking=True), psi)
            parts = data.unlabeled.split(_PASS)
            logits = [self.network.logits(data.plain(images), sigma, psi) for images in parts]
            answers.append(torch.cat(logits).softmax(dim=-1))
        return torch.stack(answers, dim=1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Eq. 4 on a labelled batch, Eq. 5 on an unlabelled one, times the factor of the client's
        learning rate.
        """
        if "y" not in batch:
            return self._with_rate(self._unsupervised_loss(batch), batch)
        sigma, psi = self.network.parts()
        loss = self._supervised_loss(batch, sigma, map_values(Tensor.detach, psi))
        return self._with_rate(loss, batch)

    def _with_rate(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss * batch["rate"].mean() if "rate" in batch else loss

    def _supervised_loss(self, batch: Batch, sigma: State, psi: State) -> Tensor:
        logits = self.network.logits(batch["x"], sigma, psi)
        return self.labeled_weight * self.task.labeled_loss(logits, batch["y"])

    def _unsupervised_loss(self, batch: Batch) -> Tensor:
        sigma, psi = self.network.parts()
        sigma = map_values(Tensor.detach, sigma)
        logits = self.network.logits(batch["u"], sigma, psi)
        pseudo = pseudo_label(logits.detach(), self.threshold)
        self.log("client/mask_rate", pseudo.mask.double().mean(), batch_size=len(pseudo.mask))
        helpers = batch.get("helpers")
        labels = pseudo.labels if helpers is None else agreement(pseudo.labels, helpers)
        strong = self.network.logits(batch["u_strong"], sigma, psi)
        loss = self.agreement_weight * masked_mean(
            self.task.entry_losses(strong, labels), pseudo.mask
        )
        if helpers is not None:
            loss = loss + self.consistency_weight * helper_divergence(logits, helpers, pseudo.mask)
        return loss + decomposition_penalty(sigma, psi, self.l1_weight, self.l2_weight)

    # Step 3: a client uploads what has changed.

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Adapt the learning rate, and upload what has changed: psi, and sigma where it was
        trained.
        """
        client = update.client
        if self.lr_patience is not None:
            self.clients.put(client, _RATE, self._next_rate(self.clients.get(client, _RATE)))
        self.clients.put(client, _SEEN, {_ROUND: torch.tensor(self.current_round.index)})
        if not self.sends_sigma:
            update = replace(update, parameters=starting_with(_PSI, update.parameters), buffers={})
        changed = {}
        for name, p in update.parameters.items():
            zero = self.l1_threshold if name.startswith(_PSI) else 0.0
            before = self.server.parameters[name]
            changed[name] = keep_changes(p, before, self.delta_threshold, zero)
        return replace(update, parameters=changed)

    # Step 4: the server embeds the models and averages.

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the updates for the mean, and store the embedding of every uploaded model."""
        return super().accumulate(self._embedded(updates))

    def _embedded(self, updates: Iterable[ClientUpdate]) -> Iterator[ClientUpdate]:
        for update in updates:
            if self.helpers:
                self.clients.put(update.client, "psi", starting_with(_PSI, update.parameters))
                embedding = self.embed(update.model())
                self.clients.put(update.client, "embedding", {"p": embedding})
            yield update

    @torch.no_grad()
    def embed(self, uploaded: State) -> Tensor:
        """A model's class probabilities of the noise image: ``(classes,)``.

        Args:
            uploaded: psi, and sigma with the statistics of norm layers unless these are the
                server's, by their names.
        """
        # Updates of other ranks have lost their memory layout, which changes the last bits of a
        # convolution.
        state = map_values(Tensor.contiguous, {**self.server.model(), **uploaded})
        # With the norm layers of sigma, statistics included: whose those of the working module are
        # depends on the number of ranks.
        sigma, psi = self._parts_of(state)
        self.eval()
        probe = self.probe().to(next(iter(psi.values())))
        return self.network.logits(probe, sigma, psi)[0].softmax(dim=-1)

    def probe(self) -> Tensor:
        """The noise image, ``(1, channels, height, width)``: N(125, 125) within 0..255, scaled to
        [0, 1].
        """
        assert self.in_shape is not None
        generator = torch.Generator().manual_seed(
            sampling.derive_key(sampling.global_seed(), "probe")
        )
        pixels = torch.empty(1, *self.in_shape)
        return torch.nn.init.trunc_normal_(pixels, 125, 125, 0, 255, generator=generator) / 255

    def evaluated_model(self) -> State:
        """The global model with small entries of psi at zero."""
        model = super().evaluated_model()
        return model | map_values(self._without_small, starting_with(_PSI, model))

    def _without_small(self, psi: Tensor) -> Tensor:
        return hard_threshold(psi.detach(), self.l1_threshold)

    # The communication cost.

    def announce(self, model: State) -> None:
        """Announce the entries of the model that differ from the last announced values by more than
        the threshold.

        Args:
            model: The model that will be sent, by name.
        """
        values = self.server.extra.setdefault(_VALUE, {})
        since = self.server.extra.setdefault(_ROUND, {})
        for name, t in model.items():
            if name not in values:
                values[name], since[name] = t.clone(), torch.zeros_like(t, dtype=torch.int32)
            moved = (t - values[name]).abs() > self.delta_threshold
            values[name].copy_(torch.where(moved, t, values[name]))
            since[name].masked_fill_(moved, self.current_round.index)

    def download_sizes(self, client: int, received: State) -> Sizes:
        """What was announced since the client last took part, and the psi of its helpers without
        zeros.

        The first time a client also receives the validation images and labels, if its learning rate
        depends on them.
        """
        last_visit = self.clients.get(client, _SEEN)
        since = self.server.extra.get(_ROUND, {})
        sizes: Sizes = {}
        for name, t in received.items():
            has_older_values = last_visit and name in since
            count = int((since[name] > last_visit[_ROUND]).sum()) if has_older_values else t.numel()
            sizes |= sparse_sizes(name, count, t)
        for number, psi in enumerate(self.helper_models.get(client, ())):
            for name, t in psi.items():
                count = int((t.abs() > self.l1_threshold).sum())
                sizes |= sparse_sizes(f"helper {number} {name}", count, t)
        self._log_share("communication/download_share", sizes)
        return sizes | self._validation_sizes(client)

    def _validation_sizes(self, client: int) -> Sizes:
        """Bytes of the validation images (8 bits a value) and labels (64 bits) that a client has
        not received yet.
        """
        if self.lr_patience is None or self.clients.get(client, _RATE):
            return {}
        sizes = {"validation images": 0, "validation labels": 0}
        for x, y in self.federation.validation_batches():
            sizes["validation images"] += x.numel()
            sizes["validation labels"] += 8 * y.numel()
        return sizes

    def upload_sizes(self, update: ClientUpdate) -> Sizes:
        """Bytes of the entries that differ from the server's, and of all buffers."""
        sizes = sizes_of(update.buffers)
        for name, p in update.parameters.items():
            sizes |= sparse_sizes(name, int((p != self.server.parameters[name]).sum()), p)
        self._log_share("communication/upload_share", sizes)
        return sizes

    def _log_share(self, name: str, sizes: Sizes) -> None:
        """Log the communicated values as a multiple of one dense set of weights, which is not the
        paper's share.
        """
        values = sum(size for key, size in sizes.items() if not key.endswith(".positions"))
        self.log(name, values / sum(psi.nbytes for psi in self.network.psi.values()))

    # The learning rate of a party.

    @torch.no_grad()
    def _next_rate(self, rate: State) -> State:
        """A party's learning rate, from the validation loss of the working module."""
        self.eval()
        sigma, psi = self._evaluated_parts()
        total: Tensor | float = 0.0
        count = 0
        for x, y in self.federation.validation_batches():
            logits = self.network.logits(x, sigma, psi)
            total = total + self.task.labeled_losses(logits, y).sum()
            count += len(y)
        return update_rate(rate, float(total) / count, self.lr_patience or 1)

    # Sigma and psi by the names of the network.

    def _parts_of(self, state: State) -> tuple[State, State]:
        return self.network.parts_of(remove_prefix("network.", state))

    def _evaluated_parts(self) -> tuple[State, State]:
        """Those of the working module as they are evaluated; psi gets no gradient."""
        sigma, psi = self.network.parts()
        return sigma, map_values(self._without_small, psi)


def _whole_batches(count: int, batch_size: int) -> int:
    """The images of a client's epoch: ``round(n / B)`` batches, at least one, as in the authors'
    code.
    """
    return min(count, max(1, round(count / batch_size)) * batch_size)


_PASS = 500
"""Images per forward pass without gradients."""


_FRESH = {"factor": 1.0, "lowest": math.inf, "waited": 0.0}


def update_rate(rate: State, loss: float, patience: int) -> State:
    """Update the learning rate of a party (client or server) after a round in which it trained.

    Args:
        rate: ``factor`` of the configured rate, ``lowest`` loss so far and rounds ``waited`` since
            then; empty before the first round.
        loss: The validation loss.
        patience: Rounds without a lower loss after which the rate is divided by 3.
    """
    now = _FRESH | map_values(float, rate)
    now["waited"] = 0.0 if loss < now["lowest"] else now["waited"] + 1
    now["lowest"] = min(loss, now["lowest"])
    if now["waited"] >= patience:
        now["factor"] /= _LR_DIVISOR
        now["waited"] = 0.0
    return map_values(partial(torch.tensor, dtype=torch.float64), now)


def add_rate(batch: Batch, rate: State) -> Batch:
    """Add the factor of a party's learning rate to a batch as ``rate`` ``(batch,)``, unless it is
    1.

    With plain SGD a factor of the loss is a factor of the learning rate, for stacked clients too.

    Args:
        batch: A step's tensors.
        rate: From :func:`update_rate`.
    """
    if not rate or float(rate["factor"]) == 1:
        return batch
    some = next(iter(batch.values()))
    return batch | {"rate": some.new_full((len(some),), float(rate["factor"]))}


# The decomposition of the weights.

_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


class Decomposed(Network):
    """``theta = sigma + psi`` for every weight and bias of a network.

    Its norm layers have only sigma.

    Args:
        network: The network; its parameters become sigma.
        psi_scale: The initial psi is this multiple of sigma.
        variance_scaling: Initialise sigma again: weights from a truncated normal distribution of
            variance 1 / fan-in, biases 0. If false, sigma are the network's parameters as they are.
    """

    def __init__(
        self, network: nn.Module, psi_scale: float = 0.2, variance_scaling: bool = True
    ) -> None:
        super().__init__()
        self.sigma = network
        self.decomposed: list[str] = []
        self.psi = nn.ParameterDict()
        for name, weight in network.named_parameters():
            if not isinstance(network.get_submodule(name.rpartition(".")[0]), _NORMS):
                if variance_scaling:
                    _draw(weight)
                self.decomposed.append(name)
                # A parameter's name cannot hold a dot.
                self.psi[name.replace(".", "/")] = nn.Parameter(weight.detach() * psi_scale)

    def parts(self) -> tuple[State, State]:
        """Sigma, with the weights of the norm layers, and psi, by the names of the network."""
        return self.parts_of(dict(self.named_parameters()))

    def parts_of(self, state: State) -> tuple[State, State]:
        """Sigma and psi of a state of this module, by the names of the network.

        Args:
            state: All of its psi, and as much of its sigma as there is, by their names.
        """
        psi = {name: state[f"psi.{name.replace('.', '/')}"] for name in self.decomposed}
        return remove_prefix("sigma.", starting_with("sigma.", state)), psi

    @torch.no_grad()
    def summed(self) -> nn.Module:
        """A copy of the plain network with ``theta`` as its weights."""
        network = copy.deepcopy(self.sigma)
        for name, psi in self.parts()[1].items():
            network.get_parameter(name).add_(psi)
        return network

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` with the weights sigma + psi; both get gradients."""
        return self.logits(x, *self.parts())

    def logits(self, x: Tensor, sigma: State, psi: State) -> Tensor:
        """Logits ``(batch, num_classes)`` with the given sigma and psi instead of those of
        :meth:`parts`.

        Args:
            x: Images ``(batch, channels, height, width)``.
            sigma: Sigma by the names of the network; a detached tensor gets no gradient. Statistics
                of norm layers may be among it; left out, they are those of this module.
            psi: Psi by the same names.
        """
        theta = {**sigma, **map_values(torch.add, psi, sigma)}
        logits: Tensor = functional_call(self.sigma, theta, x)
        return logits


def _draw(weight: Tensor) -> None:
    """Initialise like Keras' ``VarianceScaling(1, "fan_in", "truncated_normal")``, truncated at two
    deviations.
    """
    if weight.dim() < 2:
        nn.init.zeros_(weight)
        return
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


# The losses of a step of psi.


def helper_divergence(logits: Tensor, helpers: Tensor, mask: Tensor) -> Tensor:
    """``1/H sum_h KL(p_h || p)``, averaged over the images with a true mask; 0 without such an
    image (Eq. 1).

    Args:
        logits: ``(batch, classes)`` of the local model, which gets the gradient.
        helpers: p_h, the helpers' probabilities, ``(batch, H, classes)``.
        mask: ``(batch,)`` bool.
    """
    log_p = F.log_softmax(logits, dim=-1)[:, None]
    divergence = (torch.special.xlogy(helpers, helpers) - helpers * log_p).sum(dim=-1).mean(dim=1)
    return masked_mean(divergence, mask)


def decomposition_penalty(sigma: State, psi: State, l1_weight: float, l2_weight: float) -> Tensor:
    """``lambda_L1 sum |psi| + lambda_L2 sum (sigma - psi)^2`` over all tensors (the last two terms
    of Eq. 5).

    Args:
        sigma: By name.
        psi: By name.
        l1_weight: lambda_L1.
        l2_weight: lambda_L2.
    """
    terms = []
    for name, tensor in psi.items():
        distance = (sigma[name] - tensor).square().sum()
        terms.append(l1_weight * tensor.abs().sum() + l2_weight * distance)
    return added(terms)


# What is sent.


def hard_threshold(values: Tensor, threshold: float) -> Tensor:
    """Set the values whose magnitude is at most ``threshold`` to 0.

    Args:
        values: Any shape.
        threshold: The largest magnitude that becomes 0.
    """
    return torch.where(values.abs() > threshold, values, torch.zeros_like(values))


def keep_changes(new: Tensor, old: Tensor, delta: float, threshold: float = 0.0) -> Tensor:
    """The new values where they differ from the old ones by more than ``delta``, else the old
    values.

    Args:
        new: Any shape.
        old: The same shape as ``new``.
        delta: The largest change that is ignored.
        threshold: For the comparison, new values of at most this magnitude count as 0.
    """
    return torch.where((hard_threshold(new, threshold) - old).abs() > delta, new, old)


def sparse_sizes(name: str, count: int, dense: Tensor) -> Sizes:
    """Bytes of sending some entries of a tensor: their values, and their positions as 32-bit
    numbers or a bit map.

    Args:
        name: The tensor's name.
        count: Number of entries that are sent; if all entries are sent, their positions are not.
        dense: The whole tensor.
    """
    if count == dense.numel():
        return {name: dense.nbytes}
    positions = min(4 * count, -(-dense.numel() // 8))
    return {name: count * dense.element_size(), f"{name}.positions": positions}
