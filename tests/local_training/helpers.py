"""A small federation that trains its clients sequentially or stacked, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.data.augment.views import make_views
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.optimizers import build_optimizer
from lightning_fedssl.local_training import LocalTraining, sequential, vectorized
from lightning_fedssl.local_training.sequential import ClientPhase
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.metrics.rounds import MetricCollector
from lightning_fedssl.models import CNN, MLP, ResNet9, WideResNet
from lightning_fedssl.state import ClientUpdate, ServerState
from tests.toy import SPEC, images_of, toy_round

SIZES = (23, 40, 0, 4, 14)
"""Images per client; in batches of 5: 5 steps (the last of 3 images), 8, none, 1 (of 4) and 3 (the last of 4)."""

LABELS = torch.arange(120) % 3
IMAGES = images_of(LABELS, 0)
VIEWS = make_views(SPEC, weak="flip_crop", strong="digits")
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


class LargeResNet9(ResNet9):
    """On images of twice the size: group norm over two values, as on 8 x 8 images, is a sign and chaotic."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, scale_factor=2))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn sbn": partial(CNN, width=4, norm="static_batch"),
    "cnn bn": partial(CNN, width=4, norm="batch"),
    "wrn sbn": partial(WideResNet, depth=10, widen_factor=1, norm="static_batch"),
    "resnet9 gn": partial(LargeResNet9, width=8, norm="group"),
    "mlp": partial(MLP, hidden=(20,)),
}


def clients_of(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float64, round_: int = 1) -> list[LocalData]:
    """Clients with images of their own, labelled or not as a method likes to see them."""
    parts = torch.arange(sum(sizes)).split(list(sizes))
    return [
        LocalData(party, round_, 0, IMAGES, rows, LABELS[rows], rows, 5, VIEWS, dtype)
        for party, rows in enumerate(parts)
    ]


def make(method: type[FederatedAlgorithm] = FedAvg, network: str = "cnn sbn", **kwargs: Any) -> FederatedAlgorithm:
    defaults: dict[str, Any] = {
        "network": NETWORKS[network],
        "optimizer": SGD,
        "client_epochs": 3,
        "gradient_clip_norm": 0.5,
        "num_classes": 3,
        "in_shape": (1, 8, 8),
    }
    if issubclass(method, SemiFL):
        method, defaults = Semi, defaults | {"threshold": 0.0}
    return method(**defaults | kwargs)


class Semi(SemiFL):
    """SemiFL in which a client without images skips the round."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        return super().on_client_start(data) if len(data.unlabeled) else LocalWork(0, 0, lambda step: {})


@dataclass
class Result:
    """The result of a local trainer in a round."""

    updates: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    work: list[tuple[int, int, int]] = field(default_factory=list)
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    started: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)
    ended: list[tuple[int, dict[str, int]]] = field(default_factory=list)

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: Any) -> None:
        self.started.append((data.party, work.num_steps, sizes))

    def client_ended(self, update: ClientUpdate) -> None:
        self.ended.append((update.client, update.sizes()))


class Federation:
    """An algorithm with its global model and optimizer, ready to train clients with either engine."""

    def __init__(self, algorithm: FederatedAlgorithm, dtype: torch.dtype = torch.float64) -> None:
        self.algorithm = algorithm
        algorithm.configure_model()
        algorithm.to(dtype)
        algorithm.server = ServerState.from_module(algorithm)
        algorithm.current_round = toy_round()
        self.fabric = Fabric(accelerator="cpu", precision="64-true" if dtype == torch.float64 else "32-true")
        parameters = [p for p in algorithm.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(algorithm.optimizer, parameters, "model.optimizer")

    def phase(
        self, observer: Result, max_steps: int | None = None, batch_ended: Callable[[int], object] | None = None
    ) -> ClientPhase:
        return ClientPhase(self.algorithm, self.optimizer, self.fabric, observer, max_steps, batch_ended=batch_ended)

    def train(
        self,
        clients: Sequence[LocalData],
        at_once: int = 1,
        max_steps: int | None = None,
        training: LocalTraining | None = None,
        batch_ended: Callable[[int], object] | None = None,
    ) -> Result:
        """A round of sequential or stacked training, or as ``training`` chooses."""
        result, log = Result(), MetricCollector()
        self.algorithm.logged.clear()
        phase = self.phase(result, max_steps, batch_ended)
        if training is not None:
            updates = training.train_clients(phase, [clients])
        elif at_once == 1:
            updates = sequential.train_clients(phase, clients)
        else:
            stacks = sampling.equal_parts(clients, at_once)
            updates = chain.from_iterable(vectorized.train_clients(phase, stack) for stack in stacks)
        for update in updates:
            tensors = {**update.parameters, **update.buffers, **update.payload}
            result.updates[update.client] = {name: t.clone() for name, t in tensors.items()}
            result.work.append((update.client, update.num_samples, update.num_steps))
            self.algorithm.clients.commit(update.client)
        result.kept = self.algorithm.clients.state_dict()
        for name, value, weight, _ in self.algorithm.logged:
            log.update(name, value, weight)
        result.logs = log.compute(lambda own: [own])
        return result


def both(
    build: Callable[[], FederatedAlgorithm], clients: Sequence[LocalData] | None = None, at_once: int = 5
) -> tuple[Result, Result]:
    """A round by the sequential engine and one by the vectorised engine."""
    clients = clients_of() if clients is None else clients
    return Federation(build()).train(clients), Federation(build()).train(clients, at_once)


def distance(a: dict[int, dict[str, Tensor]], b: dict[int, dict[str, Tensor]]) -> float:
    """The largest difference of two numbers."""
    assert a.keys() == b.keys()
    largest = 0.0
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name in a[key]:
            assert a[key][name].shape == b[key][name].shape
            assert a[key][name].dtype == b[key][name].dtype
            largest = max(largest, float((a[key][name] - b[key][name]).abs().max()))
    return largest


def assert_agree(a: Result, b: Result, tolerance: float = 1e-10) -> None:
    assert distance(a.updates, b.updates) < tolerance
    assert distance(a.kept, b.kept) < tolerance
    assert (a.work, a.started, a.ended) == (b.work, b.started, b.ended)
    assert a.logs.keys() == b.logs.keys()
    assert a.logs == pytest.approx(b.logs, rel=1e-9)


WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
"""Operations whose result the host reads, or whose size depends on values."""


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for a device: numbers, conditions and sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in WAITING, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))
