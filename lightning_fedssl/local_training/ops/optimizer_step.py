"""One step of an optimizer with little Python overhead.

A step of ``torch.optim.SGD`` on a small model takes 20 microseconds, of which the kernel takes 4; in the rest it
collects tensors, groups them by device and opens profiler ranges, although the weights are always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer


def step_of(optimizer: Optimizer) -> Callable[[], object]:
    """A function that makes one optimizer step for one party; bitwise identical to ``optimizer.step``.

    For fused SGD it calls the kernel directly. For other optimizers, and for optimizers with hooks, it is
    ``optimizer.step``.

    Args:
        optimizer: The optimizer with its initial state. Its settings are read at every step, so they may change.
    """
    return _FusedSgd(optimizer) if _is_plain_fused_sgd(optimizer) else optimizer.step


def step_by_torch(optimizer: Optimizer) -> None:
    """A step of ``optimizer.step``, also where fused SGD would refuse: if only some weights have their first gradient.

    The fused kernel creates the momenta of all weights or of none.

    Args:
        optimizer: The optimizer, with the gradients in its weights.
    """
    mixed = [group for group in optimizer.param_groups if _needs_some_momenta(optimizer, group)]
    for group in mixed:
        group["fused"] = None
    optimizer.step()
    for group in mixed:
        group["fused"] = True


def _needs_some_momenta(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group of fused SGD lacks the momenta of some weights that have a gradient, and has those of others."""
    if not isinstance(optimizer, SGD) or not group["fused"] or not group["momentum"]:
        return False
    states = [optimizer.state.get(p, {}) for p in group["params"] if p.grad is not None]
    return len({state.get("momentum_buffer") is None for state in states}) > 1


class _FusedSgd:
    """SGD that collects its tensors only once."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = [group for group in optimizer.param_groups if group["params"]]
        # The same memory as tensors without a graph: entering no_grad at every step takes as long as the kernel.
        self.weights = [[p.detach() for p in group["params"]] for group in self.groups]
        self.momenta = self._momenta()

    def __call__(self) -> None:
        gradients = [[p.grad for p in group["params"]] for group in self.groups]
        if self.momenta is None or any(g is None for of_group in gradients for g in of_group):
            step_by_torch(self.optimizer)  # which creates the momenta, and leaves out weights without a gradient
            self.momenta = self._momenta()
            return
        for group, weights, of_group, momenta in zip(self.groups, self.weights, gradients, self.momenta, strict=True):
            torch._fused_sgd_(
                weights, of_group, momenta, weight_decay=group["weight_decay"], momentum=group["momentum"],
                lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
                is_first_step=False,
            )  # fmt: skip

    def _momenta(self) -> list[list[Tensor]] | None:
        """Every group's momenta, none without momentum; None while some are missing."""
        state, found = self.optimizer.state, []
        for group in self.groups:
            kept = [state.get(p, {}).get("momentum_buffer") for p in group["params"]] if group["momentum"] else []
            if any(momentum is None for momentum in kept):
                return None
            found.append(kept)
        return found


def _is_plain_fused_sgd(optimizer: Optimizer) -> bool:
    listeners = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    replaced = ("step", "grad_scale", "found_inf")
    return (
        type(optimizer) is SGD
        and not any(listeners)
        and not any(name in vars(optimizer) for name in replaced)
        and all(_is_one_kernel(group) for group in optimizer.param_groups)
    )


def _is_one_kernel(group: dict[str, Any]) -> bool:
    """Whether all weights of a group go into one call."""
    parameters: Iterable[Tensor] = group["params"]
    return group["fused"] is True and len({(p.device, p.dtype) for p in parameters}) <= 1
