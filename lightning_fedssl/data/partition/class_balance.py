"""Choosing images evenly over classes, or in the classes' proportions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor


def even_counts(capacity: NDArray[Any], total: int, generator: Generator) -> NDArray[Any]:
    """Spreads ``total`` over bins as evenly as their capacities allow.

    Args:
        capacity: Most that every bin can take, ``(bins,)``; their sum is at least ``total``.
        total: What to spread.
        generator: Draws the bins that get one more.

    Returns:
        ``(bins,)`` int64 with sum ``total``; bins that are not full differ by at most one.
    """
    counts = np.zeros(len(capacity), dtype=np.int64)
    while (missing := total - int(counts.sum())) > 0:
        unfilled = np.flatnonzero(counts < capacity)
        if missing < len(unfilled):
            counts[generator.permutation(unfilled)[:missing]] += 1
        else:
            counts[unfilled] = np.minimum(
                capacity[unfilled], counts[unfilled] + missing // len(unfilled)
            )
    return counts


def choose_balanced(labels: Tensor, count: int, num_classes: int, generator: Generator) -> Tensor:
    """Positions of ``count`` images, equally many of each class as far as the classes reach,
    sorted.

    Args:
        labels: int64 ``(n,)``, n at least ``count``.
        count: Number of images to choose.
        num_classes: Number of classes.
        generator: The random stream to draw from.
    """
    counts = even_counts(class_sizes(labels, num_classes), count, generator)
    return _choose(labels, counts, generator)


def choose_stratified(labels: Tensor, count: int, num_classes: int, generator: Generator) -> Tensor:
    """Positions of ``count`` images in the proportions of the classes (largest remainder), sorted.

    Args:
        labels: int64 ``(n,)``, n at least ``count``.
        count: Number of images to choose.
        num_classes: Number of classes.
        generator: The random stream to draw from.
    """
    exact = class_sizes(labels, num_classes) * (count / max(len(labels), 1))
    return _choose(labels, round_to_sum(exact, count), generator)


def largest_remainder(total: int, weights: NDArray[Any]) -> NDArray[np.int64]:
    """``total`` in whole parts proportional to the weights.

    What rounding down leaves goes to the largest remainders.

    Args:
        total: What to assign.
        weights: ``(parts,)``, not negative, with a positive sum.
    """
    return round_to_sum(total * (weights / weights.sum()), total)


def round_to_sum(exact: NDArray[Any], total: int) -> NDArray[np.int64]:
    """Whole numbers with a given sum: rounded down, and one more where the remainders are largest,
    the first of equals.

    Args:
        exact: ``(parts,)``, with the sum ``total``.
        total: The sum.
    """
    counts: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def class_sizes(labels: Tensor, num_classes: int) -> NDArray[Any]:
    """How many images each class has, ``(classes,)`` int64; -1 is not a class.

    Args:
        labels: int64 ``(n,)``.
        num_classes: Number of classes.
    """
    return labels[labels >= 0].bincount(minlength=num_classes).cpu().numpy()


def positions_by_class(labels: Tensor, num_classes: int) -> list[NDArray[Any]]:
    """For every class the positions of its images, in data-set order, int64 arrays.

    Args:
        labels: int64 ``(n,)``.
        num_classes: Number of classes.
    """
    values = labels.cpu().numpy()
    return [np.flatnonzero(values == label) for label in range(num_classes)]


def _choose(labels: Tensor, counts: NDArray[Any], generator: Generator) -> Tensor:
    chosen = []
    for members, count in zip(positions_by_class(labels, len(counts)), counts, strict=True):
        chosen.append(generator.choice(members, size=count, replace=False))
    return torch.from_numpy(np.sort(np.concatenate(chosen)))
