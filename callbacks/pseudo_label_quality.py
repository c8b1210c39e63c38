"""Logs the quality of the clients' pseudo-labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.pseudo_labels import PseudoLabels

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import TrainerView

MOST_CLASSES = 100
"""The largest number of classes whose labels are counted by true class, too."""

MOST_WRONG = 12
"""The largest number of wrong labels that are kept of a round."""

_OF_CLIENT = 3

SAMPLE = 128
"""Images of a round that are labelled for a method which labels inside ``training_step``, divided
equally among the drawn clients."""

Wrong = tuple[float, Tensor, Tensor, Tensor]
"""See :attr:`PseudoLabelQuality.wrong`."""


class PseudoLabelQuality(FederatedCallback):
    """Logs mask rate and accuracy of the clients' pseudo-labels in a round (SemiFL Fig. 6, Semi-SFL
    Fig. 10).

    * ``client/mask_rate``: the share of confident labels (in Semi-SFL, "mask rate" is the share of
      the other labels);
    * ``pseudo_label/accuracy``: the share of labels that are right;
    * over the confident labels only, and absent in a round without any:
      ``pseudo_label/confident_accuracy``, ``pseudo_label/largest_class_share`` (the share of the
      most frequent class: near 1 if self-training has collapsed, but also if there are few labels)
      and ``pseudo_label/confident_count`` (their number in the round).

    Of several labels of a sample, or of pixels, each one counts. A label that says that a class is
    absent is right or wrong like others, but is of no class in ``largest_class_share``.

    After ``on_global_model``, rank 0 has for the report of the run the confident labels of the
    round by true class, ``table``, and the most confident wrong ones, ``wrong``.

    The labels of a client whose update was rejected do not count: they are not in the new model.

    An image that is labelled in several steps of a round counts in each of them. The labels that a
    method computes inside ``training_step`` are not available to callbacks. For such a method, this
    callback labels a sample of the drawn clients' images in the rounds with an evaluation. It uses
    the model that the client received, in evaluation mode and without augmentation; static batch
    norm uses the statistics of the sample. The method itself then logs the mask rate.

    The callback uses the clients' true labels for logging only: no weight depends on them. Part of
    every run.

    Attributes:
        table: Confident labels of the round, ``(classes + 1, classes)``: a row for each true class
            and a last one for unknown classes, a column for each label; with more than 100 classes
            only the last row. Of several labels of a sample there is one class more, of those that
            are absent. None in a round without any.
        wrong: The most confident wrong labels of the round, at most 3 of a client and 12 in all:
            confidence, number of the sample in the training data, label and true class. Of pixels
            the samples with the most wrong ones: their share, the sample, and both masks, -1 where
            a label is not confident. Of a method that labels at every step, those of a client's
            first step.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self.table: Tensor | None = None
        self.wrong: list[Wrong] = []
        self._tables: dict[int, Tensor] = {}
        self._wrong: dict[int, tuple[Tensor, ...]] = {}

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Forget the round before."""
        self.reset()

    def on_client_start(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Compare the pseudo-labels that a client computed for the round, or a sample, with the
        true labels.
        """
        if work.pseudo_labels is not None:
            if len(work.pseudo_labels.mask):
                self.on_pseudo_labels(trainer, algorithm, data.unlabeled, work.pseudo_labels)
        elif work.num_steps and len(data.unlabeled) and trainer.evaluates_now:
            self._compare_sample(trainer, algorithm, data)

    def on_pseudo_labels(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        indices: Tensor,
        pseudo: PseudoLabels,
    ) -> None:
        """Compare pseudo-labels with the true labels."""
        trainer.log("client/mask_rate", pseudo.mask.double().mean(), len(pseudo.mask))
        if _has_classes(trainer):
            self._compare(trainer, algorithm, indices, pseudo)

    def on_global_model(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Log number and largest class of the confident labels, over the accepted clients of all
        ranks.
        """
        unused = clients_left_out(trainer)
        tables = [table for client, table in self._tables.items() if client not in unused]
        wrong = [counts for client, counts in self._wrong.items() if client not in unused]
        table_of_rank = torch.stack(tables).sum(dim=0).cpu() if tables else None
        rows = [row for columns in wrong for row in zip(*(c.cpu() for c in columns), strict=True)]
        parts = trainer.gather(
            (table_of_rank, [(float(score), *row) for score, *row in rows if score > 0])
        )
        tables_of_ranks = [table for table, _ in parts if table is not None]
        if not tables_of_ranks:
            return
        self.table = torch.stack(tables_of_ranks).sum(dim=0)
        entries = sorted((row for _, rows in parts for row in rows), key=lambda row: -row[0])
        self.wrong = entries[:MOST_WRONG]
        count = self.table.sum(dim=0)
        classes = count[: trainer.datamodule.num_classes]
        if present := float(classes.sum()):
            trainer.log("pseudo_label/largest_class_share", float(classes.max()) / present)
        if total := float(count.sum()):
            trainer.log("pseudo_label/confident_count", total)

    def _compare_sample(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, data: LocalData
    ) -> None:
        threshold = getattr(algorithm, "threshold", None)
        if threshold is None or isinstance(algorithm, JointAlgorithm) or not _has_classes(trainer):
            return
        rows = data.permutation(len(data.unlabeled), "labels for diagnostics")
        indices = data.unlabeled[rows[: max(1, SAMPLE // len(trainer.cohort))]]
        with evaluating(algorithm, batch_statistics=True), trainer.fabric.autocast():
            logits = algorithm(data.plain(indices))
        self._compare(trainer, algorithm, indices, algorithm.task.label(logits, threshold))

    def _compare(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        indices: Tensor,
        pseudo: PseudoLabels,
    ) -> None:
        client = algorithm.clients.staging
        assert client is not None, "pseudo-labels are reported while their client trains"
        data = trainer.datamodule
        classes = data.num_classes
        labels = data.task.classes_of(data.task.hard(pseudo.labels), classes)
        truth = data.task.classes_of(data.true_labels(indices), classes)
        if client not in self._wrong:
            labeled = pseudo._replace(labels=labels)
            self._wrong[client] = _most_wrong(indices, truth, labeled, data.task.per_pixel)
        truth, labels = truth.flatten(), labels.flatten()
        mask = pseudo.mask.flatten().double()
        table = _table(truth, labels, mask, len(data.strata_names))
        self._tables[client] = self._tables.get(client, 0) + table
        # A test whether any label is known, or confident, would wait for the device; without one,
        # the scalar has weight 0.
        right = (labels == truth).double()
        has_truth = (truth >= 0).double()
        for name, weights in {
            "accuracy": has_truth,
            "confident_accuracy": has_truth * mask,
        }.items():
            count = weights.sum()
            value = (right * weights).sum() / count.clamp(min=1)
            trainer.log(f"pseudo_label/{name}", value, count)


def _has_classes(trainer: TrainerView) -> bool:
    """Whether a label is right or wrong: not if it is a number."""
    return "classes" in trainer.datamodule.task.gives


def _table(truth: Tensor, labels: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """See :attr:`PseudoLabelQuality.table`, of one client."""
    # Comparisons and not F.one_hot, which reads its input on the host and would wait for the
    # device.
    classes = torch.arange(num_classes, device=labels.device)
    confident = (labels[:, None] == classes) * mask[:, None]
    if num_classes > MOST_CLASSES:
        return confident.sum(dim=0, keepdim=True)
    by_class = (truth[:, None] == classes).double().T @ confident
    return torch.cat([by_class, (confident.sum(dim=0) - by_class.sum(dim=0))[None]])


def _most_wrong(
    indices: Tensor, truth: Tensor, pseudo: PseudoLabels, per_pixel: bool
) -> tuple[Tensor, ...]:
    """The columns of :data:`Wrong` of one client, with a score of at most 0 where nothing is
    wrong, or trained on.
    """
    labels, confidence, mask = pseudo
    wrong = (labels != truth) & (truth >= 0) & mask.bool()
    if per_pixel:
        score, labels = wrong.double().mean(dim=(1, 2)), torch.where(mask, labels, -1)
    else:
        indices = indices.repeat_interleave(wrong[:1].numel())
        score = confidence.detach().double().masked_fill(~wrong, -1.0).flatten()
        truth, labels = truth.flatten(), labels.flatten()
    best, rows = score.topk(min(_OF_CLIENT, len(score)))
    return best, indices[rows], labels[rows], truth[rows]


def clients_left_out(trainer: TrainerView) -> set[int]:
    """The clients of this round that have trained and whose updates the server has rejected."""
    return {k for k, outcome in trainer.participation.items() if outcome == "rejected"}
