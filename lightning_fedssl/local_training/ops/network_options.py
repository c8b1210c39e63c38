"""Options that make the network faster: a memory layout for convolutions, and compilation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_fedssl.algorithm import FederatedAlgorithm

_log = logging.getLogger(__name__)


def lay_out_channels_last(algorithm: FederatedAlgorithm) -> None:
    """Store convolutions' weights with the channels last; the first convolution converts the images.

    Results are equal to those of the usual layout up to rounding, because other kernels add in another order.

    Args:
        algorithm: The working module, before the global model is copied from it.
    """
    algorithm.to(memory_format=torch.channels_last)


def compile_network(algorithm: FederatedAlgorithm, fabric: Fabric, backend: str = "inductor") -> None:
    """Compile the network if a test with a copy succeeds; otherwise warn with the reason and do nothing.

    The test makes one forward and backward pass, which must compile to one graph. Names of weights do not change.

    Args:
        algorithm: The working module.
        fabric: Gives precision and device.
        backend: As in ``torch.compile``.
    """
    torch.compiler.reset()  # all networks of a process share a limit on compiled versions
    try:
        with torch.random.fork_rng([fabric.device] if fabric.device.type == "cuda" else []):
            _try(algorithm, fabric, backend)
    except Exception as error:
        if fabric.is_global_zero:
            _log.warning(
                "trainer.compile is true, but %s cannot be compiled and runs uncompiled: %s",
                type(algorithm.network).__name__, _reason(error),
            )  # fmt: skip
        return
    algorithm.network.compile(backend=backend)


def _try(algorithm: FederatedAlgorithm, fabric: Fabric, backend: str) -> None:
    assert algorithm.in_shape is not None
    clone = copy.deepcopy(algorithm.network)
    clone.compile(backend=backend, fullgraph=True)
    dtype = next(iter(clone.parameters())).dtype
    images = torch.rand(4, *algorithm.in_shape, dtype=dtype, device=fabric.device)
    with fabric.autocast():
        logits = clone(images)
    logits.float().square().mean().backward()


def _reason(error: Exception) -> str:
    """The compiler's reason, and the line of the network that it names, if any."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [f"{a} {b}" for a, b in pairwise(lines) if a.startswith("File ")]
    return "; ".join([*lines[:2], *where[-1:]]) or type(error).__name__


@contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """Run every layer uncompiled inside this context, because ``vmap`` does not support compiled layers.

    Args:
        module: The module.
    """
    compiled = {layer: layer._compiled_call_impl for layer in module.modules() if layer._compiled_call_impl is not None}
    for layer in compiled:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in compiled.items():
            layer._compiled_call_impl = call
