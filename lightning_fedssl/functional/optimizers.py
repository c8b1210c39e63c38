"""Default optimizers, FedOpt for the server's step, how an optimizer is built, and a check for
methods whose equations hold for plain SGD alone.

The defaults are functions and not lambdas: of a lambda jsonargparse may keep the arguments where a
configuration names SGD with other arguments, or take the default of the base class instead, and it
cannot write it into a configuration. They are in a module of their own because jsonargparse parses
the source of a default's module several times for each configuration that it reads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer


def sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """The default optimizer: SGD with learning rate 0.03 and momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.03, momentum=0.9)


def plain_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Fed-SHVR's default optimizer: SGD with learning rate 0.01 without momentum (Eq. 16)."""
    return torch.optim.SGD(parameters, lr=0.01)


def slow_plain_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """FedMatch's default optimizer: SGD with learning rate 0.001 without momentum."""
    return torch.optim.SGD(parameters, lr=1e-3)


def nesterov_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Semi-SFL's default optimizer: SGD with learning rate 0.02, Nesterov momentum 0.9 and weight
    decay 5e-4.
    """
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)


def half_momentum(parameters: Iterable[Tensor]) -> Optimizer:
    """The default optimizer of SemiFL's aggregation: SGD with learning rate 1 and momentum 0.5."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


class FedOpt(Optimizer):
    """FedAdam, FedYogi and FedAdagrad: the server's step as printed, for
    ``model.aggregation_optimizer``.

    With the mean update as gradient g: ``m = beta_1 m + (1 - beta_1) g`` and
    ``w = w - lr m / (sqrt(v) + tau)``. v starts at ``tau^2`` and is ``beta_2 v + (1 - beta_2) g^2``
    (Adam), ``v - (1 - beta_2) g^2 sign(v - g^2)`` (Yogi) or ``v + g^2`` (Adagrad).
    ``torch.optim.Adam`` also corrects the bias of the first steps.

    Source: S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv 2003.00295,
    Algorithm 2.

    Args:
        params: The global weights, or groups of them.
        lr: The server's learning rate.
        betas: beta_1 and beta_2; the paper's Adagrad has beta_1 = 0.
        tau: The degree of adaptivity; the smaller, the more adaptive.
        rule: How v changes.

    Raises:
        ValueError: If a value is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        rule: Literal["adam", "yogi", "adagrad"] = "adam",
    ) -> None:
        if not (lr > 0 and tau > 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"lr is {lr}, tau {tau} and betas {betas}: give an lr and a tau above 0, and betas "
                "from 0 to below 1"
            )
        if rule not in ("adam", "yogi", "adagrad"):
            raise ValueError(f"rule is {rule}: give adam, yogi or adagrad")
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau, "rule": rule})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step from the weights' gradients; there is no closure."""
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["m"] = torch.zeros_like(weight)
                    state["v"] = torch.full_like(weight, group["tau"] ** 2)
                squared = weight.grad.square()
                state["m"].lerp_(weight.grad, 1 - beta_1)
                if group["rule"] == "adam":
                    state["v"].lerp_(squared, 1 - beta_2)
                elif group["rule"] == "yogi":
                    state["v"] -= (1 - beta_2) * squared * (state["v"] - squared).sign()
                else:
                    state["v"] += squared
                weight.addcdiv_(state["m"], state["v"].sqrt() + group["tau"], value=-group["lr"])


def build_optimizer(factory: OptimizerCallable, weights: Sequence[Tensor], key: str) -> Optimizer:
    """The optimizer of clients or server, with its fused kernel where the user chose no
    implementation.

    Args:
        factory: From the configuration.
        weights: What it trains.
        key: Its key, for messages: ``model.optimizer``.

    Raises:
        ValueError: If its settings are wrong, or it cannot make a step from one dense gradient.
    """
    try:
        optimizer = factory(weights)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{key}: {reason}; change {key}.init_args, or choose another optimizer"
        ) from error
    for name, value in optimizer.defaults.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}.init_args.{name} is {value}: give a finite number")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.SparseAdam) or (
        closure and closure.default is inspect.Parameter.empty
    ):
        raise ValueError(
            f"{key} is {type(optimizer).__name__}, which needs sparse gradients or computes the "
            "loss several times in a step; choose one that makes a step from one gradient, such as "
            "SGD or Adam"
        )
    for group in optimizer.param_groups:
        # Not with dampening: the first step is none from a momentum of 0, and fused SGD needs all
        # momenta or none.
        chosen = (
            group.get("foreach") is not None
            or group.get("differentiable")
            or group.get("dampening")
        )
        if group.get("fused", False) is None and not chosen:
            group["fused"] = True
    return optimizer


def require_plain_sgd(
    factory: OptimizerCallable,
    reason: str,
    weight_decay: bool = False,
    several_rates: bool = False,
    key: str = "model.optimizer",
) -> None:
    """Refuse every optimizer but SGD without momentum.

    Args:
        factory: The optimizer of the configuration.
        reason: Why the method needs plain SGD, and the alternative, for the message.
        weight_decay: Whether a weight decay is allowed.
        several_rates: Whether groups of weights may have learning rates of their own.
        key: Its key, for the message.

    Raises:
        ValueError: If it is another optimizer.
    """
    # A matrix and a vector, because the factory may make groups by shape.
    optimizer = factory([torch.zeros(1, 1, requires_grad=True), torch.zeros(1, requires_grad=True)])
    groups = optimizer.param_groups
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or (group["weight_decay"] and not weight_decay) for group in groups
    )
    if not plain or (len({float(group["lr"]) for group in groups}) > 1 and not several_rates):
        extras = ("" if weight_decay else ", weight decay") + (
            "" if several_rates else " and rates of single weights"
        )
        raise ValueError(
            f"{key} is {type(optimizer).__name__}, but {reason}: use SGD without momentum{extras}"
        )


def steps_are_alike(optimizer: Optimizer) -> bool:
    """Whether no step differs from the others: by a count on the host, or as the first."""
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    return isinstance(optimizer, torch.optim.SGD) and not dampened


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """The weights that an optimizer changes, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
