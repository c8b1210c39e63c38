"""Losses and helper selection of FedMatch (W. Jeong et al., ICLR 2021, arXiv 2006.12097)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.losses import added


def helper_divergence(logits: Tensor, helpers: Tensor, mask: Tensor) -> Tensor:
    """``1/H sum_h KL(p_h || p)``, averaged over the images with a true mask; 0 without such an
    image (Eq. 1).

    Args:
        logits: ``(batch, classes)`` of the local model, which gets the gradient.
        helpers: p_h, the helpers' probabilities, ``(batch, H, classes)``.
        mask: ``(batch,)`` bool.
    """
    log_p = F.log_softmax(logits, dim=-1)[:, None]
    divergence = (torch.special.xlogy(helpers, helpers) - helpers * log_p).sum(dim=-1).mean(dim=1)
    weights = mask.to(divergence.dtype)
    mean: Tensor = (divergence * weights).sum() / weights.sum().clamp(min=1)
    return mean


def decomposition_penalty(sigma: State, psi: State, l1_weight: float, l2_weight: float) -> Tensor:
    """``lambda_L1 sum |psi| + lambda_L2 sum (sigma - psi)^2`` over all tensors (the last two terms
    of Eq. 5).

    Args:
        sigma: By name.
        psi: By name.
        l1_weight: lambda_L1.
        l2_weight: lambda_L2.
    """
    terms = []
    for name, own in psi.items():
        distance = (sigma[name] - own).square().sum()
        terms.append(l1_weight * own.abs().sum() + l2_weight * distance)
    return added(terms)


def nearest_clients(client: int, embeddings: Mapping[int, Tensor], count: int) -> list[int]:
    """The other clients with the smallest Euclidean distance of embeddings, the nearest first
    (section 3.1).

    Args:
        client: The client that needs helpers; it has an embedding.
        embeddings: A vector ``(n,)`` for each client that took part before.
        count: H, the number of helpers; the list is shorter if there are fewer other clients.
    """
    others = [other for other in embeddings if other != client]
    others.sort(key=lambda other: float((embeddings[other] - embeddings[client]).norm()))
    return others[:count]
