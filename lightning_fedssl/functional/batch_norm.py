"""Batch-norm statistics measured in one pass over images (static batch norm, sBN), and their exact
combination.

SemiFL (Diao, Ding and Tarokh, NeurIPS 2022, arXiv 2106.01432) trains with batch statistics only.
The statistics for evaluation are measured afterwards, in two variants: the authors' code gives
every batch the same weight, and appendix B of the paper combines the moments of several parties
exactly.

In a measuring pass every batch-norm layer normalises with the statistics of its batch, as in
training. All other layers are in evaluation mode: with dropout, the statistics would describe
features that do not occur in evaluation, and the pass would need random numbers. (The authors'
networks have no dropout.) The pass does not change the network's modes, buffers or parameters.

A layer is any :class:`torch.nn.modules.batchnorm._BatchNorm`, found by its name in
``network.named_modules()``. Layers that the forward pass does not use (those of a teacher inside
the module) and frozen ones are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedssl.functional.frozen import frozen_names
from lightning_fedssl.functional.recorded import Recorded, Values

Statistics = dict[str, tuple[Tensor, Tensor]]
"""Per layer name the running mean and running variance, ``(channels,)`` each."""


class Moments(NamedTuple):
    """The moments that one party measured at one batch-norm layer.

    Attributes:
        count: Values per channel, images x height x width (N_m).
        mean: ``(channels,)`` (mu_m).
        variance: Unbiased, ``(channels,)`` (s_m^2).
    """

    count: int  # type: ignore[assignment]
    mean: Tensor
    variance: Tensor


LayerMoments = dict[str, Moments]
"""The moments of one party by layer."""

BatchMoments = dict[str, list[Moments]]
"""Those of each batch by layer."""


def batch_norm_layers(network: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers of a network by name, without those whose statistics are frozen.

    A layer that is used in two places appears once.
    """
    frozen = frozen_names(network)
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and f"{name}.running_mean".lstrip(".") not in frozen
    }


def has_static_batch_norm(network: nn.Module) -> bool:
    """Whether a layer has statistics for evaluation that training does not update, so that they
    must be measured.
    """
    layers = batch_norm_layers(network).values()
    return any(not layer.track_running_stats and layer.running_mean is not None for layer in layers)


def average_moments(measured: BatchMoments) -> Statistics:
    """The statistics of every batch-norm layer in float64, from the moments of all batches: the
    unweighted average over batches of the means and of the unbiased variances (the code of SemiFL's
    authors, PyTorch's ``momentum=None``).

    Args:
        measured: The result of :func:`batch_moments`.

    Raises:
        ValueError: There is no batch.
    """
    if measured and not any(measured.values()):
        raise ValueError(
            "There are no samples to measure batch-norm statistics on: raise data.num_labels, or "
            "take all images of server and clients (StaticBatchNorm, source: moments)."
        )
    average = {}
    for name, parts in measured.items():
        if parts:
            means, variances = _stacked(parts)
            average[name] = means.mean(0), variances.mean(0)
    return average


def measuring_batches(indices: Tensor, batch_size: int) -> list[Tensor]:
    """Batches of indices; a single remaining image, which has no variance, is added to the batch
    before it.

    Args:
        indices: ``(images,)``.
        batch_size: Images per batch, 2 or more.
    """
    parts = [part for part in indices.split(batch_size) if len(part)]
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def local_moments(network: nn.Module, batches: Iterable[Tensor]) -> LayerMoments:
    """Moments of one party's images at every batch-norm layer, all batches combined exactly.

    Args:
        network: The network; it is not changed.
        batches: This party's images, ``(batch, channels, height, width)``, on the network's device.

    Returns:
        Float64 moments by layer name; empty if there is no batch.

    Raises:
        ValueError: A batch has only one value per channel at a layer.
    """
    measured = batch_moments(network, batches)
    return {name: _combine(parts) for name, parts in measured.items() if parts}


def combine_moments(parties: Iterable[LayerMoments]) -> LayerMoments:
    """Combine the moments of several parties exactly, in the given order, with one running total in
    memory.

    ``mu = sum N_m mu_m / N`` and ``var = sum [(N_m - 1) s_m^2 + N_m (mu_m - mu)^2] / (N - 1)``
    (SemiFL, appendix B).

    Args:
        parties: The result of :func:`local_moments` for each party; an empty one changes nothing.
    """
    total: LayerMoments = {}
    for moments in parties:
        for name, part in moments.items():
            total[name] = _combine([total[name], part]) if name in total else part
    return total


@contextmanager
def evaluating(network: nn.Module, batch_statistics: bool = False) -> Iterator[None]:
    """Set evaluation mode and disable gradients inside the context.

    Restore every module's mode at its end.

    Args:
        network: The network.
        batch_statistics: Static batch norm normalises with the statistics of its batch, for weights
            whose statistics have not been measured.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    if batch_statistics:
        for layer in batch_norm_layers(network).values():
            layer.training = not layer.track_running_stats
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def batch_moments(network: nn.Module, batches: Iterable[Tensor]) -> BatchMoments:
    """Pass all batches through the network.

    Return the moments of every batch, in order, by batch-norm layer.

    A layer that the network uses several times has several moments for a batch.

    Args:
        network: The network; it is not changed.
        batches: Images in the network's input format.

    Raises:
        ValueError: A batch has only one value per channel at a layer.
    """
    layers = batch_norm_layers(network)
    measured: BatchMoments = {name: [] for name in layers}
    if not layers:
        return measured
    values: Values = []

    def measure(inputs: dict[str, Tensor], number: int | Tensor) -> Values:
        values.clear()
        network(inputs["images"])
        return [*values]

    recorded = Recorded(measure, "the pass that measures batch norm")
    with evaluating(network):
        for name, layer in layers.items():
            normalise = partial(_normalise, layer, name, values)
            layer.forward = normalise  # type: ignore[method-assign]
        try:
            for number, images in enumerate(batches):
                for both, name, count in recorded({"images": images}, number):
                    measured[name].append(Moments(int(count), *both))
        finally:
            for layer in layers.values():
                del layer.forward
    return measured


def _normalise(layer: _BatchNorm, name: str, measured: Values, x: Tensor) -> Tensor:
    """A batch-norm layer's forward pass of training, which appends the batch's mean and variance to
    ``measured``.
    """
    count = x.numel() // x.shape[1]
    if count < 2:
        raise ValueError(
            f"A batch leaves one value per channel at the batch-norm layer {name!r}, which has no "
            "variance. Measure with batches of two samples or more (add a last single one to the "
            "batch before it), or use norm: group."
        )
    like = x if layer.weight is None else layer.weight
    mean = like.new_zeros(x.shape[1])
    variance = like.new_zeros(x.shape[1])
    # momentum 1 makes the kernel write the batch's own mean and unbiased variance: no second pass
    # over x.
    out = F.batch_norm(
        x, mean, variance, layer.weight, layer.bias, training=True, momentum=1.0, eps=layer.eps
    )
    measured.append((torch.stack([mean, variance]), name, count))
    return out


def _combine(parts: Sequence[Moments]) -> Moments:
    """The moments of all values together, in two passes to avoid cancellation."""
    means, variances = _stacked(parts)
    numbers = [part.count for part in parts]
    total = sum(numbers)
    counts = torch.tensor(numbers, dtype=means.dtype).to(means.device, non_blocking=True)[:, None]
    mean = (counts * means).sum(0) / total
    squares = ((counts - 1) * variances + counts * (means - mean) ** 2).sum(0)
    return Moments(total, mean, squares / (total - 1))


def _stacked(parts: Sequence[Moments]) -> tuple[Tensor, Tensor]:
    """The means and the variances, ``(parts, channels)`` each, in float64."""
    wide = torch.float32 if parts[0].mean.device.type == "mps" else torch.float64  # Apple has none
    means = torch.stack([part.mean for part in parts]).to(wide)
    return means, torch.stack([part.variance for part in parts]).to(wide)
