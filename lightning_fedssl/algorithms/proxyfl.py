"""ProxyFL: rows of the classifier as proxies of the classes, at the server and in a contrastive
loss.

D. Chen et al., "ProxyFL: A Proxy-Guided Framework for Federated Semi-Supervised Learning", CVPR
2026, arXiv 2602.21078. A part of every client's images is labelled.

A round, as the authors' code runs it:

1. the server sends the global weights, and the prior P(Y), a moving average of the classes that
   clients trained on; in the first round it is uniform;
2. each client takes E times ``floor(n / B)`` steps, with n its images, labelled ones included. A
   step has a batch of B labelled images, and mu B of all n without their labels. The received
   model gives the class of a weak view, and its probabilities y. The class is used where this
   model or the model in training is confident by tau:
   ``L = CE(x, y) + alpha sum(mask CE(strong, class)) / batch + beta L_ICPL``;
3. the server averages, weighted by the number of images;
4. Global Proxy Tuning (Eq. 2): the mean classifier's rows take SGD steps for which every client's
   row of a class must be nearer to the global row of this class, by a margin, than to the others.

Indecisive-Categories Proxy Learning, ``L_ICPL`` (Eq. 4, 6 to 8): the categories of an image are its
class if that is confident, and else all classes c with ``y_c > P_c``. Its feature is pulled to its
positive proxy, the row of its class or the sum of its categories' rows weighted by y, and pushed
from the features of the images that share no category with it. Features and rows pass linear
projections and are normalised; similarities are not divided by a temperature.

Deviations: those of :mod:`~lightning_fedssl.algorithms.sage` in a client's momentum, labelled
batches and weight; 1e-10 is not added to probabilities. Where paper and code differ, the code
counts: the categories of a labelled image are those of the received model, not its label (section
5.2.1), and labelled images are negatives only; the margin is the largest distance between a class's
row and its nearest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.received_model import ReceivedModelLabels
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, Sums
from lightning_fedssl.functional.dictionaries import add_prefix
from lightning_fedssl.functional.losses import consistency_loss
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, at_least_float32, pseudo_label
from lightning_fedssl.local_work import NO_WORK, LocalWork
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

SMALLEST_SIMILARITY = 1e-6
"""Pairs of images below it are not negatives: they are far enough from each other."""

LARGEST_MARGIN = 100.0
"""Of Global Proxy Tuning."""

PRIOR_DECAY = 0.99
"""Of the moving average of the prior, over rounds."""


@hyperparameters
class ProxyFL(ReceivedModelLabels):
    """FixMatch with the received model's labels, tuned proxies, and a contrastive loss for the
    unconfident.

    The network needs a last linear layer.

    Args:
        contrastive_weight: beta, of ``L_ICPL``; 0 leaves the contrastive loss out.
        proxy_epochs: Epochs of Global Proxy Tuning over the clients' rows after each round; 0
            leaves it out. Published: Q = 100, and 10 for CIFAR-100.
        proxy_lr: Learning rate of the tuning, eta_G.
        proxy_batch_size: Rows in a step of the tuning; the default is that of the authors' script.
    """

    uses_class_shares = False
    no_personal = "tunes proxies by the clients' classifiers"
    not_deployable = "needs the numbers of labels of every client, which a node does not send"

    local_modules = frozenset({"received", "prior"})

    contrastive_weight: float = 1.0
    proxy_epochs: int = 100
    proxy_lr: float = 0.005
    proxy_batch_size: int = 4

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.at_least(self, 0, "contrastive_weight", "proxy_epochs")
        checks.at_least(self, 1, "proxy_batch_size")
        checks.above_zero(self, "proxy_lr")

    def build_parts(self) -> None:
        """Build the projections of features and proxies, and a client's counts."""
        super().build_parts()
        width = self.classifier.in_features
        with sampling.seeded("projections"):
            self.projections = nn.ModuleDict(
                {"feature": nn.Linear(width, width), "proxy": nn.Linear(width, width, bias=False)}
            )
        classes = self.num_classes or 0
        self.prior = nn.Module()
        self.prior.register_buffer("share", torch.full((classes,), 1 / classes))
        self.prior.register_buffer("counts", torch.zeros(classes))

    @property
    def classifier(self) -> nn.Linear:
        """The last linear layer; its rows are the proxies."""
        layers = [layer for layer in self.network.modules() if isinstance(layer, nn.Linear)]
        if not layers or layers[-1].out_features != self.num_classes:
            raise ValueError(
                f"model.network: the last layer of {type(self.network).__name__} is not linear "
                f"with {self.num_classes} outputs, whose rows ProxyFL needs as proxies; "
                "give another network"
            )
        return layers[-1]

    def broadcast(self, client: int) -> State:
        """The global model and the prior."""
        return super().broadcast(client) | add_prefix("prior.", self.server.extra.get("prior", {}))

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Batches as of the base class; those of the last epoch are counted for the prior.

        A client without labels, which the paper does not have, skips the round.
        """
        if not len(data.labeled):
            return NO_WORK
        work = super().on_client_start(data)
        self.prior.get_buffer("counts").zero_()
        first_counted = work.num_steps - self.epoch_steps(data)

        def batch(step: int) -> Batch:
            counted = torch.full((1,), float(step >= first_counted), device=data.images.device)
            return {**work.batch(step), "counted": counted}

        return replace(work, batch=batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """``CE(x, y) + alpha sum(mask CE(strong, class)) / batch + beta L_ICPL``."""
        images = torch.cat([batch["x"], batch["x_weak"], batch["x_strong"]])
        labeled = len(batch["x"])
        unlabeled = len(batch["x_weak"])
        features, logits = self.features_and_logits(images)
        of_labeled, weak, strong = logits.split([labeled, unlabeled, unlabeled])
        with torch.no_grad():
            received = self.received["network"](images[: labeled + unlabeled])
            received = at_least_float32(received).softmax(dim=-1)
        confidence, classes = received.max(dim=-1)
        confident = confidence >= self.threshold
        mask = confident[labeled:] | pseudo_label(weak.detach(), self.threshold).mask
        pseudo = PseudoLabels(classes[labeled:], confidence[labeled:], mask)
        self.log("client/mask_rate", mask.double().mean(), batch_size=unlabeled)
        self.count(batch, pseudo)
        loss = self.labeled_weight * self.labeled_loss(of_labeled, batch["y"])
        loss = loss + self.unlabeled_weight * consistency_loss(strong, pseudo)
        if self.contrastive_weight:
            contrast = indecisive_categories_loss(
                F.normalize(self.projections["feature"](features), dim=-1),
                F.normalize(self.projections["proxy"](self.classifier.weight), dim=-1),
                torch.cat([received, received[labeled:]]),
                torch.cat([confident[:labeled], mask, mask]),
                self.prior.get_buffer("share"),
                num_labeled=labeled,
            )
            loss = loss + self.contrastive_weight * contrast
        return self.with_proximal_term(loss)

    def features_and_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What enters the classifier, ``(n, width)``, and what leaves it, from one pass."""
        entered: list[Tensor] = []
        with self.classifier.register_forward_pre_hook(
            lambda layer, inputs: entered.append(inputs[0])
        ):
            logits = self(images)
        return entered[-1], logits

    @torch.no_grad()
    def count(self, batch: Batch, pseudo: PseudoLabels) -> None:
        """Add a step's labels and used pseudo-labels to the client's counts."""
        classes = self.num_classes or 0
        used = F.one_hot(pseudo.labels, classes) * pseudo.mask.unsqueeze(-1)
        of_step = F.one_hot(batch["y"], classes).sum(dim=0) + used.sum(dim=0)
        counts = self.prior.get_buffer("counts")
        counts.copy_(counts + batch["counted"] * of_step)

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Upload the counts of the last epoch."""
        return replace(update, payload={"counts": self.prior.get_buffer("counts").clone()})

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """In an epoch each image once, and a batch of labelled ones at each step."""
        return {"counts": (0, 3 * update.num_samples)}

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the models; store the clients' classifiers for the tuning, and update the prior."""
        name = next(n for n, p in self.named_parameters() if p is self.classifier.weight)
        rows = []
        counts = []

        def read() -> Iterator[ClientUpdate]:
            for update in updates:
                rows.append(update.parameters[name].detach().clone())
                counts.append(update.payload["counts"].clone())
                yield update

        sums = super().accumulate(read())
        if counts:
            total = torch.stack(counts).sum(dim=0)
            old = self.server.extra.get("prior", {"share": self.prior.get_buffer("share")})
            share = total / total.sum().clamp(min=1)
            new = PRIOR_DECAY * old["share"] + (1 - PRIOR_DECAY) * share
            self.server.extra["prior"] = {"share": new}
            self.server.extra["proxies"] = {name: torch.stack(rows)}
        return sums

    def aggregate(self, sums: Sums) -> None:
        """The mean of the models, and the tuning of its classifier."""
        super().aggregate(sums)
        uploaded = self.server.extra.pop("proxies", {})
        if self.proxy_epochs:
            for name, rows in uploaded.items():
                tuned = self.tune_proxies(self.server.parameters[name], rows)
                self.server.update({name: tuned})

    def tune_proxies(self, mean: Tensor, uploaded: Tensor) -> Tensor:
        """Global Proxy Tuning (Eq. 2) with a margin.

        Args:
            mean: The mean classifier's rows, ``(classes, width)``.
            uploaded: The clients' rows, ``(clients, classes, width)``.

        Returns:
            The tuned rows.
        """
        clients, classes, _ = uploaded.shape
        proxies = at_least_float32(uploaded).flatten(0, 1)
        mean = at_least_float32(mean)
        labels = torch.arange(classes, device=mean.device).repeat(clients)
        apart = torch.cdist(mean, mean).fill_diagonal_(torch.inf)
        margin = apart.min(dim=-1).values.max().clamp(max=LARGEST_MARGIN)
        tuned = mean.detach().clone().requires_grad_()
        optimizer = torch.optim.SGD([tuned], lr=self.proxy_lr)
        draw = sampling.rng(sampling.global_seed(), "proxies", self.current_round.index)
        for _ in range(self.proxy_epochs):
            order = torch.from_numpy(draw.permutation(len(labels))).to(mean.device)
            for batch in order.split(self.proxy_batch_size):
                distance = torch.cdist(proxies[batch], tuned)
                distance = distance + margin * F.one_hot(labels[batch], classes)
                optimizer.zero_grad()
                with torch.enable_grad():
                    F.cross_entropy(-distance, labels[batch]).backward()
                optimizer.step()
        return tuned.detach()


def indecisive_categories_loss(
    features: Tensor,
    proxies: Tensor,
    probabilities: Tensor,
    confident: Tensor,
    prior: Tensor,
    num_labeled: int,
) -> Tensor:
    """``L_ICPL`` of ProxyFL (Eq. 8), a mean over the images after the labelled ones.

    Args:
        features: Projected, of length 1, ``(n, width)``: labelled images first.
        proxies: Projected rows of the classifier, of length 1, ``(classes, width)``.
        probabilities: Of the received model, ``(n, classes)``.
        confident: Whether an image has its most probable class as its only category, ``(n,)``.
        prior: P(Y), ``(classes,)``.
        num_labeled: The labelled images, which are only negatives of the others.

    Returns:
        The loss, a scalar.
    """
    possible = probabilities > prior
    classes = probabilities.argmax(dim=-1)
    single = F.one_hot(classes, probabilities.shape[-1]).bool()
    categories = torch.where(confident.unsqueeze(-1), single, possible)
    to_class = (features * proxies[classes]).sum(dim=-1)
    candidates = (probabilities * possible).to(proxies) @ proxies  # of 16 bits, perhaps
    to_candidates = (features * candidates).sum(dim=-1)
    positive = torch.where(confident, to_class, to_candidates)
    share_one = (categories.to(features.dtype) @ categories.to(features.dtype).T) > 0
    similarity = features @ features.T
    left_out = share_one | (similarity < SMALLEST_SIMILARITY)
    negative = similarity.masked_fill(left_out, -torch.inf)
    logits = torch.cat([positive.unsqueeze(-1), negative], dim=-1)[num_labeled:]
    return (torch.logsumexp(logits, dim=-1) - logits[:, 0]).mean()
