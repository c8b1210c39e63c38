"""The weights that a classifier starts with: logistic regression of the labels, or zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.functional.batch_norm import evaluating

L2 = 0.1
"""Weight of half the squared norm of the weights beside the mean loss, for features of a mean
square of 1: with it confidences on features of pretrained networks are about right."""


def start_head(
    network: nn.Module,
    num_classes: int,
    batches: Iterable[Tensor] = (),
    labels: Tensor | None = None,
) -> None:
    """Set the classifier of a network, in place: its last linear layer with trained weights.

    Args:
        network: The network.
        num_classes: Number of classes.
        batches: Labelled samples, ``(n, ...)`` each.
        labels: Their labels, ``(labelled,)``. The classifier is then the logistic regression of
            them on what it receives from the layers before it, in evaluation mode; else it is zero.

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
        return
    if not len(labels):
        raise ValueError(
            "model.init_head: labels needs data.label_location: server; give zero or leave it out"
        )
    weight, bias = logistic_regression(_inputs(network, head, batches), labels, num_classes)
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)


def _inputs(network: nn.Module, head: nn.Linear, batches: Iterable[Tensor]) -> Tensor:
    """What a layer receives of samples, ``(samples, features)``."""
    received = []
    hook = head.register_forward_hook(lambda layer, inputs, output: received.append(inputs[0]))
    with evaluating(network):
        for batch in batches:
            network(batch)
    hook.remove()
    return torch.cat(received).detach()


def logistic_regression(
    features: Tensor, labels: Tensor, num_classes: int, l2: float = L2
) -> tuple[Tensor, Tensor]:
    """Weights ``(classes, d)`` and bias ``(classes,)`` of multinomial logistic regression.

    It minimises the mean cross-entropy plus ``l2 / 2`` times the squared norm of the weights for
    features that are centred and scaled to a mean square of 1, by L-BFGS in 64 bits.

    Args:
        features: ``(n, d)``.
        labels: ``(n,)``.
        num_classes: Number of classes.
        l2: The regularisation.
    """
    x = features.double()
    centre = x.mean(0)
    scale = (x - centre).square().mean().sqrt().clamp_min(1e-12)
    x = (x - centre) / scale
    weight = torch.zeros(num_classes, x.shape[1], dtype=x.dtype, device=x.device)
    bias = weight.new_zeros(num_classes)
    weight.requires_grad_(), bias.requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight.T + bias, labels) + l2 / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    weight = weight.detach() / scale
    bias = bias.detach()
    return weight, bias - weight @ centre
