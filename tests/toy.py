"""Small federations for tests: tiny images of separable classes, and algorithms on models with two parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.functional.schedules import Cosine
from lightning_fedssl.models import CNN, NormKind
from lightning_fedssl.round import Round
from lightning_fedssl.state import Direction
from lightning_fedssl.task import MultiLabel, Regression, Segmentation, Task
from lightning_fedssl.trainer import FederatedTrainer

Method = TypeVar("Method", bound=FederatedAlgorithm)

SPEC = DatasetSpec("mnist", 3, (1, 8, 8), (0.5,), (0.25,), ("a", "b", "c"), measured=False)


def images_of(labels: Tensor, seed: int) -> Tensor:
    """Noise in which the class determines a bright quarter of the image, uint8 ``(n, 1, 8, 8)``."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (len(labels), 1, 8, 8), generator=generator)
    for k, (top, left) in enumerate(((0, 0), (0, 4), (4, 0))):
        images[labels == k, :, top : top + 4, left : left + 4] += 110
    return images.to(torch.uint8)


class ToyData(FederatedDataModule):
    """Images of 8 x 8 pixels in three classes: 120 for training and 60 for the test."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            **{"num_clients": 4, "num_labels": 12, "server_batch_size": 5, "client_batch_size": 5} | kwargs
        )
        self.spec = SPEC

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        train, test = torch.arange(120) % 3, torch.arange(60) % 3
        return SPEC, ImageSplit(images_of(train, 0), train), ImageSplit(images_of(test, 1), test)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def toy(method: type[Method], norm: NormKind = "group", **kwargs: Any) -> Method:
    """A method on a small CNN."""
    network = partial(CNN, width=4, norm=norm)
    given: dict[str, Any] = {"network": network, "optimizer": sgd, "num_classes": 3, "in_shape": (1, 8, 8)}
    return method(**given | kwargs)


def toy_semifl(kind: Any = SemiFL, **kwargs: Any) -> Any:
    """SemiFL, with a threshold so low that images get confident labels from the first round on."""
    given = {"schedule": Cosine(), "threshold": 0.4, "client_epochs": 1, "server_epochs": 2}
    return toy(kind, "static_batch", **given | kwargs)


def toy_trainer(tmp_path: Path, **kwargs: Any) -> FederatedTrainer:
    defaults: dict[str, Any] = {
        "max_rounds": 3,
        "clients_per_round": 3,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "default_root_dir": tmp_path,
    }
    return FederatedTrainer(**defaults | kwargs)


def forked(ranks: int) -> dict[str, Any]:
    """Settings of a trainer with several ranks: forked processes, which start at once as they import nothing."""
    return {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {}


def weights(algorithm: FederatedAlgorithm) -> dict[str, Tensor]:
    """A copy of the global model's weights and buffers."""
    return {name: t.clone() for name, t in algorithm.server.model().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Assert that two states are bitwise identical."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Transfers(FederatedCallback):
    """Records every upload and download: round, client, direction and bytes by tensor name."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str, dict[str, int]]] = []

    def on_transfer(self, trainer: Any, algorithm: Any, client: int, direction: Direction, sizes: Any) -> None:
        self.seen.append((trainer.round_index, client, direction, dict(sizes)))

    def bytes(self, round_index: int, client: int, direction: Direction) -> int:
        """The bytes of a client's uploads or downloads in a round."""
        wanted = (round_index, client, direction)
        return sum(sum(sizes.values()) for *where, sizes in self.seen if tuple(where) == wanted)


class Dies(FederatedCallback):
    """Ends its process without a word, as SIGKILL does, before, inside or after a round, or after the test."""

    def __init__(self, place: str, round_index: int) -> None:
        self.place, self.round_index = place, round_index

    def _at(self, place: str, round_index: int) -> None:
        if (place, round_index) == (self.place, self.round_index):
            os._exit(9)

    def on_train_start(self, trainer: Any, algorithm: Any) -> None:
        self._at("before", trainer.round_index + 1)

    def on_global_model(self, trainer: Any, algorithm: Any) -> None:
        self._at("inside", trainer.round_index)

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self._at("after", trainer.round_index - 1)

    def on_fit_end(self, trainer: Any, algorithm: Any) -> None:
        self._at("tested", trainer.round_index)


def dies(call: Callable[[], object]) -> None:
    """Call a function in a process that :class:`Dies` ends."""
    if (child := os.fork()) == 0:
        try:
            call()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def toy_round(index: int = 1, **values: Any) -> Round:
    """A round of 3 with 4 clients."""
    return replace(Round(index, max_rounds=3, num_clients=4, client_lr=0.05, cohort=[0]), **values)


class Line(nn.Module):
    """Two logits ``(w * mean(x), b)``: a model with two parameters."""

    def __init__(self, w: float = 0.5, b: float = 0.1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))
        self.b = nn.Parameter(torch.tensor([b]))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, 2)``."""
        mean = x.flatten(1).mean(1, keepdim=True)
        return torch.cat([self.w * mean, self.b.expand_as(mean)], dim=1)


def toy_fedavg(**kwargs: Any) -> FedAvg:
    return toy(FedAvg, **kwargs)


def labeled_clients(**kwargs: Any) -> ToyData:
    return ToyData(**{"num_labels": "all", "label_location": "clients"} | kwargs)


def evaluated(data: FederatedDataModule, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Plain views and labels of some test samples."""
    images, labels = zip(*data.evaluation_batches("test"), strict=True)
    return torch.cat(images)[rows], torch.cat(labels)[rows]


class Pixels(nn.Module):
    """Two convolutions: logits of every pixel."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1))
        self.norms = nn.Sequential(nn.GroupNorm(2, 8))
        self.classifier = nn.Conv2d(8, num_classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.norms(self.convs(x)).relu())
        return out


def data_of(task: Task, **kwargs: Any) -> FederatedDataModule:
    """Images with bright quarters: their numbers as labels, their places as masks, their count as a number."""
    quarters = (torch.arange(160)[:, None] // torch.tensor([1, 2, 4])) % 2  # all combinations of three quarters
    images = torch.randint(0, 120, (160, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(160, 8, 8, dtype=torch.int64)
    for k, (top, left) in enumerate(((0, 0), (0, 4), (4, 0))):
        masks[:, top : top + 4, left : left + 4] = quarters[:, k, None, None]
    images = (images + 110 * masks[:, None]).to(torch.uint8)
    targets = {MultiLabel: quarters, Segmentation: masks, Regression: quarters.sum(1).float()}.get(
        type(task), quarters[:, 0]
    )
    train, test = TensorDataset(images[:120], targets[:120]), TensorDataset(images[120:], targets[120:])
    settings: dict[str, Any] = {
        "weak": "crop", "strong": "digits", "num_labels": 24, "num_clients": 4, "validation": "test",
        "client_batch_size": 5, "server_batch_size": 6,
    }  # fmt: skip
    return FederatedDataModule.from_datasets(train, test, task=task, **settings | kwargs)


def network_of(task: Task) -> Any:
    return Pixels if task.per_pixel else partial(CNN, width=4, norm="group")


def toy_of(method: type[Method], task: Task, **kwargs: Any) -> Method:
    """A method for :func:`data_of` of the same task, on a network that fits its targets."""
    num_classes = {MultiLabel: 3, Regression: 1}.get(type(task), 2)
    given: dict[str, Any] = {"client_epochs": 1, "num_classes": num_classes, "in_shape": (1, 8, 8)}
    return method(network=network_of(task), optimizer=sgd, task=task, **given | kwargs)
