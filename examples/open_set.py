"""Unlabelled images of classes that the server does not know: a data set for it, and its metric.

In a checkout, for any of the package's data sets of images:

    lightning-fedssl fit --config fixmatch_digits.yaml --data.dataset examples.open_set.OpenSet
        --data.dataset.name digits --data.dataset.known 6
        --trainer.callbacks+=examples.open_set.KnownOrNot
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from lightning_fedssl import DataSource, LoadedData
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data import datasets
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.metrics.rounds import Metrics
    from lightning_fedssl.run import TrainerView


class OpenSet(DataSource):
    """A named data set of which only the first classes are known.

    Training images of the other classes have no label: they go to the clients, in equal parts,
    beside the unlabelled images of known classes. The network has an output for each known class.
    Test images are those of the known classes; the others are :attr:`unknown`.

    Args:
        name: ``digits``, ``mnist``, ``fashion_mnist``, ``cifar10`` ...
        root: The data folder.
        known: Number of known classes.

    Attributes:
        unknown: The test images of unknown classes, ``(n, channels, height, width)``.
    """

    unknown: Tensor

    def __init__(self, name: str = "digits", root: str = "data", known: int = 6) -> None:
        self.name, self.root, self.known = name, root, known

    def describe(self) -> DatasetSpec:
        """The known classes of the data set.

        Raises:
            ValueError: If fewer than two classes are known, or all.
        """
        spec = datasets.SPECS[datasets.canonical_name(self.name)]
        if not 2 <= self.known < spec.num_classes:
            raise ValueError(
                f"data.dataset: known of OpenSet is {self.known}: give 2 to {spec.num_classes - 1}"
            )
        names = spec.class_names[: self.known]
        return replace(spec, num_classes=self.known, class_names=names)

    def load(self) -> LoadedData:
        """Reads the data set, and hides the labels of its other classes."""
        _, train, test = datasets.load(self.name, self.root)
        is_known = test.labels < self.known
        self.unknown = test.images[~is_known]
        return LoadedData(
            self.describe(),
            replace(train, labels=torch.where(train.labels < self.known, train.labels, -1)),
            ImageSplit(test.images[is_known], test.labels[is_known]),
        )


class KnownOrNot(FederatedCallback):
    """Logs ``test/auroc_known``: how well the confidence tells known test images from unknown ones.

    It is the probability that an image of a known class has a larger greatest softmax probability
    than one of an unknown class (D. Hendrycks and K. Gimpel, ICLR 2017, arXiv 1610.02136); 0.5 is a
    blind guess. ``test/accuracy`` is that of the known classes.
    """

    def on_evaluation_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Add the metric to those of the test images."""
        data = trainer.datamodule
        if "test/accuracy" in metrics and isinstance(data.source, OpenSet):
            known = torch.cat([images for images, _ in data.evaluation_batches("test")])
            unknown = data.inputs.views().plain(
                data.source.unknown, torch.zeros(0, dtype=torch.int64)
            )
            sure = [_confidence(algorithm, images) for images in (known, unknown)]
            truth = torch.cat([torch.full((len(s),), 1 - i) for i, s in enumerate(sure)])
            metrics["test/auroc_known"] = float(binary_auroc(torch.cat(sure), truth))


@torch.no_grad()
def _confidence(algorithm: FederatedAlgorithm, images: Tensor) -> Tensor:
    """The greatest softmax probability of each image, ``(n,)``."""
    logits = torch.cat([algorithm(part.to(algorithm.device)) for part in images.split(500)])
    return torch.softmax(logits, dim=1).amax(dim=1).cpu()
