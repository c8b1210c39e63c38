"""How stored samples become inputs of the network: views of them, or of a backbone's features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_fedssl.data.augment.custom import check_still, check_view, views_of
from lightning_fedssl.data.datasets import DatasetSpec, Moments
from lightning_fedssl.data.features import FeatureExtractor, views_of_features
from lightning_fedssl.data.local_data import Views


@dataclass(frozen=True)
class Inputs:
    """What the network receives of a sample.

    Attributes:
        spec: The specification of the samples.
        weak: ``data.weak``.
        strong: ``data.strong``.
        normalize: ``data.normalize``.
        per_pixel: Whether every pixel has a target.
        backbone: ``data.backbone``; None if the network receives the samples.
        cache_dir: ``data.cache_dir``.
        moments: Mean and deviation of the backbone's features, once they are known.

    Raises:
        ValueError: If a name of a view does not fit the samples.
    """

    spec: DatasetSpec
    weak: Any
    strong: Any
    normalize: bool | dict[str, list[float]]
    per_pixel: bool
    backbone: Callable[[Tensor], Tensor] | None
    cache_dir: str | None
    moments: Moments | None = None
    _made: dict[torch.dtype, Views] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._views_of_samples()

    @property
    def of_samples(self) -> Moments:
        """Mean and deviation by channel by which stored samples are normalised.

        A backbone normalises pixels itself.
        """
        if isinstance(self.normalize, dict):
            return tuple(self.normalize["mean"]), tuple(self.normalize["std"])
        if self.normalize and not (self.spec.pixels and self.backbone is not None):
            return self.spec.mean, self.spec.std
        return _unchanged(self.spec.in_shape[0])

    @property
    def normalization(self) -> Moments:
        """Mean and deviation by which the network's inputs were normalised: samples, or features,
        for which they are known after ``setup`` of the data module.
        """
        if self.backbone is None:
            return self.of_samples
        if not self.normalize:
            return _unchanged(self.width)
        assert self.moments is not None
        return self.moments

    @cached_property
    def extractor(self) -> FeatureExtractor:
        """Computes the features of the backbone."""
        assert self.backbone is not None
        return FeatureExtractor(self.backbone, self._views_of_samples(), self.cache_dir)

    @cached_property
    def width(self) -> int:
        """The number of features of a sample."""
        return self.extractor.width(self.spec.in_shape, self.spec.pixels)

    def plain(self, samples: Tensor, dtype: torch.dtype) -> Tensor:
        """The plain view of some samples, or of their features."""
        no_keys = torch.zeros(0, dtype=torch.int64, device=samples.device)
        return self.views(dtype).plain(samples, no_keys).to(dtype)

    def views(self, dtype: torch.dtype = torch.float32) -> Views:
        """The views that compute in a floating type: 64-bit ones for 64-bit training, else 32-bit
        ones.
        """
        if dtype != torch.float64:
            dtype = torch.float32
        if dtype not in self._made:
            self._made[dtype] = (
                self._views_of_samples(dtype)
                if self.backbone is None
                else views_of_features(self.normalization, self.extractor.counts, dtype)
            )
        return self._made[dtype]

    def _views_of_samples(self, dtype: torch.dtype = torch.float32) -> Views:
        """The views of stored samples, before a backbone or a change of size."""
        mean, std = self.of_samples
        spec = replace(self.spec, mean=mean, std=std)
        return views_of(spec, self.weak, self.strong, dtype, self.per_pixel)

    def check(self, samples: Tensor) -> None:
        """Refuse views of the user's own that depend on more than a sample and its key.

        Args:
            samples: A few stored samples.

        Raises:
            ValueError: Names the key.
        """
        views = self._views_of_samples()
        for key in ("weak", "strong"):
            if not isinstance(getattr(self, key), str):
                check_view(getattr(views, key), samples, f"data.{key}")
        if self.per_pixel and not isinstance(self.strong, str):
            check_still(views.strong, self.spec)


def _unchanged(width: int) -> Moments:
    """Mean and deviation that change nothing."""
    return (0.0,) * width, (1.0,) * width
