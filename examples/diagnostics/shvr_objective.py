"""The objective of Fed-SHVR on all images of a client, for diagnostics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lightning_fedssl.algorithms import FedSHVR
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.losses import kl_to_uniform, soft_cross_entropy

_PASS = 1000
"""Images per forward pass."""


def require_objective(callback: object, algorithm: object) -> None:
    """Refuse a method without an objective.

    Raises:
        ValueError: The method is another one.
    """
    if not isinstance(algorithm, FedSHVR):
        raise ValueError(
            f"{type(callback).__name__} needs the objective of FedSHVR, not of "
            f"{type(algorithm).__name__}: leave it out of trainer.callbacks"
        )


def client_labels(algorithm: FedSHVR, data: LocalData, round_index: int) -> Tensor:
    """v_k as a round computes it with the working module: ``(unlabelled, classes)``."""
    return algorithm.label_images(data, algorithm.alpha0_of_labels(round_index)).labels


def objective(algorithm: FedSHVR, data: LocalData, labels: Tensor) -> Iterator[Tensor]:
    """Terms that sum to F_k (Eq. 5a) on all the client's images, with the alpha_0 of the start of
    the round.

    Args:
        algorithm: The method.
        data: The client's data.
        labels: v_k, ``(unlabelled, classes)``.
    """
    alpha0 = float(algorithm.ramp.values(data.round, algorithm.client_epochs, 1)[0])
    of_unlabeled = partial(unlabeled_losses, algorithm, alpha0=alpha0)
    for images, targets, losses in (
        (data.labeled, data.labels, algorithm.task.labeled_losses),
        (data.unlabeled, labels, of_unlabeled),
    ):
        for part, target in zip(images.split(_PASS), targets.split(_PASS), strict=True):
            if len(part):
                yield losses(algorithm(data.plain(part)), target).sum() / len(images)


def unlabeled_losses(algorithm: FedSHVR, logits: Tensor, target: Tensor, alpha0: float) -> Tensor:
    """The terms of F_k of unlabelled images, one per image: ``(batch,)``."""
    r1 = kl_to_uniform(target.clamp(min=torch.finfo(target.dtype).tiny).log())
    return (
        alpha0 * soft_cross_entropy(logits, target)
        + algorithm.alpha1 * r1
        + algorithm.alpha2 * algorithm.confidence_loss(logits)
    )
