"""Choosing images evenly over classes, or in their proportions."""

from __future__ import annotations

import numpy as np
import torch

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.class_balance import choose_balanced, choose_stratified, even_counts


def test_short_class_gives_all_it_has() -> None:
    labels = torch.tensor([0] * 3 + [1] * 50 + [2] * 50)
    chosen = choose_balanced(labels, 30, 3, sampling.rng(0, "test"))
    assert sorted(labels[chosen].bincount().tolist()) == [3, 13, 14]


def test_even_counts_fill_up_to_capacity() -> None:
    counts = even_counts(np.array([1, 0, 100, 5]), 20, sampling.rng(0, "test"))
    assert counts.tolist() == [1, 0, 14, 5]


def test_stratified_choice_keeps_the_proportions() -> None:
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 70)
    chosen = choose_stratified(labels, 20, 3, sampling.rng(0, "test"))
    assert labels[chosen].bincount().tolist() == [2, 4, 14]
    assert labels[choose_stratified(labels, 5, 3, sampling.rng(0, "test"))].bincount(minlength=3).sum() == 5
