"""A step that returns no loss is refused by every local trainer, in one message that names class and shape."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.algorithm import JointStep
from lightning_fedssl.algorithms import FedAvg, SemiFL, SemiSFL
from lightning_fedssl.data import Dirichlet
from lightning_fedssl.local_training.engine import cuda_stack_size
from lightning_fedssl.models import MLP
from tests.algorithms.helpers import toy_semi_sfl
from tests.local_training.helpers import clients_of
from tests.toy import ToyData, assert_same, labeled_clients, sgd, toy, toy_semifl, toy_trainer, weights


class ByImage(FedAvg):
    """Returns the loss of each image."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")


class InList(FedAvg):
    """Returns the loss in a list."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return [super().training_step(batch, batch_idx)]


def small(method: type[FedAvg], **kwargs: Any) -> FedAvg:
    given: dict[str, Any] = {
        "network": partial(MLP, hidden=(8,)),
        "optimizer": sgd,
        "num_classes": 3,
        "in_shape": (1, 8, 8),
    }
    return method(**given | kwargs)


TRAINERS: dict[str, dict[str, Any]] = {
    "one after another": {"clients_at_once": 1},
    "stacked": {"clients_at_once": 3},
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("method", "found"), [(ByImage, "a tensor of shape (5,)"), (InList, "a list")])
def test_the_clients_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trainer: str, method: type[FedAvg], found: str
) -> None:
    """Without a warning about stacks before it."""
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="return the loss of the batch") as error:
        toy_trainer(tmp_path, logger=False, **TRAINERS[trainer]).fit(small(method), labeled_clients())
    assert str(error.value).startswith(f"{method.__name__}.training_step returned {found}: return the loss")
    assert "one after another" not in caplog.text


@pytest.mark.parametrize(
    ("batch_size", "side", "labels", "stacked"),
    [(64, 28, [80, 70], 10), (64, 32, [80, 70], 1), (4, 224, [20, 30], 1), (10, 32, [20, 9], 10)],
)
def test_auto_on_a_gpu_stacks_small_batches(batch_size: int, side: int, labels: list[int], stacked: int) -> None:
    images = torch.zeros(1, 3 if side > 28 else 1, side, side, dtype=torch.uint8)
    client, none = clients_of()[0], torch.empty(0, dtype=torch.int64)
    clients = [
        replace(client, images=images, batch_size=batch_size, labeled=torch.arange(n), unlabeled=none) for n in labels
    ]
    assert cuda_stack_size(clients) == stacked


class OfOneNumber(FedAvg):
    """A loss of one number in one dimension, which is accepted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"]), batch["y"])[None]


def test_one_number_may_have_a_dimension(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = []
    for at_once in (1, 3):
        trainer = toy_trainer(tmp_path, logger=False, clients_at_once=at_once, precision="64-true")
        trainer.fit(small(OfOneNumber), labeled_clients())
        losses.append(float(trainer.callback_metrics["client/loss"]))
    assert losses[0] == pytest.approx(losses[1])
    assert "one after another" not in caplog.text


class ServerByImage(SemiFL):
    def server_training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")


def test_the_server_s_loss(tmp_path: Path) -> None:
    algorithm = ServerByImage(**toy_semifl().hparams)
    with pytest.raises(ValueError, match=r"ServerByImage.server_training_step returned a tensor of shape \(\d,\)"):
        toy_trainer(tmp_path, logger=False).fit(algorithm, ToyData())


class NoStep(SemiSFL):
    def joint_training_step(self, features: Any, batch_idx: int) -> Any:
        return super().joint_training_step(features, batch_idx).loss


class OfEachImage(SemiSFL):
    def joint_training_step(self, features: Any, batch_idx: int) -> Any:
        found = super().joint_training_step(features, batch_idx)
        return JointStep(found.loss.expand(3), found.pseudo)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (NoStep, r"^NoStep.joint_training_step returned a tensor of shape \(\): return .*JointStep\(loss\)$"),
        (OfEachImage, r"^OfEachImage.joint_training_step returned a tensor of shape \(3,\): return the loss.*images$"),
    ],
)
def test_the_loss_of_split_learning(tmp_path: Path, method: type[SemiSFL], message: str) -> None:
    algorithm = method(**toy_semi_sfl().hparams)
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path, logger=False).fit(algorithm, ToyData())


class Normalized(torch.optim.SGD):
    """Divides a gradient by its norm, which for stacked weights would be that of all clients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad /= p.grad.norm() + 1e-9
        super().step()


def test_split_learning_stacks_no_clients_whose_optimizer_joins_weights(tmp_path: Path) -> None:
    results = []
    for at_once in (1, 3):
        algorithm = toy_semi_sfl(optimizer=partial(Normalized, lr=0.05))
        trainer = toy_trainer(tmp_path, logger=False, clients_at_once=at_once, max_rounds=1)
        trainer.fit(algorithm, ToyData())
        results.append(weights(algorithm))
    assert_same(*results)
    training, clients = trainer.run.local_training, range(6)
    assert training.refusal.startswith("the optimizer Normalized is not known")
    assert len(training.stacks(clients, torch.device("cpu"))) == 2  # as on ranks that know of no refusal


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "small and alike": (partial(small, FedAvg), {}),
    "too few": (partial(small, FedAvg), {"num_clients": 19}),
    "unlike": (partial(small, FedAvg), {"partition": Dirichlet(alpha=0.5, min_size=1)}),
    "convolutions": (partial(toy, FedAvg), {}),
    "large": (partial(small, FedAvg, network=partial(MLP, hidden=(2000,))), {}),
    "a method of one's own": (partial(small, type("Own", (FedAvg,), {})), {}),
    "another optimizer": (partial(small, FedAvg, optimizer=partial(Normalized, lr=0.05)), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_on_a_cpu_stacks_small_steps_of_many_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """With the result of one client after another: up to rounding where it stacks, and else with the same bits."""
    build, data = CASES[case]
    found = []
    for at_once in (1, "auto"):
        algorithm = build()
        given = {
            "clients_at_once": at_once,
            "clients_per_round": data.get("num_clients", 20),
            "max_rounds": 2,
            "precision": "64-true",
        }
        trainer = toy_trainer(tmp_path / str(at_once), logger=False, **given)
        with caplog.at_level(logging.WARNING):
            trainer.fit(algorithm, labeled_clients(**{"num_clients": 20} | data))
        found.append(torch.cat([t.flatten() for t in weights(algorithm).values()]))
    assert torch.equal(found[0], found[1]) == (case != "small and alike")
    assert torch.allclose(found[0], found[1], rtol=1e-10)
    assert "one after another" not in caplog.text


class NoUpdate(FedAvg):
    def on_client_end(self, update: Any) -> Any:
        super().on_client_end(update)


class NoWork(FedAvg):
    def on_client_start(self, data: Any) -> Any:
        super().on_client_start(data)


class SendsNetwork(FedAvg):
    def broadcast(self, client: int) -> Any:
        return self.network


class StoresNumber(FedAvg):
    def on_client_end(self, update: Any) -> Any:
        self.clients.put(update.client, "count", 3)  # type: ignore[arg-type]
        return update


class NoGradient(FedAvg):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(1.0)


class LogsVector(FedAvg):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("client/x", torch.ones(4))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (NoUpdate, "NoUpdate.on_client_end returned None: return the update"),
        (NoWork, "NoWork.on_client_start returned None: return a LocalWork"),
        (SendsNetwork, "SendsNetwork.broadcast returned a MLP: return tensors by name"),
        (StoresNumber, "clients.put(..., 'count', state): state is not a dict of tensors by name: 3"),
        (NoGradient, "NoGradient.training_step returned a loss that depends on no weight: compute it from the "),
        (
            LogsVector,
            "LogsVector.log: the value of client/x is a tensor of shape (4,): log one number, such as its mean",
        ),
    ],
)
def test_what_a_function_of_ones_own_method_returns(tmp_path: Path, method: type[FedAvg], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        toy_trainer(tmp_path, logger=False).fit(small(method), labeled_clients())


class NoSuper(FedAvg):
    def __init__(self) -> None:
        pass


def test_a_method_that_does_not_initialise_its_base_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^NoSuper.__init__ does not call super\(\).__init__"):
        toy_trainer(tmp_path, logger=False).fit(NoSuper(), labeled_clients())
