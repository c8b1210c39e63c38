"""Server and clients of two domains: a data set, and the partition that keeps them apart.

In a checkout: ``lightning-fedssl compare domains.yaml --data.dataset.init_args.root data``. The
server's labels are of one data set or camera; the clients' images, and the test images, of another.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl import DataSource, LoadedData
from lightning_fedssl.data import datasets
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.partition.base import Iid, Partition
from lightning_fedssl.data.partition.federated_split import (
    ClientIndices,
    FederatedSplit,
    SplitRequest,
)
from lightning_fedssl.data.sources.base import measure


class TwoDomains(DataSource):
    """The first training images for the server, then those of the clients, who also own the test.

    Args:
        server: The data set of the server's images: ``cifar10``, ``mnist`` ...
        clients: The data set of the clients' images, with the same classes. If it is the server's,
            the clients have the images that follow.
        camera: Whether the clients have another camera (:func:`another_camera`).
        root: The data folder.
        server_images: Images that the server's labels are drawn from.
        client_images: Images of the clients, at most.
        test_images: Test images, at most.
    """

    def __init__(
        self,
        server: str = "cifar10",
        clients: str = "cifar10",
        camera: bool = False,
        root: str = "data",
        server_images: int = 300,
        client_images: int = 1500,
        test_images: int = 1000,
    ) -> None:
        self.server, self.clients, self.camera, self.root = server, clients, camera, root
        self.counts = (server_images, client_images, test_images)

    def describe(self) -> DatasetSpec:
        """The clients' data set."""
        return datasets.SPECS[datasets.canonical_name(self.clients)]

    def load(self) -> LoadedData:
        """Reads both data sets; the server's images get the size of the clients'."""
        own, wanted, tested = self.counts
        _, first, _ = datasets.load(self.server, self.root)
        spec, others, test = datasets.load(self.clients, self.root)
        skipped = own if self.server == self.clients else 0
        images = [others.images[skipped : skipped + wanted], test.images[:tested]]
        if self.camera:
            images = [another_camera(part) for part in images]
        server = _resized(first.images[:own], spec.in_shape[1])
        labels = [first.labels[:own], others.labels[skipped : skipped + wanted]]
        train = ImageSplit(torch.cat([server, images[0]]), torch.cat(labels))
        mean, std = measure(train.images)
        return LoadedData(
            replace(spec, mean=mean, std=std), train, ImageSplit(images[1], test.labels[:tested])
        )


class ClientsOfAnotherDomain(Partition):
    """The labels are drawn from the first images, the other images are the clients'.

    The first images without a label are no one's.

    Args:
        of: How the clients' images are divided.
        server_images: As of :class:`TwoDomains`.
        tail: The share that the last class keeps of its images, at server and clients; the shares
            of the classes before it fall geometrically from 1.
    """

    def __init__(self, of: Partition, server_images: int = 300, tail: float = 1.0) -> None:
        self.of, self.server_images, self.tail = of, server_images, tail

    def split(self, request: SplitRequest, generator: Generator) -> FederatedSplit:
        """Draws the labelled images, and divides the clients'; see the base class."""
        share = self.tail ** (request.labels.clamp_min(0) / (request.num_classes - 1))
        kept = torch.from_numpy(generator.random(len(share))) < share
        labels = request.labels.where(kept, -1)
        is_first = torch.arange(len(labels)) < self.server_images
        of_server = replace(request, labels=labels.where(is_first, -1), num_clients=1)
        server = Iid().split(of_server, generator).server_labeled
        pool = (~is_first & (labels >= 0)).nonzero().flatten()
        parts = self.of.assign(labels[pool], request.num_clients, request.num_classes, generator)
        clients = [ClientIndices(server[:0], pool[part].sort().values) for part in parts]
        return FederatedSplit(request.seed, server, clients)


def another_camera(images: Tensor) -> Tensor:
    """Pixels ``(n, 3, height, width)`` in warm light, dark and out of focus.

    A blur of 3 x 3 pixels, a gamma of 1.5, then gains of 1.2, 0.9 and 0.6 for red, green and blue.
    """
    x = F.avg_pool2d(F.pad(images / 255, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    x = x**1.5 * torch.tensor([1.2, 0.9, 0.6]).view(3, 1, 1)
    return (255 * x).clamp(0, 255).round().to(torch.uint8)


def _resized(images: Tensor, side: int) -> Tensor:
    x = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
    return x.clamp(0, 255).round().to(torch.uint8)
