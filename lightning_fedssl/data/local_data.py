"""The data of one party in one round, on which an algorithm trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from numpy.random import Generator
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.class_shares import SiteShares

CHUNK = 512
"""The number of images augmented in one call on a CPU: few calls, but small enough for its
cache."""

DEVICE_CHUNK = 8192
"""The same on a GPU, where a call costs as much for few images: a client's whole round."""

CHUNK_BYTES = 64 << 20
"""The largest size of the float32 views of one call; images of 224 x 224 pixels are augmented 111
at a time."""

ViewFunction = Callable[[Tensor, Tensor], Tensor]
"""A batched view: uint8 images ``(n, channels, height, width)`` and keys ``(n,)`` to normalised
float32 images."""


@dataclass(frozen=True)
class Views:
    """The views of images that methods use.

    Attributes:
        plain: Normalised only; what evaluation and statistics passes use.
        weak: The data set's weak augmentation (alpha in the papers), normalised.
        strong: The strong augmentation (A in the papers), normalised.
        enlargement: Numbers of a view for each number of the image.
        target: Moves targets of pixels ``(n, height, width)`` as the weak view with the same keys
            moves their images; None where views move no target.
    """

    plain: ViewFunction
    weak: ViewFunction
    strong: ViewFunction
    enlargement: float = 1
    target: ViewFunction | None = None


class Span(NamedTuple):
    """A part of one epoch: its number from 0, the place of the first image in it, and the number of
    images.
    """

    epoch: int
    start: int
    length: int


@dataclass(frozen=True)
class Visits:
    """Where images are visited: the epochs, and the places in each, on which their random numbers
    depend.

    Attributes:
        spans: The parts of one or several epochs, in the order of the images.
    """

    spans: tuple[Span, ...]

    def select(self, of_epoch: Callable[[int], Tensor]) -> Tensor:
        """The values of the visited places, ``(images, ...)``.

        Args:
            of_epoch: Returns one value for each place of an epoch.
        """
        parts = []
        for epoch, start, length in self.spans:
            parts.append(of_epoch(epoch)[start : start + length])
        return _joined(parts)


@dataclass(frozen=True)
class LocalData:
    """The data of one party (a client or the server) in one round.

    It holds no true label of an unlabelled image, so a method cannot use one by mistake.

    Attributes:
        party: The client's number, or :data:`lightning_fedssl.sampling.SERVER`.
        round: The round, from 1.
        seed: The run's seed.
        images: All training images of the run, uint8 ``(N, channels, height, width)``; shared, on
            the device.
        labeled: Indices of this party's labelled images, ``(labelled,)``.
        labels: Their labels, ``(labelled,)``, or targets of another task, ``(labelled, ...)``.
        unlabeled: Indices of this party's unlabelled images, ``(unlabelled,)``.
        batch_size: Images per local step.
        views: The views of the data set.
        dtype: The floating type that views are returned in.
        shares: How frequent the classes are among its unlabelled images, if it has stated it
            (``data.class_shares``).
    """

    party: int
    round: int
    seed: int
    images: Tensor
    labeled: Tensor
    labels: Tensor
    unlabeled: Tensor
    batch_size: int
    views: Views
    dtype: torch.dtype = torch.float32
    shares: SiteShares | None = None

    @property
    def chunk(self) -> int:
        """The number of images whose views are computed in one call; views do not depend on it."""
        image = 4 * self.images.shape[1:].numel() * self.views.enlargement
        limit = CHUNK if self.images.device.type == "cpu" else DEVICE_CHUNK
        return max(1, min(limit, int(CHUNK_BYTES // image)))

    def rng(self, purpose: str, *more: int) -> Generator:
        """This party's host random stream of this round for one purpose."""
        return sampling.rng(self.seed, purpose, self.round, self.party, *more)

    def permutation(self, count: int, purpose: str, *more: int) -> Tensor:
        """A random order of ``count`` items, ``(count,)`` int64, on the images' device."""
        order = sampling.permutation(count, self.seed, purpose, self.round, self.party, *more)
        return order.to(self.images.device, non_blocking=True)

    def plain(self, indices: Tensor) -> Tensor:
        """Normalised images: ``(n, channels, height, width)``."""
        return self.views.plain(self.images.index_select(0, indices), indices[:0]).to(self.dtype)

    def weak(
        self,
        indices: Tensor,
        purpose: str,
        *more: int,
        start: int = 0,
        visits: Visits | None = None,
    ) -> Tensor:
        """Weakly augmented images; the draws are a function of (seed, round, party, purpose,
        place).

        Args:
            indices: ``(n,)``.
            purpose: What the views are for; two purposes draw independently.
            more: Further parts of the key, such as the epoch.
            start: Place of the first image in its epoch.
            visits: Epochs and places of the images, instead of an epoch in ``more`` and of
                ``start``.
        """
        return self._view(self.views.weak, indices, (purpose, *more), start, visits)

    def strong(
        self,
        indices: Tensor,
        purpose: str,
        *more: int,
        start: int = 0,
        visits: Visits | None = None,
    ) -> Tensor:
        """Strongly augmented images; draws as in :meth:`weak`.

        Where pixels have targets, the strong view ``strong`` of an image has the geometry of its
        view ``weak``, so that labels of one fit the other.
        """
        if self.views.target is not None and purpose == "strong":
            purpose = "weak"
        return self._view(self.views.strong, indices, (purpose, *more), start, visits)

    def target(
        self, targets: Tensor, purpose: str, start: int = 0, visits: Visits | None = None
    ) -> Tensor:
        """Targets of views: of pixels as the view of the same purpose, place and epoch moves its
        image, others as they are.

        Args:
            targets: ``(n, ...)``.
            purpose: That of the view.
            start: Place of the first image in its epoch.
            visits: Epochs and places.
        """
        if self.views.target is None:
            return targets
        return self.views.target(targets, self._view_keys((purpose,), start, len(targets), visits))

    def _view(
        self,
        view: ViewFunction,
        indices: Tensor,
        purpose: tuple[str | int, ...],
        start: int,
        visits: Visits | None,
    ) -> Tensor:
        if view is self.views.plain:  # no augmentation, so no random numbers
            return self.plain(indices)
        keys = self._view_keys(purpose, start, len(indices), visits)
        return view(self.images.index_select(0, indices), keys).to(self.dtype)

    def _view_keys(
        self, purpose: tuple[str | int, ...], start: int, count: int, visits: Visits | None
    ) -> Tensor:
        if visits is None:
            return self._keys(purpose, start, count)
        parts = []
        for epoch, first, length in visits.spans:
            parts.append(self._keys((*purpose, epoch), first, length))
        return _joined(parts)

    def _keys(self, purpose: tuple[str | int, ...], start: int, count: int) -> Tensor:
        name, *further = purpose
        key = sampling.derive_key(self.seed, name, self.round, self.party, *further)
        return sampling.sample_keys(key, count, self.images.device, start)


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts in one tensor; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def own_random_stream(data: LocalData, purpose: str = "network", *more: int) -> Iterator[None]:
    """Seed torch's generators for one party, round and purpose; restore them at the end.

    Args:
        data: The party's data.
        purpose: What draws random numbers.
        more: Further parts of the key, such as the step.
    """
    key = sampling.derive_key(data.seed, purpose, data.round, data.party, *more)
    generators = [torch.default_generator]
    if data.images.is_cuda:
        generators.append(torch.cuda.default_generators[data.images.device.index])
    states = []  # by hand: a tenth of fork_rng's time
    for generator in generators:
        states.append(generator.get_state())
        generator.manual_seed(key)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
