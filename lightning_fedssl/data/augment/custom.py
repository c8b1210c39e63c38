"""Views of your own, and views for signals and tables.

A view is a function ``view(x, keys)`` of a float batch ``(n, ...)`` and one 64-bit integer per
sample, ``(n,)``. If it draws random numbers from the keys only, it is the same in both local
trainers, on any number of ranks and after resuming. ``x`` holds images of 8 bits as 0..1 before the
normalisation, and all other values after it.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.augment.randaugment import POOLS
from lightning_fedssl.data.augment.views import STRONG, WEAK, TargetView, make_views
from lightning_fedssl.data.datasets import DatasetSpec
from lightning_fedssl.data.local_data import ViewFunction, Views


class BatchView:
    """Base class of this package's views; a configuration can give them by their bare names."""

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """The view of a float batch ``(n, ...)`` with ``keys`` ``(n,)``: the same shape."""
        raise NotImplementedError(f"{type(self).__name__} must override __call__")


class GaussianNoise(BatchView):
    """Adds Gaussian noise to every value (jitter).

    Args:
        std: Its standard deviation; 1 is the standard deviation of the training samples.
    """

    def __init__(self, std: float = 0.1) -> None:
        self.std = _from_0_to(math.inf, std, "std of GaussianNoise")

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Add noise to ``(n, ...)``, drawn from the keys ``(n,)``."""
        u, v = sampling.uniform(keys, 2 * x[0].numel()).to(x.dtype).chunk(2, dim=1)
        noise = (-2 * (1 - u).log()).sqrt() * (2 * math.pi * v).cos()  # Box and Muller, 1958
        return x + self.std * noise.view_as(x)


class Scaling(BatchView):
    """Multiplies every sample by a random factor, uniform between ``1 - by`` and ``1 + by``.

    Args:
        by: Largest change.
    """

    def __init__(self, by: float = 0.2) -> None:
        self.by = _from_0_to(math.inf, by, "by of Scaling")

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Scale ``(n, ...)``, one factor for each sample."""
        u = sampling.uniform(keys, 1).to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        return x * (1 + self.by * (2 * u - 1))


class TimeMask(BatchView):
    """Sets a random interval of every signal ``(channels, time)`` to 0, the mean, in all channels.

    Args:
        share: Length of the interval, as a fraction of the signal.
    """

    def __init__(self, share: float = 0.2) -> None:
        self.share = _from_0_to(1, share, "share of TimeMask")

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Mask ``(n, channels, time)``, one interval for each sample."""
        length = x.shape[-1]
        width = round(self.share * x.shape[-1])
        first = (sampling.uniform(keys, 1) * (length - width + 1)).long()
        time = torch.arange(length, device=x.device)
        hidden = (time >= first) & (time < first + width)
        return x.masked_fill(hidden.view(-1, *[1] * (x.ndim - 2), length), 0)


class FeatureMask(BatchView):
    """Sets every value to 0, its mean, with a given probability.

    Args:
        probability: Of each value, independently.
    """

    def __init__(self, probability: float = 0.2) -> None:
        self.probability = _from_0_to(1, probability, "probability of FeatureMask")

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Mask values of ``(n, ...)`` independently."""
        return x.masked_fill(
            (sampling.uniform(keys, x[0].numel()) < self.probability).view_as(x), 0
        )


class Compose(BatchView):
    """Views one after another, with independent draws.

    Args:
        views: In order.
    """

    def __init__(self, views: Sequence[BatchView | Callable[..., Tensor]]) -> None:
        self.views = list(map(adapt, views))

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Apply the views in order to ``(n, ...)``."""
        for number, view in enumerate(self.views):
            x = view(x, sampling.fold_in(keys, number))
        return x


class PerSample(BatchView):
    """A transform of one sample, such as torchvision's v2 transforms.

    Its random numbers are seeded by the key.

    It runs on the CPU, sample by sample: reproducible, and slower than a batched view. The
    generators of torch, NumPy and Python are restored afterwards.

    Args:
        transform: From a sample to a sample of the same shape.
    """

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        """Transform the samples of ``(n, ...)`` one after another."""
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            views = list(map(self._one, x.cpu(), keys.tolist()))
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])
        return torch.stack(views).to(x.device) if views else x

    def _one(self, sample: Tensor, key: int) -> Tensor:
        torch.default_generator.manual_seed(key)
        np.random.seed(key % 2**32)
        random.seed(key)
        return torch.as_tensor(self.transform(sample))


def _from_0_to(most: float, value: float, name: str) -> float:
    """The value, after a check that it is a finite number from 0 to ``most``."""
    if not (0 <= value <= most and math.isfinite(value)):
        raise ValueError(
            f"data.weak, data.strong: {name} is {value}: give a finite number from 0 to {most}"
        )
    return value


def adapt(view: Callable[..., Any]) -> ViewFunction:
    """Convert a function that ``data.weak`` accepts to a function of a batch and keys.

    Args:
        view: ``view(x, keys)``, a function of the batch alone, or a torchvision transform of one
            sample.
    """
    if isinstance(view, BatchView):
        return view
    if type(view).__module__.startswith("torchvision.transforms"):
        return PerSample(view)
    required = 0
    with suppress(ValueError):  # built-in functions have no signature
        for p in inspect.signature(view).parameters.values():
            positional = p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            required += positional and p.default is p.empty
    return view if required >= 2 else lambda x, keys: view(x)


class _CustomView:
    """A user's view between the scaling of the stored values and the normalisation."""

    def __init__(
        self,
        view: Callable[..., Any],
        plain: ViewFunction,
        spec: DatasetSpec,
        role: int,
        dtype: torch.dtype,
    ) -> None:
        self.view = adapt(view)
        self.plain = plain
        self.pixels = spec.pixels
        self.role = role
        self.dtype = dtype

    def __call__(self, values: Tensor, keys: Tensor) -> Tensor:
        # Weak and strong views with the same keys are independent.
        keys = sampling.fold_in(keys, self.role)
        if not self.pixels:
            return self.view(self.plain(values, keys), keys)
        # The normalisation takes pixels from 0 to 255.
        return self.plain(255 * self.view(values.to(self.dtype) / 255, keys), keys)


def views_of(
    spec: DatasetSpec,
    weak: Any,
    strong: Any,
    dtype: torch.dtype = torch.float32,
    per_pixel: bool = False,
) -> Views:
    """The views of a data set; see :func:`~lightning_fedssl.data.augment.views.make_views` for the
    named ones.

    Args:
        spec: The data set.
        weak: A name or a function.
        strong: A name or a function; ``none`` is the weak view.
        dtype: The type in which views and normalisation compute.
        per_pixel: Whether every pixel has a target.

    Raises:
        ValueError: If a name does not fit the data; the message names both keys.
    """
    names = [view for view in (weak, strong) if isinstance(view, str) and view != "none"]
    if "auto" in names and not (spec.usual_views and spec.pixels):
        raise ValueError(
            f"data.weak is {weak} and data.strong {strong}, but {spec.name} has no usual views: "
            f"give both, for 8-bit images by name (weak: {', '.join(WEAK[1:])}; strong: "
            f"{', '.join(STRONG[1:])}), else none, GaussianNoise, Scaling, TimeMask, FeatureMask, "
            "Compose or a function of your own"
        )
    if (names and not spec.pixels) or (set(names) & set(POOLS) and spec.in_shape[0] not in (1, 3)):
        raise ValueError(
            f"data.weak, data.strong: {', '.join(names)} are views of 8-bit images of 1 or 3 "
            f"channels, and samples are {spec.in_shape}; give none, a shipped view (GaussianNoise, "
            "Scaling, TimeMask, FeatureMask) or a function"
        )
    moves = not isinstance(strong, str) and weak != "none"
    if per_pixel and (moves or not isinstance(weak, str)):
        raise ValueError(
            "data.weak: with a target for every pixel give flip_crop, crop or none, which move "
            "image and target alike, and none together with a function as data.strong"
        )
    if isinstance(weak, str) and isinstance(strong, str):
        return make_views(spec, weak, strong, dtype=dtype, per_pixel=per_pixel)
    if strong in names:
        raise ValueError(
            f"data.strong: {strong} follows a named weak view; with a function as data.weak, give "
            "one too"
        )
    named = make_views(spec, weak if isinstance(weak, str) else "none", "none", dtype=dtype)
    weak_view = named.weak
    if not isinstance(weak, str):
        weak_view = _CustomView(weak, named.plain, spec, 0, dtype)
    strong_view = weak_view
    if not isinstance(strong, str):
        strong_view = _CustomView(strong, named.plain, spec, 1, dtype)
    still = TargetView([]) if per_pixel else None  # a function changes colours alone
    return Views(named.plain, weak_view, strong_view, target=still)


def check_still(view: ViewFunction, spec: DatasetSpec) -> None:
    """Refuse a strong view that moves pixels, whose targets it cannot move.

    Images of two values in a random pattern must keep it: colours may change, and become their
    opposites.

    Args:
        view: The view.
        spec: Of the images.

    Raises:
        ValueError: With the remedy.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_TRIED, 1, *spec.in_shape[1:])
    pattern = torch.rand(shape, generator=generator).round().expand(_TRIED, *spec.in_shape)
    values = (50 + 115 * pattern).byte() if spec.pixels else pattern
    with torch.random.fork_rng(devices=[]):
        seen = view(values, sampling.sample_keys(sampling.derive_key(0, "moved"), _TRIED))
    pairs = zip(pattern.mean(dim=1).flatten(1), seen.mean(dim=1).flatten(1), strict=True)
    likeness = [float(torch.corrcoef(torch.stack(pair))[0, 1].abs()) for pair in pairs]
    if min(likeness) < _LEAST_LIKENESS:  # not of one colour, whose likeness is NaN
        raise ValueError(
            "data.strong: with a target for every pixel the strong view changes colours and moves "
            "nothing; weak: flip_crop or crop moves image and target alike"
        )


_TRIED = 16
"""Images on which a view is tried."""

_LEAST_LIKENESS = 0.1
"""The correlation of an image with its pattern that no blur or noise of use goes below."""


def check_view(view: ViewFunction, values: Tensor, key: str) -> None:
    """Refuse a view that changes the shape, is not finite, or depends on more than each sample and
    its key.

    Args:
        view: The view.
        values: A few stored samples.
        key: ``data.weak`` or ``data.strong``, for the message.

    Raises:
        ValueError: With the key and the remedy.
    """
    keys = sampling.sample_keys(sampling.derive_key(0, "trial of a view"), len(values))
    with torch.random.fork_rng(devices=[]):
        first = view(values, keys)
        second = view(values, keys)
        alone = view(values[:1], keys[:1])
    if first.shape != values.shape or not first.is_floating_point() or not first.isfinite().all():
        raise ValueError(
            f"{key}: the view of {tuple(values.shape)} is {tuple(first.shape)} {first.dtype}, or "
            "not finite; give finite floating numbers of the same shape"
        )
    if not (torch.equal(first, second) and torch.allclose(first[:1], alone, atol=1e-4)):
        raise ValueError(
            f"{key}: the view of a sample depends on more than the sample and its key, such as a "
            "global generator or its batch; draw from the keys, or wrap it in PerSample"
        )
