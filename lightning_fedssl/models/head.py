"""The weights that a classifier starts with: zero, or the best linear answer to the labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.dictionaries import map_values
from lightning_fedssl.task import Task

PENALTIES = np.logspace(-3, 4, 8)
"""Weights of the squared norm of ridge regression, for features of a mean square of 1; leaving out
one label at a time chooses."""

SHARPNESS = torch.logspace(-0.5, 2, 26)
"""Factors by which outputs of ridge regression become logits, chosen by labels left out."""

FOLDS = 5
"""Parts of a cross-validation; with fewer labels of a class, so many of them."""

REPEATS = 4
"""Cross-validations, each with other parts; one for more than 100 labels."""

MOST_VALUES = 1_000_000
"""Labelled samples times features up to which classifiers are cross-validated: seconds."""

MISSING = -30.0
"""The bias of a class without labels."""


class LinearAnswer(NamedTuple):
    """The best linear classifier of some labels, and how it does on labels that are left out.

    Attributes:
        name: What it is called.
        weight: ``(classes, d)``, fitted to all labels.
        bias: ``(classes,)``.
        right: Whether each label was right when it was left out, ``(repeats, labels)``; without a
            row if none could be.
    """

    name: str
    weight: Tensor
    bias: Tensor
    right: Tensor


def start_head(
    network: nn.Module,
    num_classes: int,
    batches: Iterable[Tensor] = (),
    labels: Tensor | None = None,
) -> LinearAnswer | None:
    """Set the classifier of a network, in place: its last linear layer with trained weights.

    Args:
        network: The network.
        num_classes: Number of classes.
        batches: Labelled samples, ``(n, ...)`` each.
        labels: Their labels, ``(labelled,)``, or the outputs that they should have, ``(labelled,
            outputs)``. The classifier is then the best linear answer to them (:func:`best_linear`;
            to outputs ridge regression) on what it receives from the layers before it, in
            evaluation mode; else it is zero.

    Returns:
        The answer to labels, else None.

    Raises:
        ValueError: If the network has no such layer, or there are no labels.
    """
    layers = [m for m in network.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    if not layers or layers[-1].out_features != num_classes:
        raise ValueError(
            f"model.init_head: the last layer that {type(network).__name__} trains is not a linear "
            f"layer with {num_classes} outputs; leave the key out"
        )
    head = layers[-1]
    nn.init.zeros_(head.weight)
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    if labels is None:
        return None
    if not len(labels):
        raise ValueError(
            "model.init_head: labels needs data.label_location: server; give zero or leave it out"
        )
    features = _inputs(network, head, batches)
    answer = best_linear(features, labels, num_classes)
    with torch.no_grad():
        head.weight.copy_(answer.weight)
        if head.bias is not None:
            head.bias.copy_(answer.bias)
    return answer


def linear_targets(task: Task, targets: Tensor) -> Tensor:
    """What a linear classifier is fitted to: the classes ``(n,)``; for several labels the logits 2
    and -2, for numbers their normalised values, ``(n, outputs)``, and 0 for what is not known.

    Args:
        task: What is predicted.
        targets: The targets, as the task has them.
    """
    if targets.dim() == 1:
        return targets
    moments = map_values(targets.new_tensor, task.target_normalization())
    outputs = 4.0 * targets - 2
    if moments:
        outputs = (targets - moments["mean"]) / moments["std"]
    return torch.where(task.known(targets), outputs, 0.0)


def trains_head_alone(network: nn.Module) -> bool:
    """Whether one layer of a network is trained, as of a linear one or on frozen layers."""
    trained = [name for name, weight in network.named_parameters() if weight.requires_grad]
    return len({name.rpartition(".")[0] for name in trained}) == 1


def _inputs(network: nn.Module, head: nn.Linear, batches: Iterable[Tensor]) -> Tensor:
    """What a layer receives of samples, ``(samples, features)``."""
    received = []
    hook = head.register_forward_hook(lambda layer, inputs, output: received.append(inputs[0]))
    with evaluating(network):
        for batch in batches:
            network(batch)
    hook.remove()
    return torch.cat(received).detach()


def best_linear(features: Tensor, labels: Tensor, num_classes: int) -> LinearAnswer:
    """Logistic regression, or ridge regression where that is right more often on labels that are
    left out (:func:`folds`); of outputs ridge regression.

    Args:
        features: ``(n, d)``.
        labels: ``(n,)``, or outputs ``(n, outputs)``.
        num_classes: Number of classes, or of outputs.

    Raises:
        ValueError: If all labels are of one class.
    """
    from sklearn.linear_model import LogisticRegression, RidgeClassifierCV, RidgeCV
    from sklearn.model_selection import cross_val_predict

    x = features.double()
    centre = x.mean(0)
    scale = (x - centre).square().mean().sqrt().clamp_min(1e-12)
    rows, y = ((x - centre) / scale).cpu().numpy(), labels.cpu().numpy()
    present = np.unique(y) if y.ndim == 1 else np.arange(num_classes)
    if len(present) < 2 and y.ndim == 1:
        raise ValueError("model.init_head: labels needs labels of two classes; label more")
    parts = folds(labels) if rows.size <= MOST_VALUES else []
    models: dict[str, Any] = {"logistic regression": LogisticRegression(max_iter=200)}
    if parts:
        models["ridge regression"] = RidgeClassifierCV(PENALTIES)
    if y.ndim > 1:
        models = {"ridge regression": RidgeCV(PENALTIES)}
    is_binary = y.ndim == 1 and len(present) == 2
    answers = []
    for name, model in models.items():
        left_out = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # separable classes: the weights need not converge
            for part in parts:
                predictions = cross_val_predict(model, rows, y, cv=part, method="decision_function")
                left_out.append(
                    torch.from_numpy(_of_both(predictions[None]).T if is_binary else predictions)
                )
            model.fit(rows, y)
        classes = torch.from_numpy(np.searchsorted(present, y))
        factor = 0.5 if is_binary else 1.0
        if isinstance(model, RidgeClassifierCV):
            losses = [F.cross_entropy(f * left_out[0], classes) for f in SHARPNESS]
            factor = float(SHARPNESS[int(torch.stack(losses).argmin())])
        fitted = np.column_stack([np.atleast_2d(model.coef_), np.ravel(model.intercept_)])
        solution = x.new_zeros(num_classes, x.shape[1] + 1)
        solution[:, -1] = MISSING
        solution[present] = factor * x.new_tensor(_of_both(fitted) if is_binary else fitted)
        weight, bias = solution[:, :-1] / scale, solution[:, -1]
        right = [scores.argmax(1) == classes for scores in left_out] or [classes[:0]]
        answers.append(LinearAnswer(name, weight, bias - weight @ centre, torch.stack(right)))
    return max(answers, key=lambda answer: int(answer.right.sum()))


def _of_both(of_second: Any) -> Any:
    """What scikit-learn has for the second of two classes alone, ``(1, ...)``, for both."""
    return np.concatenate([-of_second, of_second])


def folds(labels: Tensor, repeats: int = REPEATS) -> list[list[tuple[Any, Any]]]:
    """The parts of stratified cross-validations: places of labels that are seen, and left out.

    Args:
        labels: ``(n,)``.
        repeats: Cross-validations; one for more than 100 labels.

    Returns:
        None if a class has one label, and of outputs.
    """
    from sklearn.model_selection import StratifiedKFold

    y = labels.cpu().numpy()
    smallest = np.unique(y, return_counts=True)[1].min() if y.ndim == 1 else 0
    pairs = []
    for repeat in range(repeats if len(y) <= 100 else 1):
        if smallest > 1:
            parts = StratifiedKFold(min(FOLDS, smallest), shuffle=True, random_state=repeat)
            pairs.append([*parts.split(y, y)])
    return pairs
