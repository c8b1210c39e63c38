from __future__ import annotations

import pytest
import torch

from lightning_fedssl.functional.sparsity import hard_threshold, keep_changes, sparse_sizes


def test_thresholds_are_strict() -> None:
    """Changes 0.25, 0.26, 0.3, 0.125, 0.125: two exceed 0.25. With a threshold the last new values count as 0."""
    values = torch.tensor([0.5, -0.5, 0.50001, -0.6, 0.0])
    assert hard_threshold(values, 0.5).tolist() == pytest.approx([0, 0, 0.50001, -0.6, 0])
    assert torch.equal(hard_threshold(values, 0.0), values)
    old = torch.tensor([1.0, 1.0, 1.0, 0.25, 0.0])
    new = torch.tensor([1.25, 1.26, 0.7, 0.125, 0.125])
    assert keep_changes(new, old, 0.25).tolist() == pytest.approx([1.0, 1.26, 0.7, 0.25, 0.0])
    assert keep_changes(new, old, 0.2, threshold=0.125)[3:].tolist() == [0.125, 0.0]
    assert torch.equal(keep_changes(new, old, 0.0), new)


def test_sizes_of_sparse_tensors() -> None:
    dense = torch.zeros(10, 100)
    assert sparse_sizes("w", 1000, dense) == {"w": 4000}
    assert sparse_sizes("w", 500, dense) == {"w": 2000, "w.positions": 125}
    assert sparse_sizes("w", 3, dense) == {"w": 12, "w.positions": 12}
