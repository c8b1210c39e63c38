"""Features of a frozen backbone in place of samples: computed once, of several views each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lightning_fedssl import sampling
from lightning_fedssl.data.augment.views import Normalize
from lightning_fedssl.data.datasets import Moments, hash_of
from lightning_fedssl.data.local_data import ViewFunction, Views
from lightning_fedssl.storage.files import write_once

NUMBER_OF_VIEWS = 2
"""Weak views of a sample, and as many strong ones."""

_AT_ONCE = 64
"""Samples of which features are computed at a time."""

_PROBED = 16
"""Samples whose features tell whether a file in the cache is of this backbone and these views."""


@dataclass(frozen=True)
class FeatureExtractor:
    """Computes features of samples and of their views.

    Attributes:
        backbone: From a float batch ``(n, ...)`` to features ``(n, d)``.
        views: Of the samples, before the backbone.
        cache_dir: A folder for features; None: they are computed in every run.
    """

    backbone: Callable[[Tensor], Tensor]
    views: Views
    cache_dir: str | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of weak and of strong views: none of a view that another one equals."""
        views = self.views
        others = views.weak is not views.plain, views.strong not in (views.plain, views.weak)
        return NUMBER_OF_VIEWS * others[0], NUMBER_OF_VIEWS * others[1]

    def width(self, in_shape: tuple[int, ...], pixels: bool) -> int:
        """Number of features of a sample, from a trial with two black images.

        Args:
            in_shape: The shape of a sample.
            pixels: Whether samples are 8-bit pixels.

        Raises:
            ValueError: If the backbone does not take such samples, or gives no features.
        """
        black = torch.zeros(2, *in_shape, dtype=torch.uint8 if pixels else torch.float32)
        return self._features(self.views.plain, black, black[:0].long()).shape[1]

    def __call__(self, samples: Tensor, augmented: bool = False) -> Tensor:
        """Features ``(n, views, d)``: of the plain view, and of weak and strong ones.

        They depend on the samples and their order alone, not on the seed of the run.

        Args:
            samples: ``(n, ...)``, as they are stored.
            augmented: Whether to compute those of weak and strong views, too.
        """
        if self.cache_dir is None or not len(samples):
            return self._computed(samples, augmented)
        name = f"features_{self._name(samples, augmented)}"
        probe = samples[:_PROBED]
        expected = self._all_views(probe, sampling.sample_keys(0, len(probe)), augmented)
        for number in count():
            file = Path(self.cache_dir, f"{name}_{number}.npy")
            is_new = not file.exists()
            write_once(file, lambda new: np.save(new, self._computed(samples, augmented).numpy()))
            features = torch.from_numpy(np.load(file))
            first = features[:_PROBED]
            # Not in the name: last digits differ with the number of threads.
            tolerance = 1e-4 * float(expected.abs().max())
            same = expected.shape == first.shape and torch.allclose(
                expected, first, 1e-3, tolerance
            )
            if same or is_new:
                return features
        raise AssertionError("count() never ends")

    def _name(self, samples: Tensor, augmented: bool) -> str:
        """A hash of the samples, of the views of some of them, and of a backbone's weights."""
        probe = samples[:_PROBED]
        keys = sampling.sample_keys(0, len(probe))
        tensors = [samples]
        for view in (self.views.plain, self.views.weak, self.views.strong):
            tensors.append(view(probe, keys))
        if isinstance(self.backbone, torch.nn.Module):
            tensors += dict(sorted(self.backbone.state_dict().items())).values()
        return hash_of(tensors, repr((tuple(samples.shape), self.counts, augmented)))[:32]

    def _computed(self, samples: Tensor, augmented: bool) -> Tensor:
        keys = sampling.sample_keys(0, len(samples))
        parts = [*zip(samples.split(_AT_ONCE), keys.split(_AT_ONCE), strict=True)]
        features = []
        for part, of_part in tqdm(parts, "features", delay=1, leave=False, disable=None):
            features.append(self._all_views(part, of_part, augmented))
        return torch.cat(features)

    def _all_views(self, samples: Tensor, keys: Tensor, augmented: bool) -> Tensor:
        features = [self._features(self.views.plain, samples, keys[:0])]
        if augmented:
            for view, count in zip((self.views.weak, self.views.strong), self.counts, strict=True):
                for number in range(count):
                    features.append(self._features(view, samples, sampling.fold_in(keys, number)))
        return torch.stack(features, dim=1)

    def _features(self, view: ViewFunction, samples: Tensor, keys: Tensor) -> Tensor:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if isinstance(self.backbone, torch.nn.Module):
            self.backbone.to(device).eval()
        with torch.inference_mode():
            x = view(samples, keys).to(device)
            try:
                features = self.backbone(x)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a network raises
                raise ValueError(
                    f"data.backbone does not take samples {tuple(x.shape)}: {error!r}; choose "
                    "another one, or its arguments (such as size: 224), or see by "
                    "FEDSSL_TRACEBACK=1 where an error of your own is"
                ) from error
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(x):
            raise ValueError(
                "data.backbone must return a tensor (samples, features); it gave "
                f"{getattr(features, 'shape', type(features))}"
            )
        return features.float().cpu()


def views_of_features(moments: Moments, counts: tuple[int, int], dtype: torch.dtype) -> Views:
    """Views that draw one of the features of a sample.

    Args:
        moments: Mean and deviation by which each feature is shifted and scaled.
        counts: The numbers of weak and strong views.
        dtype: The floating type of the result.
    """
    scale = Normalize(*moments, dtype, scale=1, dimensions=1)

    def drawn(first: int, count: int, role: int) -> ViewFunction:
        def view(features: Tensor, keys: Tensor) -> Tensor:
            u = sampling.uniform(sampling.fold_in(keys, role), 1)[:, 0]
            column = first + (u * count).long()
            return scale(features[torch.arange(len(features), device=column.device), column])

        return view

    def plain(features: Tensor, keys: Tensor) -> Tensor:
        return scale(features[:, 0])

    weak = drawn(1, counts[0], 0) if counts[0] else plain
    strong = drawn(1 + counts[0], counts[1], 1) if counts[1] else weak
    return Views(plain, weak, strong, 1 / (1 + sum(counts)))
