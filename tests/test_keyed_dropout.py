"""Dropout by keys: the right distribution, the same masks in both engines, in any order and after resuming."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import keyed_dropout, sampling
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.keyed_dropout import KeyedDropout
from lightning_fedssl.local_training import LocalTraining
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN13, MLP
from lightning_fedssl.state import Batch
from tests.test_vectorized import Federation, assert_agree, both, chosen, clients_of, distance, make
from tests.toy import ToyData, assert_same, sgd, stand_in, toy_trainer, weights


class Dropping(nn.Module):
    """Every kind of dropout on the way, in place or not."""

    def __init__(self, num_classes: int = 3, in_shape: tuple[int, int, int] = (1, 8, 8)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.channels, self.values = nn.Dropout2d(0.3), nn.Dropout(0.5, inplace=True)
        self.classifier = nn.Linear(6 * 64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(self.conv(x)).relu()
        x = F.dropout1d(x.flatten(2), 0.2, self.training).unflatten(2, (8, 8))
        x = F.dropout3d(x.unsqueeze(2), 0.1, self.training).squeeze(2)
        logits: Tensor = self.classifier(self.values(x.flatten(1) * 1.0))
        return logits


class Enlarged(nn.Module):
    """A network that takes larger images."""

    def __init__(self, network: Any, side: int, num_classes: int = 3) -> None:
        super().__init__()
        self.side, self.network = side, network(num_classes=num_classes, in_shape=(1, side, side))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(F.interpolate(x, size=self.side))
        return logits


NETWORKS: dict[str, Any] = {
    "every kind": Dropping,
    "cnn13": partial(Enlarged, partial(CNN13, width=4), 12),
}


def built(network: str, method: Any = FedAvg, **kwargs: Any) -> Any:
    algorithm = make(method, client_epochs=2, **kwargs)
    algorithm.network_factory = NETWORKS[network]
    return algorithm


def key(number: int = 0) -> Tensor:
    return torch.tensor(sampling.derive_key(0, "test", number))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_values_are_dropped_with_their_probability_and_the_others_scaled(p: float) -> None:
    x = torch.ones(200, 500)
    with KeyedDropout(key()) as dropout:
        y = F.dropout(x, p)
    assert dropout.calls == 1
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    deviation = (p * (1 - p)) ** 0.5
    assert abs(float((~kept).double().mean()) - p) < 5 * deviation / 100_000**0.5
    for dim in (0, 1):  # neither rows nor columns hang together
        of_lines = (~kept).double().mean(dim)
        assert float((of_lines - p).abs().max()) < 6 * deviation / kept.shape[dim] ** 0.5
    both_dropped = (~kept[:, 1:] & ~kept[:, :-1]).double().mean()
    assert abs(float(both_dropped) - p * p) < 0.01


def test_limits_evaluation_and_bad_probabilities() -> None:
    x = torch.randn(4, 5)
    with KeyedDropout(key()) as dropout:
        assert F.dropout(x, 0.5, training=False) is x
        assert dropout.calls == 0
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(F.dropout(x, 1.0), torch.zeros(4, 5))
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)


@pytest.mark.parametrize(
    ("function", "shape", "mask_shape"),
    [
        (F.dropout1d, (40, 30, 5), (40, 30, 1)),
        (F.dropout1d, (30, 5), (30, 1)),
        (F.dropout2d, (40, 30, 5, 5), (40, 30, 1, 1)),
        (F.dropout2d, (40, 30, 5), (40, 30, 1)),
        (F.dropout3d, (40, 30, 2, 3, 4), (40, 30, 1, 1, 1)),
        (F.dropout3d, (30, 2, 3, 4), (30, 1, 1, 1)),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_channels_are_dropped_whole_as_torch_drops_them(function: Any, shape: Any, mask_shape: Any) -> None:
    x = torch.ones(shape)
    with KeyedDropout(key()):
        ours = function(x, 0.5)
    for dropped in (ours, function(x, 0.5)):
        first = dropped[tuple(slice(0, n) for n in mask_shape)]
        assert torch.equal(dropped, first.expand(shape))
        assert 0.2 < float((first == 0).double().mean()) < 0.8


def test_calls_steps_parties_and_rounds_draw_apart_and_a_call_again_draws_the_same() -> None:
    x = torch.ones(4, 50)
    clients = clients_of()
    keys = [
        sampling.fold_in(torch.tensor(keyed_dropout.key_of(data)), step)
        for data in (*clients[:2], *clients_of(round_=2)[:1])
        for step in (0, 1)
    ]
    masks = []
    for one in keys:
        with KeyedDropout(one):
            masks += [F.dropout(x, 0.5), F.dropout(x, 0.5)]
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks) == 12
    with KeyedDropout(keys[0]):
        assert torch.equal(F.dropout(x, 0.5), masks[0])


@pytest.mark.parametrize("method", [FedAvg, SemiFL])
@pytest.mark.parametrize("network", NETWORKS)
def test_each_client_drops_in_a_stack_what_it_drops_alone(network: str, method: Any) -> None:
    """Also with short batches in the middle, which pass apart, and clients that end before the others."""
    alone, together = both(lambda: built(network, method))
    assert_agree(alone, together)
    again = Federation(built(network, method)).train(clients_of()[::-1], 2)
    assert distance(alone.updates, again.updates) < 1e-10


def test_the_engine_takes_dropout_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    federation, training = Federation(built("every kind")), LocalTraining(3)
    result = chosen(training, federation)
    assert training._chosen == 3
    assert not caplog.records
    reference = Federation(built("every kind")).train(clients_of())
    assert distance(result.updates, reference.updates) < 1e-10


def test_a_network_without_dropout_pays_once() -> None:
    federation = Federation(make())
    federation.train(clients_of())
    assert keyed_dropout.known_without(federation.algorithm)
    step = federation.algorithm.training_step
    assert keyed_dropout.keyed(federation.algorithm, clients_of()[0], step) == step
    dropping = Federation(built("every kind"))
    dropping.train(clients_of())
    assert not keyed_dropout.known_without(dropping.algorithm)


class AlsoTheServer(FedAvg):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self(batch["x"]) + F.dropout(self(batch["x"])), batch["y"])


def test_a_run_is_the_same_with_either_engine_and_after_resuming(tmp_path: Path) -> None:
    """Server and clients train a network with dropout; torch's own state plays no part."""
    results: list[dict[str, Tensor]] = []
    for folder, at_once, rounds in (("a", 1, (3,)), ("b", 2, (3,)), ("c", 2, (1, 3))):
        for number, last in enumerate(rounds):
            torch.manual_seed(len(results) + number)
            algorithm = AlsoTheServer(
                network=Dropping, optimizer=sgd, server_epochs=1, num_classes=3, in_shape=(1, 8, 8)
            )
            trainer = toy_trainer(
                tmp_path / folder, max_rounds=last, clients_at_once=at_once, precision="64-true", logger=False
            )
            data = ToyData(num_labels="all", label_location="clients")
            trainer.fit(algorithm, data, ckpt_path="last" if number else None)
        results.append(weights(algorithm))
    assert distance({0: results[0]}, {0: results[1]}) < 1e-10
    assert_same(results[1], results[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_are_the_same_on_a_cuda_device() -> None:
    x = torch.ones(50, 70)
    with KeyedDropout(key()):
        here = F.dropout(x, 0.3)
    with KeyedDropout(key().cuda()):
        there = F.dropout(x.cuda(), 0.3)
    assert torch.equal(here, there.cpu())


class SkipsFirst(FedAvg):
    """Skips the first batch, and uses dropout without a layer."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 0 else F.cross_entropy(F.dropout(self(batch["x"])), batch["y"])


class Later(FedAvg):
    """Has a layer of dropout that it uses from the second round on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.drop = nn.Dropout()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        logits = self(batch["x"])
        return F.cross_entropy(self.drop(logits) if self.federation.round_index > 1 else logits, batch["y"])


class FromRoundTwo(FedAvg):
    """Uses dropout without a layer from the second round on."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        logits = self(batch["x"])
        return F.cross_entropy(F.dropout(logits) if self.federation.round_index > 1 else logits, batch["y"])


class BeforeTraining(FedAvg):
    """Computes with dropout before it trains, by a function of its own."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        return replace(super().on_client_start(data), payload={"z": halved(torch.ones(4, 4)).double()})


def halved(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


@pytest.mark.parametrize("method", [SkipsFirst, Later, FromRoundTwo, BeforeTraining])
def test_masks_do_not_depend_on_what_this_process_has_trained_before(method: Any) -> None:
    """A resumed run, or another rank, has not seen the steps without dropout."""
    results = []
    for rounds in ((1, 2), (2,)):
        torch.manual_seed(len(rounds))
        federation = Federation(make(method))
        for number in rounds:
            federation.algorithm.federation = stand_in(round_index=number)
            result = federation.train(clients_of(round_=number))
        results.append(result.updates)
    assert distance(*results) == 0


class AlwaysDrops(nn.Module):
    """Forgets to switch dropout off in evaluation mode."""

    def __init__(self, num_classes: int, in_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.classifier(x.flatten(1)))


def test_dropout_in_an_evaluation_does_not_depend_on_torch_s_state(tmp_path: Path) -> None:
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        algorithm = FedAvg(network=AlwaysDrops, num_classes=3, in_shape=(1, 8, 8))
        trainer = toy_trainer(tmp_path, max_rounds=1, logger=False)
        trainer.fit(algorithm, ToyData(num_labels="all", label_location="clients"))
        losses.append(float(trainer.callback_metrics["test/loss"]))
    assert losses[0] == losses[1]


def test_networks_that_drop_nothing_are_found_by_their_code() -> None:
    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return halved(x)

    class Has(nn.Module):
        dropout = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x * (1 - self.dropout)

    def known(module: nn.Module) -> bool:
        return keyed_dropout.known_without(nn.Sequential(module))

    networks = (Uses(), Has(), MLP(3, (6,)), MLP(3, (6,), dropout=0.1), CNN13(3, (1, 12, 12), dropout=0.0))
    assert [known(network) for network in networks] == [False, True, True, False, True]
