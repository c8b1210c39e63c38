"""Logs the quality of the clients' pseudo-labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.pseudo_labels import PseudoLabels

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import Run


class PseudoLabelQuality(FederatedCallback):
    """Logs mask rate and accuracy of the clients' pseudo-labels in a round (SemiFL Fig. 6, Semi-SFL
    Fig. 10).

    * ``client/mask_rate``: the share of confident labels (in Semi-SFL, "mask rate" is the share of
      the other labels);
    * ``pseudo_label/accuracy``: the share of labels that are right;
    * over the confident labels only, and absent in a round without any:
      ``pseudo_label/confident_accuracy``, ``pseudo_label/impurity`` (the share of wrong labels),
      ``pseudo_label/largest_class_share`` (the share of the most frequent class: near 1 if
      self-training has collapsed, but also if there are few labels) and
      ``pseudo_label/confident_count`` (their number in the round).

    The labels of a client whose update was rejected do not count: they are not in the new
    model.

    An image that is labelled in several steps of a round counts in each of them. The labels that a
    method computes inside ``training_step`` are not available to callbacks. For such a method, this
    callback labels a sample of the drawn clients' images in the rounds with an evaluation. It uses
    the model that the client received, in evaluation mode and without augmentation; static batch
    norm uses the statistics of the sample. The method itself then logs the mask rate.

    The callback uses the clients' true labels for logging only: no weight depends on them. Part of
    every run.

    Args:
        per_class: Also log both accuracies and the mask rate for each true class.
        sample: Number of images per round that the callback labels for a method which labels inside
            ``training_step``, divided equally among the drawn clients; 0 for none.
    """

    def __init__(self, per_class: bool = False, sample: int = 128) -> None:
        at_least(0, sample=sample)
        self.per_class = per_class
        self.sample = sample
        self._class_counts: dict[int, Tensor] = {}

    def on_round_start(self, trainer: Run, algorithm: FederatedAlgorithm) -> None:
        """Reset the clients' counts of confident labels per class."""
        self._class_counts = {}

    def on_client_start(
        self,
        trainer: Run,
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
        elif self.sample and work.num_steps and len(data.unlabeled) and trainer.evaluates_now:
            self._compare_sample(trainer, algorithm, data)

    def on_pseudo_labels(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        indices: Tensor,
        pseudo: PseudoLabels,
    ) -> None:
        """Compare pseudo-labels with the true labels."""
        trainer.log("client/mask_rate", pseudo.mask.double().mean(), len(pseudo.mask))
        self._compare(trainer, algorithm, indices, pseudo)

    def on_global_model(self, trainer: Run, algorithm: FederatedAlgorithm) -> None:
        """Log number and largest class of the confident labels, over the accepted clients of all
        ranks.
        """
        unused = clients_left_out(trainer)
        own = [count for client, count in self._class_counts.items() if client not in unused]
        classes = torch.zeros(trainer.datamodule.num_classes, dtype=torch.float64)
        ranks = trainer.gather(torch.stack(own).sum(dim=0).cpu() if own else classes)
        total = torch.stack(ranks).sum(dim=0)
        if total.sum() > 0:
            trainer.log("pseudo_label/largest_class_share", float(total.max() / total.sum()))
            trainer.log("pseudo_label/confident_count", float(total.sum()))

    def _compare_sample(self, trainer: Run, algorithm: FederatedAlgorithm, data: LocalData) -> None:
        threshold = getattr(algorithm, "threshold", None)
        if threshold is None or isinstance(algorithm, JointAlgorithm):
            return
        rows = data.permutation(len(data.unlabeled), "labels for diagnostics")
        indices = data.unlabeled[rows[: max(1, self.sample // len(trainer.cohort))]]
        with evaluating(algorithm, batch_statistics=True), trainer.fabric.autocast():
            logits = algorithm(data.plain(indices))
        self._compare(trainer, algorithm, indices, algorithm.task.label(logits, threshold))

    def _compare(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        indices: Tensor,
        pseudo: PseudoLabels,
    ) -> None:
        client = algorithm.clients.staging
        assert client is not None, "pseudo-labels are reported while their client trains"
        # Every label of a sample, or every pixel, counts as one.
        truth = trainer.datamodule.true_labels(indices)
        partly_unknown = truth.dim() > 1 or trainer.datamodule.has_unknown_labels
        truth = truth.flatten()
        labels = algorithm.task.hard(pseudo.labels).flatten()
        right = (labels == truth).double()
        mask = pseudo.mask.flatten().double()
        # A comparison and not F.one_hot, which reads its input on the host and would wait for the
        # device.
        classes = torch.arange(trainer.datamodule.num_classes, device=labels.device)
        counts = ((labels[:, None] == classes) * mask[:, None]).sum(dim=0)
        self._class_counts[client] = self._class_counts.get(client, 0) + counts
        if partly_unknown:  # else no test, which would wait for the device
            known = truth >= 0
            right = right[known]
            mask = mask[known]
            truth = truth[known]
            if not len(truth):
                return
        self._log(trainer, "", right, mask)
        if self.per_class:
            for k in truth.unique().tolist():
                trainer.log(
                    f"client/mask_rate/class_{k}", mask[truth == k].mean(), int((truth == k).sum())
                )
                self._log(trainer, f"/class_{k}", right[truth == k], mask[truth == k])

    @staticmethod
    def _log(trainer: Run, suffix: str, right: Tensor, mask: Tensor) -> None:
        confident = mask.sum()
        trainer.log(f"pseudo_label/accuracy{suffix}", right.mean(), len(right))
        # A test whether any label is confident would wait for the device; without one, both scalars
        # have weight 0.
        accuracy = (right * mask).sum() / confident.clamp(min=1)
        trainer.log(f"pseudo_label/confident_accuracy{suffix}", accuracy, confident)
        trainer.log(f"pseudo_label/impurity{suffix}", 1 - accuracy, confident)


def clients_left_out(trainer: Run) -> set[int]:
    """The clients of this round that have trained and whose updates the server has rejected."""
    return {k for k, outcome in trainer.participation.items() if outcome == "rejected"}
