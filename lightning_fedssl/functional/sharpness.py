"""Steps towards larger losses, for methods that look for flat minima."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import map_values


def asam_step(weights: State, gradients: State, rho: float, eta: float) -> State:
    """ASAM's step: the change of length ``rho``, relative to the size of the weights, that raises a
    loss most.

    ``eps = rho T^2 g / ||T g||`` with ``T = |w| + eta`` for tensors named ``weight``, and 1 for
    others (Kwon et al., "ASAM", ICML 2021, Eq. 6). Without a gradient it is 0.

    Args:
        weights: w by name.
        gradients: g, the gradient of the loss by the same names.
        rho: The length of the step.
        eta: Added to the absolute value of a weight.

    Returns:
        eps by name.
    """
    scale = map_values(torch.ones_like, weights)
    for name, w in weights.items():
        if name.endswith("weight"):
            scale[name] = w.abs() + eta
    scaled = map_values(torch.mul, gradients, scale)
    norm = torch.stack([*map(Tensor.norm, scaled.values())]).norm() + 1e-16
    return map_values(lambda g, t: t * g * (rho / norm), scaled, scale)
