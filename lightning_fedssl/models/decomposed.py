"""A network whose weights are sums of two sets of parameters that are trained separately
(FedMatch).
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.by_name import mapped
from lightning_fedssl.functional.tied import call_with
from lightning_fedssl.models.network import Network

_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


class Decomposed(Network):
    """``theta = sigma + psi`` for every weight and bias of a network.

    Its norm layers have only sigma.

    Args:
        network: The network; its parameters become sigma.
        psi_scale: The initial psi is this multiple of sigma.
        variance_scaling: Initialise sigma again: weights from a truncated normal distribution of
            variance 1 / fan-in, biases 0. If false, sigma are the network's parameters as they are.
    """

    def __init__(
        self, network: nn.Module, psi_scale: float = 0.2, variance_scaling: bool = True
    ) -> None:
        super().__init__()
        self.sigma = network
        norms = {name for name, module in network.named_modules() if isinstance(module, _NORMS)}
        self.decomposed = [
            n for n, _ in network.named_parameters() if n.rpartition(".")[0] not in norms
        ]
        if variance_scaling:
            for name in self.decomposed:
                _draw(network.get_parameter(name))
        # A parameter's name cannot hold a dot.
        parts = {
            name.replace(".", "/"): network.get_parameter(name).detach() * psi_scale
            for name in self.decomposed
        }
        self.psi = nn.ParameterDict(mapped(nn.Parameter, parts))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Sigma and psi of every decomposed tensor."""
        own = dict(self.sigma.named_parameters())
        return [(own[name], self.psi[name.replace(".", "/")]) for name in self.decomposed]

    def fixed_norms(self) -> State:
        """The weights and biases of the norm layers by name, detached: they belong to sigma."""
        return {
            name: p.detach()
            for name, p in self.sigma.named_parameters()
            if name not in self.decomposed
        }

    @torch.no_grad()
    def summed(self) -> nn.Module:
        """A copy of the plain network with ``theta`` as its weights."""
        network = copy.deepcopy(self.sigma)
        for name, (sigma, psi) in zip(self.decomposed, self.pairs(), strict=True):
            network.get_parameter(name).copy_(sigma + psi)
        return network

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` with the weights sigma + psi; both get gradients."""
        return self.logits(x, self.pairs())

    def logits(
        self, x: Tensor, pairs: list[tuple[Tensor, Tensor]], norms: State | None = None
    ) -> Tensor:
        """Logits ``(batch, num_classes)`` with the given sigma and psi instead of those of
        :meth:`pairs`.

        Args:
            x: Images ``(batch, channels, height, width)``.
            pairs: sigma and psi of every decomposed tensor; a detached one gets no gradient.
            norms: Tensors of the norm layers by name; those of this module if left out.
        """
        weights: State = {
            name: sigma + psi for name, (sigma, psi) in zip(self.decomposed, pairs, strict=True)
        }
        logits: Tensor = call_with(self.sigma, {**(norms or {}), **weights}, x)
        return logits


def _draw(weight: Tensor) -> None:
    """Initialise like Keras' ``VarianceScaling(1, "fan_in", "truncated_normal")``, truncated at two
    deviations.
    """
    if weight.dim() < 2:
        nn.init.zeros_(weight)
        return
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
