"""Which training images a run uses, and which of them are held out for validation."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.datasets import ImageSplit
from lightning_fedssl.data.partition.class_balance import choose_balanced, choose_stratified


class TrainingRows(NamedTuple):
    """The training images of a run by what they are for.

    Attributes:
        validation: Indices of the images held out for validation, ``(n,)``.
        available: Labels of all training images ``(N,)``, -1 for those that are held out, not used,
            or without label.
        without_label: Indices of the images that have no label at all, ``(n,)``.
    """

    validation: Tensor
    available: Tensor
    without_label: Tensor


def choose_rows(
    labels: Tensor,
    num_classes: int,
    seed: int,
    fraction: float | Literal["test"],
    limit: int | None,
) -> TrainingRows:
    """Chooses the images of a run; the draws are functions of the seed.

    Args:
        labels: Labels of all training images, int64 ``(N,)``; -1 for images without a label.
        num_classes: Number of classes.
        seed: The run's seed.
        fraction: ``data.validation``.
        limit: ``data.max_train_images``: at most so many images with, and so many without labels.

    Raises:
        ValueError: If the fraction leaves no image on one side.
    """
    labeled = (labels >= 0).nonzero().flatten()
    without_label = (labels < 0).nonzero().flatten()
    limit = len(labels) if limit is None else limit
    if limit < len(labeled):
        generator = sampling.rng(seed, "max_train_images")
        labeled = labeled[choose_balanced(labels[labeled], limit, num_classes, generator)]
    if limit < len(without_label):
        generator = sampling.rng(seed, "max_train_images", "without label")
        rows = torch.from_numpy(generator.permutation(len(without_label))[:limit])
        without_label = without_label[rows.sort().values]
    validation = labeled[_choose_validation(labels[labeled], num_classes, seed, fraction)]
    available = torch.full_like(labels, -1)
    available[labeled] = labels[labeled]
    available[validation] = -1
    return TrainingRows(validation, available, without_label)


def limit_test(
    test: ImageSplit, labels: Tensor, limit: int | None, num_classes: int, seed: int
) -> ImageSplit:
    """At most ``most`` test images, balanced over the classes.

    Args:
        test: All test images.
        labels: The class of each, ``(N,)``.
        limit: ``data.max_test_images``.
        num_classes: Number of classes.
        seed: The run's seed.
    """
    if limit is None or limit >= len(test.labels):
        return test
    rows = choose_balanced(labels, limit, num_classes, sampling.rng(seed, "max_test_images"))
    clients = None if test.client_ids is None else test.client_ids[rows]
    files = tuple(test.files[row] for row in rows.tolist()) if test.files else ()
    return ImageSplit(test.images[rows], test.labels[rows], clients, files)


def _choose_validation(
    labels: Tensor, num_classes: int, seed: int, fraction: float | Literal["test"]
) -> Tensor:
    if fraction == "test" or fraction == 0:
        return torch.zeros(0, dtype=torch.int64)
    count = round(fraction * len(labels))
    if not 0 < count < len(labels):
        raise ValueError(
            f"data.validation: {fraction} of {len(labels)} training samples would hold out "
            f"{count}; it must leave at least one sample on both sides"
        )
    return choose_stratified(labels, count, num_classes, sampling.rng(seed, "validation"))
