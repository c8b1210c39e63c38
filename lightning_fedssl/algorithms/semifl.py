"""SemiFL: alternate training with pseudo-labels from the global model.

E. Diao, J. Ding, V. Tarokh, "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with
Alternate Training", NeurIPS 2022, arXiv 2106.01432.

A round, as the authors' code runs it:

1. static batch-norm statistics of the global model are computed, and both are sent to the drawn
   clients;
2. each client labels all its images once with the received model (eval mode, weak view) and forms
   D_fix from the images with confidence of at least tau; a client without such images skips the
   round;
3. each other client takes E epochs over batches of D_fix and of D_mix (as many images, drawn from
   all of the client's): ``L = CE(f(strong(x_fix)), y_fix) + lambda-mixed CE(f(mixup(weak(x_fix),
   weak(x_mix))), y_fix, y_mix)``;
4. the server averages with equal weights and momentum;
5. the server fine-tunes the average on its labelled images.

Where paper and code differ, the default is the code's variant, because it produced the published
numbers: hard labels (paper: soft, Eq. 2), views mixed (paper: the mixed image is augmented, Eq. 5),
D_mix redrawn at each access (paper: once a round, Eq. 4), server momentum 0.5 (Algorithm 1: plain
mean), gradients clipped to norm 1 and persistent optimizer states (paper: neither), the server's
phase after the aggregation (paper: before the clients, and once more at the end).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.algorithms.common.site_shares import shifted
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData, Visits
from lightning_fedssl.functional.averaging import Sizes
from lightning_fedssl.functional.optimizers import half_momentum
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_work import LocalWork, MakeBatch, epochs_of, unlabeled_work
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

_PASS = 250
"""Images per forward pass when a client labels its images."""


@hyperparameters
class GlobalLabels(ServerPhases):
    """Methods whose clients label their images once a round with the received model, and whose
    server has the labels.

    The defaults are the setting of SemiFL's authors' code.

    Args:
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        aggregation_optimizer: The optimizer of the server's step in the direction of the mean
            update: SGD with learning rate 1 and momentum beta_g = 0.5; null takes the plain mean.
        client_epochs: E, local epochs of a client in a round.
        server_epochs: E, epochs of the server's fine-tuning in a round.
        gradient_clip_norm: Largest gradient norm of a step.
        client_weighting: A client's weight in the mean: its number of ``samples``, or ``uniform``.
        keep_client_optimizer: A client's momentum persists until its next participation.
        keep_server_optimizer: The server's momentum persists between rounds.

    Attributes:
        soft_labels: Whether labels are probabilities instead of classes.
    """

    labels_at = "server"
    needs_unlabeled = True
    uses_class_shares = True
    statistics_of = "server"
    clients_use_statistics = True
    soft_labels = False

    threshold: float = 0.95
    aggregation_optimizer: OptimizerCallable | None = half_momentum
    client_epochs: float = 5
    server_epochs: float = 5
    gradient_clip_norm: float | None = 1.0
    client_weighting: Literal["samples", "uniform"] = "uniform"
    keep_client_optimizer: bool = True
    keep_server_optimizer: bool = True

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.probability(self, "threshold")

    @torch.no_grad()
    def label_images(self, data: LocalData) -> PseudoLabels:
        """Labels of all the client's unlabelled images by the working module in eval mode, one weak
        view each.

        With a label for every pixel the view is plain, and training moves the labels. Where the
        client has stated its class shares, the mean probabilities are these.
        """
        self.eval()
        starts = range(0, len(data.unlabeled), _PASS)
        parts = data.unlabeled.split(_PASS)
        views = (
            data.plain(part) if self.task.per_pixel else data.weak(part, "labeling", start=start)
            for part, start in zip(parts, starts, strict=True)
        )
        logits = torch.cat(list(map(self, views))).to(data.dtype)
        logits = shifted(self, data, logits)
        return self.task.label(logits, self.threshold, soft=self.soft_labels)

    def epochs_over(
        self,
        data: LocalData,
        count: int,
        make_batch: MakeBatch,
        pseudo: PseudoLabels | None,
    ) -> LocalWork:
        """E epochs over ``count`` images in random order.

        Args:
            data: The client's data.
            count: The number of images; 0 gives no steps.
            make_batch: Returns the tensors of rows from 0 to below ``count``; its random numbers
                belong to the visits of these rows.
            pseudo: The labels of all the client's images, for diagnostics.
        """
        order = partial(data.permutation, count, "order")
        epochs = self.client_epochs
        return epochs_of(data, make_batch, order, count, epochs=epochs, pseudo_labels=pseudo)


@hyperparameters
class SemiFL(GlobalLabels):
    """SemiFL with its ablations.

    Args:
        mixup_alpha: a, of the mixing ratio lambda ~ Beta(a, a), one per batch.
        mix_weight: Weight of the mix loss; 0 leaves it out (Table 5, "no mix").
        pseudo_label_source: ``global``: once per round by the received model. ``local``: per batch
            by the model in training, without mix loss (Table 2, the combination of FedAvg and
            FixMatch).
        soft_labels: Use the probabilities as targets, as in Eq. 2, instead of the class.
        mix_order: ``views``: mix two augmented images. ``images``: augment the mixed image, as in
            Eq. 5.
        mix_resample: Redraw D_mix at each ``access``, or once per ``round``, as in Eq. 4.

    Example:
        >>> from lightning_fedssl import CNN
        >>> SemiFL(network=CNN, threshold=0.9).aggregation_optimizer is None  # momentum 0.5
        False
    """

    same_step_every_round = True
    needs = "confidence"

    mixup_alpha: float = 0.75
    mix_weight: float = 1.0
    pseudo_label_source: Literal["global", "local"] = "global"
    soft_labels: bool = False
    mix_order: Literal["views", "images"] = "views"
    mix_resample: Literal["access", "round"] = "access"

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.above_zero(self, "mixup_alpha")
        checks.at_least(self, 0, "mix_weight")

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse probabilities of pixels as labels, which views cannot move."""
        super().check_data(data)
        moved = self.soft_labels and data.task.per_pixel
        checks.require(not moved, "soft_labels", True, "labels of pixels are classes: leave it out")
        source, stated = self.pseudo_label_source, data.class_shares is not None
        remedy = "data.class_shares needs labels of all images at once: leave one of them out"
        checks.require(source == "global" or not stated, "pseudo_label_source", source, remedy)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Pseudo-label the images, build D_fix and D_mix.

        A client without a confident image skips the round.
        """
        if self.pseudo_label_source == "local" or not len(data.unlabeled):
            return unlabeled_work(data, epochs=self.client_epochs)
        return self._fix_mix_work(data)

    def upload_sizes(self, update: ClientUpdate) -> Sizes:
        """The update, and its weight where that is the number of confident images, which changes in
        every round.
        """
        changes = self.client_weighting == "samples" and self.pseudo_label_source == "global"
        return super().upload_sizes(update) | ({"number of confident images": 8} if changes else {})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """L_fix + mix_weight * L_mix.

        D_fix and D_mix pass separately, each with its own batch statistics.
        """
        if self.pseudo_label_source == "local":
            return self._local_label_step(batch)
        loss = self.task.loss(self(batch["x_strong"]), batch["y_fix"])
        if self.mix_weight == 0:
            return loss
        logits = self(mixup(batch["x_weak"], batch["x_mix"], batch["ratio"]))
        losses, other = (self.task.entry_losses(logits, batch[y]) for y in ("y_fix", "y_mix"))
        return loss + self.mix_weight * mixup(losses, other, batch["ratio"]).mean()

    def _fix_mix_work(self, data: LocalData) -> LocalWork:
        """Batches with images of D_fix and D_mix, labelled once by the received model."""
        pseudo = self.label_images(data)
        targets = self.task.confident_targets(pseudo)
        fix = self.task.any_confident(pseudo).nonzero().squeeze(1)

        def make_batch(rows: Tensor, visits: Visits) -> Batch:
            x_fix = data.unlabeled[fix[rows]]
            y_fix = data.target(targets[fix[rows]], "weak", visits=visits)
            batch = {"x_strong": data.strong(x_fix, "strong", visits=visits), "y_fix": y_fix}
            if self.mix_weight == 0:
                return batch
            mix = visits.select(lambda epoch: self._mix_rows(data, len(fix), epoch))
            # An augmented mixture is the mixture of two views made with the same draws: weak views
            # are linear.
            mix_purpose = "mix" if self.mix_order == "views" else "weak"
            return batch | {
                "x_weak": data.weak(x_fix, "weak", visits=visits),
                "x_mix": data.weak(data.unlabeled[mix], mix_purpose, visits=visits),
                "y_mix": data.target(pseudo.labels[mix], mix_purpose, visits=visits),
                "ratio": visits.select(lambda epoch: self._ratios(data, len(fix), epoch)),
            }

        return self.epochs_over(data, len(fix), make_batch, pseudo)

    def _mix_rows(self, data: LocalData, count: int, epoch: int) -> Tensor:
        """The images of D_mix in an epoch's order, drawn with replacement from all of the client's:
        ``(count,)``.
        """
        fixed = self.mix_resample == "round"
        drawn = data.rng("mix rows", 0 if fixed else epoch).integers(
            len(data.unlabeled), size=count
        )
        rows = torch.from_numpy(drawn).to(data.images.device, non_blocking=True)
        return rows[data.permutation(count, "mix order", epoch)] if fixed else rows

    def _ratios(self, data: LocalData, count: int, epoch: int) -> Tensor:
        """Ratios lambda ~ Beta(a, a), one per batch, repeated for its images: ``(count,)``."""
        batches = -(-count // data.batch_size)
        drawn = torch.from_numpy(
            data.rng("ratio", epoch).beta(self.mixup_alpha, self.mixup_alpha, size=batches)
        )
        ratios = drawn.to(data.dtype).repeat_interleave(data.batch_size)[:count]
        return ratios.to(data.images.device, non_blocking=True)

    def _local_label_step(self, batch: Batch) -> Tensor | None:
        """FixMatch as in the authors' comparison: confident images are trained.

        A batch without any is skipped.
        """
        with torch.no_grad():
            pseudo = self.task.label(self(batch["x_weak"]), self.threshold, soft=self.soft_labels)
        self.log("client/mask_rate", pseudo.mask.double().mean(), batch_size=len(pseudo.mask))
        used = self.task.any_confident(pseudo)
        if not used.any():
            return None
        targets = self.task.confident_targets(pseudo)[used]
        return self.task.loss(self(batch["x_strong"][used]), targets)


def mixup(x: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    """``ratio * x + (1 - ratio) * other``, one ratio per image.

    Args:
        x: ``(batch, ...)``.
        other: Same shape as ``x``.
        ratio: lambda, ``(batch,)``.
    """
    ratio = ratio.reshape(-1, *[1] * (x.dim() - 1))
    return ratio * x + (1 - ratio) * other
