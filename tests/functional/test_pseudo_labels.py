import math

import pytest
import torch

from lightning_fedssl.functional.pseudo_labels import pseudo_label, skew_of


def test_pseudo_label_threshold_is_inclusive() -> None:
    probabilities = torch.tensor([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    result = pseudo_label(probabilities.log(), 0.75)
    assert result.labels[:2].tolist() == [0, 1]
    exact = pseudo_label(probabilities.log(), float(torch.softmax(probabilities.log(), -1)[0, 0]))
    assert exact.mask[0]
    assert not exact.mask[2]
    soft = pseudo_label(probabilities.log(), 0.75, soft=True)
    torch.testing.assert_close(soft.labels, probabilities)


def test_skew_of_mean_predictions() -> None:
    certain = 200 * torch.eye(10)
    assert float(skew_of(certain)) == pytest.approx(0, abs=1e-6)
    assert float(skew_of(certain[:1])) == pytest.approx(math.log(10), abs=1e-6)
    assert float(skew_of(certain[:2])) == pytest.approx(math.log(5), abs=1e-6)
    assert float(skew_of(torch.zeros(3, 10))) == pytest.approx(0, abs=1e-9)
