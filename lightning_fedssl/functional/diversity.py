"""Gradient diversity: how much the directions of several users' gradients differ.

FedRGD (Z. Zhang et al., IEEE BigData 2021, arXiv 2008.11364), Eq. 1 and 9-12; the quantity is that
of D. Yin et al., "Gradient Diversity: a Key Ingredient for Scalable Distributed Learning", AISTATS
2018, arXiv 1706.05699.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NormName = Literal["l1", "l2"]
"""Which norm of the gradients is compared."""


@dataclass
class GradientSum:
    """The sum of gradients and the sums of their norms: sufficient for diversity, for any number of
    gradients.

    Attributes:
        total: The sum, one flat vector ``(weights,)``; None before the first gradient.
        count: n, how many gradients were added.
        l1: Sum of the L1 norms.
        l1_squared: Sum of their squares.
        l2: Sum of the L2 norms.
        l2_squared: Sum of their squares.
    """

    total: Tensor | None = None
    count: int = 0
    l1: float = 0.0
    l1_squared: float = 0.0
    l2: float = 0.0
    l2_squared: float = 0.0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, a flat vector ``(weights,)``; no reference to it is stored."""
        l1, l2 = (
            float(torch.linalg.vector_norm(gradient, order, dtype=torch.float64))
            for order in (1, 2)
        )
        self.merge(GradientSum(gradient, 1, l1, l1**2, l2, l2**2))

    def merge(self, other: GradientSum) -> None:
        """Add the gradients of another sum, which is not changed."""
        if other.total is not None:
            moved = other.total.to(self.total.device) if self.total is not None else other.total
            self.total = moved.clone() if self.total is None else self.total + moved
        self.count += other.count
        self.l1 += other.l1
        self.l1_squared += other.l1_squared
        self.l2 += other.l2
        self.l2_squared += other.l2_squared

    def diversity(self, norm: NormName = "l2", *, squared: bool = True) -> float:
        """``sum_k ||g_k||^p / ||sum_k g_k||^p``, p = 2 if squared (Eq. 1), else 1 (Eq. 9).

        It is ``1 / n^(p-1)`` for n equal gradients, 1 for orthogonal ones (squared L2), and
        infinite if their sum is 0.

        Args:
            norm: ``l2`` (Eq. 1, 9) or ``l1`` (Eq. 10, 11).
            squared: Whether norms are squared.

        Raises:
            ValueError: No gradient was added.
        """
        if self.total is None:
            raise ValueError("diversity needs at least one gradient")
        norms = {"l1": (self.l1, self.l1_squared), "l2": (self.l2, self.l2_squared)}[norm][squared]
        of_sum = float(
            torch.linalg.vector_norm(self.total, 1 if norm == "l1" else 2, dtype=torch.float64)
        )
        of_sum = of_sum**2 if squared else of_sum
        return norms / of_sum if of_sum else float("inf")

    def diversity_of_means(self, norm: NormName = "l2", *, squared: bool = True) -> float:
        """``mean_k ||g_k||^p / ||mean_k g_k||^p``, as the authors' code prints it: ``n^(p-1)``
        times :meth:`diversity`.

        At least 1 for p = 2; exactly 1 for any number of equal gradients.

        Args:
            norm: As in :meth:`diversity`.
            squared: As in :meth:`diversity`.
        """
        return self.diversity(norm, squared=squared) * (self.count if squared else 1)


def sum_gradients(gradients: Iterable[Tensor]) -> GradientSum:
    """The sums over flat gradients ``(weights,)``."""
    total = GradientSum()
    for gradient in gradients:
        total.add(gradient)
    return total


def merged(sums: Iterable[GradientSum]) -> GradientSum:
    """The total of several sums, which are not changed."""
    total = GradientSum()
    for part in sums:
        total.merge(part)
    return total
