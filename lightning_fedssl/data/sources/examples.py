"""Two embedded examples that need no download: a table and generated signals."""

from __future__ import annotations

import importlib

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl.data.datasets import DatasetSpec, every_fifth
from lightning_fedssl.data.sources.base import DataSource, LoadedData, measure


class BreastCancer(DataSource):
    """scikit-learn's breast-cancer table: 569 rows of 30 features, two classes; nothing is
    downloaded.

    Of every class, each fifth row in the file's order is a test row, whatever the seed.
    """

    def load(self) -> LoadedData:
        """The rows as float32 ``(569, 30)``, in their two parts."""
        bunch = importlib.import_module("sklearn.datasets").load_breast_cancer()
        labels = torch.from_numpy(bunch.target).long()
        values = torch.from_numpy(bunch.data).float()
        return _loaded(values, labels, tuple(map(str, bunch.target_names)), "BreastCancer")


_LENGTH = 64
"""Values of a generated signal."""


class Signals(DataSource):
    """Generated signals of three classes, ``(1, 64)``: sine, square wave and sawtooth in noise.

    Frequency (2 to 5 periods) and phase are uniform draws for each signal; Gaussian noise is added.

    Args:
        count: Signals in all; of every class, each fifth is a test signal.
        noise: Standard deviation of the noise; the waves have amplitude 1.
        seed: Seed of the generator; it does not depend on the run's seed.
    """

    def __init__(self, count: int = 2000, noise: float = 0.5, seed: int = 0) -> None:
        self.count = count
        self.noise = noise
        self.seed = seed

    def load(self) -> LoadedData:
        """Generate the signals, float32 ``(count, 1, 64)``, in their two parts."""
        generator = np.random.default_rng(self.seed)
        labels = np.arange(self.count) % 3
        frequency = generator.uniform(2, 5, (self.count, 1))
        phase = generator.uniform(0, 1, (self.count, 1))
        turns = frequency * np.arange(_LENGTH) / _LENGTH + phase
        sine = np.sin(2 * np.pi * turns)
        waves = np.stack([sine, np.sign(sine), 2 * (turns % 1) - 1])
        values = waves[labels, np.arange(self.count)] + generator.normal(0, self.noise, turns.shape)
        names = ("sine", "square", "sawtooth")
        return _loaded(
            torch.from_numpy(values).float()[:, None], torch.from_numpy(labels), names, "Signals"
        )


def _loaded(values: Tensor, labels: Tensor, names: tuple[str, ...], name: str) -> LoadedData:
    train, test = every_fifth(values, labels)
    mean, std = measure(train.images)
    spec = DatasetSpec(
        name,
        len(names),
        tuple(values.shape[1:]),
        mean,
        std,
        names,
        pixels=False,
        usual_views=False,
        measured=False,
    )
    return LoadedData(spec, train, test)
