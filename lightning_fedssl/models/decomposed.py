"""A network whose weights are sums of two sets of parameters that are trained separately
(FedMatch).
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.by_name import below, paired, unprefixed
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
        self.decomposed: list[str] = []
        self.psi = nn.ParameterDict()
        for name, weight in network.named_parameters():
            if not isinstance(network.get_submodule(name.rpartition(".")[0]), _NORMS):
                if variance_scaling:
                    _draw(weight)
                self.decomposed.append(name)
                # A parameter's name cannot hold a dot.
                self.psi[name.replace(".", "/")] = nn.Parameter(weight.detach() * psi_scale)

    def parts(self) -> tuple[State, State]:
        """Sigma, with the weights of the norm layers, and psi, by the names of the network."""
        return self.parts_of(dict(self.named_parameters()))

    def parts_of(self, state: State) -> tuple[State, State]:
        """Sigma and psi of a state of this module, by the names of the network.

        Args:
            state: All of its psi, and as much of its sigma as there is, by their names.
        """
        psi = {name: state[f"psi.{name.replace('.', '/')}"] for name in self.decomposed}
        return unprefixed("sigma.", below("sigma.", state)), psi

    @torch.no_grad()
    def summed(self) -> nn.Module:
        """A copy of the plain network with ``theta`` as its weights."""
        network = copy.deepcopy(self.sigma)
        for name, psi in self.parts()[1].items():
            network.get_parameter(name).add_(psi)
        return network

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` with the weights sigma + psi; both get gradients."""
        return self.logits(x, *self.parts())

    def logits(self, x: Tensor, sigma: State, psi: State) -> Tensor:
        """Logits ``(batch, num_classes)`` with the given sigma and psi instead of those of
        :meth:`parts`.

        Args:
            x: Images ``(batch, channels, height, width)``.
            sigma: Sigma by the names of the network; a detached tensor gets no gradient. Statistics
                of norm layers may be among it; left out, they are those of this module.
            psi: Psi by the same names.
        """
        theta = {**sigma, **paired(torch.add, psi, sigma)}
        logits: Tensor = functional_call(self.sigma, theta, x)
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
