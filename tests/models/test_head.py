from __future__ import annotations

import pytest
import torch
from sklearn.linear_model import LogisticRegression, RidgeCV
from torch.nn import functional as F

from lightning_fedssl.models import MLP
from lightning_fedssl.models.head import PENALTIES, best_linear, folds, start_head


def samples(count: int, width: int, classes: int, signal: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(count) % classes
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return noise + signal * F.one_hot(labels, width), labels


@pytest.mark.parametrize("classes", [2, 3])
def test_the_linear_answer_has_scikit_learns_classes_and_none_without_labels(classes: int) -> None:
    x, labels = samples(30, 5, classes, 4.0)
    answer = best_linear(x, labels + 1, classes + 2)
    logits = x.double() @ answer.weight.T + answer.bias
    centred = x.double() - x.double().mean(0)
    rows = centred / centred.square().mean().sqrt()
    theirs = LogisticRegression(max_iter=200).fit(rows, labels)
    assert answer.name == "logistic regression"
    torch.testing.assert_close(logits[:, 1:-1].softmax(1), torch.from_numpy(theirs.predict_proba(rows)))
    assert not {0, classes + 1} & {*logits.argmax(1).tolist()}


def test_every_label_is_left_out_once_in_each_cross_validation() -> None:
    labels = torch.arange(20) % 2
    parts = folds(labels)
    for each in parts:
        assert sorted(place for _, left_out in each for place in left_out) == list(range(20))
        assert not any({*seen} & {*left_out} for seen, left_out in each)
    assert len({str(each) for each in parts}) == len(parts) > 1
    assert len(folds(labels.repeat(6))) == 1
    assert folds(torch.arange(3)) == []


def test_the_better_of_both_regressions_starts_the_classifier() -> None:
    x, labels = samples(40, 4, 2)
    noisy = torch.cat([x, 30 * torch.randn(40, 60, generator=torch.Generator().manual_seed(1))], 1)
    strong = samples(40, 4, 2, 3.0)[0]
    found = [best_linear(features, labels, 2) for features in (noisy, x, strong)]
    assert found[2].right.double().mean() > 0.9 > found[0].right.double().mean()
    network = MLP(num_classes=2, in_shape=(4,), hidden=())
    answer = start_head(network, 2, [x], labels)
    assert answer is not None
    torch.testing.assert_close(network(x).double(), x.double() @ answer.weight.T + answer.bias, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="two classes"):
        best_linear(x, labels * 0, 2)


def test_a_regression_starts_from_ridge_regression() -> None:
    x, _ = samples(40, 3, 3)
    targets = torch.stack([2 * x[:, 0] - x[:, 1] + 5, x[:, 2]], 1)
    network = MLP(num_classes=2, in_shape=(3,), hidden=())
    start_head(network, 2, [x], targets)
    torch.testing.assert_close(network(x), targets, rtol=0, atol=0.01)
    assert RidgeCV(PENALTIES).fit(x, targets).alpha_ == PENALTIES[0]
