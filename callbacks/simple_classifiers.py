"""What simple classifiers make of the server's labels alone: the answers that a federation has to
beat.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_fedssl import sampling
from lightning_fedssl.models.backbones import SHORTEST_SERIES, RandomKernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lightning_fedssl.data import FederatedDataModule

MOST_VALUES = 2_000_000
"""Labelled samples times values of a sample up to which simple classifiers are fitted."""

FOLDS = 5
"""Parts of the cross-validation; with fewer labels of a class, one label of each class at a
time."""


class Answer(NamedTuple):
    """A simple classifier on the labels.

    Attributes:
        name: What it is called.
        estimate: Its accuracy in a stratified cross-validation over the labels, from 0 to 1.
        error: The standard error of the estimate.
        accuracy: Its accuracy on the test samples, fitted on all labels.
    """

    name: str
    estimate: float
    error: float
    accuracy: float


def simple_answers(data: FederatedDataModule) -> list[Answer]:
    """Fits logistic regression and extra trees to the server's labels; to series also a ridge
    classifier on random convolution kernels (ROCKET).

    Args:
        data: The data of a run, set up, with labels at the server.

    Returns:
        The best one by cross-validation first; test samples play no part in the order. None for
        more than :data:`MOST_VALUES` numbers, or if a class has less than two labels.
    """
    own = data.local_data(sampling.SERVER, 1)
    labels = own.labels.cpu().numpy()
    smallest = np.bincount(labels, minlength=data.num_classes).min(initial=len(labels))
    if smallest < 2 or len(labels) * math.prod(data.in_shape) > MOST_VALUES:
        return []
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    parts = StratifiedKFold(min(FOLDS, int(smallest)), shuffle=True, random_state=0)
    tested, truth = map(torch.cat, zip(*data.evaluation_batches("test"), strict=True))
    answers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # separable classes: the weights need not converge
        for name, (classifier, features) in _classifiers(data.in_shape).items():
            rows = _rows(features(own.plain(own.labeled)))
            right = cross_val_predict(classifier, rows, labels, cv=parts) == labels
            fitted = classifier.fit(rows, labels)
            accuracy = float(fitted.score(_rows(features(tested)), truth.cpu().numpy()))
            error = accuracy_error(right.mean(), len(right))
            answers.append(Answer(name, float(right.mean()), error, accuracy))
    return sorted(answers, key=lambda answer: -answer.estimate)


def accuracy_error(accuracy: float, count: int) -> float:
    """The standard error of a measured accuracy; of two more samples, one right and one wrong, so
    that it is not 0 where all are right.

    Args:
        accuracy: From 0 to 1.
        count: Samples, at least 1.
    """
    share = (accuracy * count + 1) / (count + 2)
    return math.sqrt(share * (1 - share) / count)


def _classifiers(shape: Sequence[int]) -> dict[str, Any]:
    """Classifiers by name, each with the function that gives its features of samples of a shape."""
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.linear_model import LogisticRegression, RidgeClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    made: dict[str, Any] = {
        "logistic regression": (LogisticRegression(max_iter=200), nn.Identity()),
        "extra trees": (ExtraTreesClassifier(100, random_state=0), nn.Identity()),
    }
    if len(shape) == 2 and shape[1] >= SHORTEST_SERIES:
        ridge = make_pipeline(StandardScaler(), RidgeClassifierCV(np.logspace(-3, 3, 7)))
        made["random kernels"] = (ridge, RandomKernels())
    return made


def _rows(samples: Tensor) -> NDArray[Any]:
    return samples.detach().flatten(1).float().cpu().numpy()
