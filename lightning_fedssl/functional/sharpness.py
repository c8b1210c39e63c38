"""Steps towards larger losses, for methods that look for flat minima."""

from __future__ import annotations

import torch

from lightning_fedssl.functional.averaging import State


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
    scale = {
        name: w.abs() + eta if name.endswith("weight") else torch.ones_like(w)
        for name, w in weights.items()
    }
    scaled = {name: scale[name] * g for name, g in gradients.items()}
    norm = torch.stack([g.norm() for g in scaled.values()]).norm() + 1e-16
    return {name: scale[name] * g * (rho / norm) for name, g in scaled.items()}
