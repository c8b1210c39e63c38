"""Runs of the methods' authors, replayed from numbers: see benchmarks/replays.md for what was compared, and how.

Every number in ``tests/algorithms/replays/*.json`` was measured with the authors' code; none of that code is here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import (
    FL2,
    SAGE,
    CBAFed,
    FedDB,
    FedMatch,
    FedRGD,
    ProxyFL,
    RSCFed,
    SemiFL,
    SemiSFL,
    fedmatch,
)
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.data import FullyLabeledClients, Partition
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.optimizers import half_momentum
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label
from lightning_fedssl.functional.schedules import Cosine, FractionalCosine
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN, MLP, ResNet9, WideResNet
from lightning_fedssl.state import Batch, ClientUpdate, ServerState
from tests.algorithms.helpers import momentum_of
from tests.algorithms.replay import (
    CLOSE,
    ComparedRounds,
    DataInRecordedOrder,
    Given,
    RecordedData,
    assert_close,
    drawn_rows,
    fingerprint,
    first_weights,
    images,
    recorded,
    strong,
    weak,
)
from tests.toy import toy_trainer


class ReplayedSemiFL(SemiFL):
    """SemiFL on recorded batches. The labels are its own; its own numbers of steps are compared with the recorded."""

    record: dict[str, Any]

    def label_images(self, data: LocalData) -> PseudoLabels:
        self.eval()
        with torch.no_grad():
            pseudo = pseudo_label(self(weak(data.plain(data.unlabeled))), self.threshold)
        theirs = self.record["rounds"][str(data.round)]["clients"][str(data.party)]
        order = torch.tensor(theirs["images"]).argsort()
        assert torch.tensor(theirs["images"])[order].tolist() == data.unlabeled.tolist()
        assert torch.tensor(theirs["labels"])[order].tolist() == pseudo.labels.tolist()
        confidence = torch.tensor(theirs["confidence"], dtype=torch.float64)[order]
        torch.testing.assert_close(pseudo.confidence, confidence, rtol=0, atol=1e-13)
        assert torch.equal(pseudo.mask, confidence >= self.threshold)
        return pseudo

    def on_client_start(self, data: LocalData) -> LocalWork:
        own = super().on_client_start(data)
        steps = self.record["rounds"][str(data.round)]["clients"][str(data.party)]["steps"]
        assert own.num_steps == len(steps)
        assert [len(batch["y_fix"]) for batch in own] == [len(step["fix"]) for step in steps]

        def batch(number: int) -> Batch:
            step = steps[number]
            fix, mix = (data.plain(torch.tensor(step[name])) for name in ("fix", "mix"))
            ratio = torch.tensor(step["ratio"], dtype=torch.float64).expand(len(fix))
            labels = {name: torch.tensor(step[name]) for name in ("y_fix", "y_mix")}
            return {"x_strong": strong(fix), "x_weak": weak(fix), "x_mix": weak(mix), "ratio": ratio, **labels}

        return LocalWork(own.num_samples, len(steps), batch, own.pseudo_labels)

    def on_server_start(self, data: LocalData) -> LocalWork:
        own, steps = super().on_server_start(data), self.record["rounds"][str(data.round)]["server"]
        assert own.num_steps == len(steps)

        def batch(number: int) -> Batch:
            rows = torch.tensor(steps[number]["x"])
            labels = images(11, 10).labels
            return {"x": data.plain(rows), "y": labels[rows]}

        return LocalWork(own.num_samples, len(steps), batch)


class Compared(FederatedCallback):
    """Compares every client's weights, and the global model's after aggregation and after fine-tuning."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.clients = 0

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]["clients"][str(update.client)]
        assert_close(update.parameters, theirs["weights"])
        self.clients += 1

    def on_server_phase_start(self, trainer: Any, algorithm: Any) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        assert_close(algorithm.server.parameters, theirs["aggregated"])

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        assert_close(algorithm.server.parameters, theirs["weights"])
        assert_close(algorithm.server.buffers, theirs["sbn"])
        assert metrics["lr"] == pytest.approx(theirs["lr"], rel=1e-14)
        assert 100 * metrics["val/accuracy"] == pytest.approx(theirs["accuracy"])
        assert metrics["val/loss"] == pytest.approx(theirs["loss"], rel=1e-12)


def test_semifl_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds in float64: labels, steps, every client's weights, aggregation, fine-tuning, sBN, rate, accuracy."""
    record = recorded("semifl")
    settings, rounds = record["settings"], record["rounds"]
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> WideResNet:
        built = WideResNet(num_classes, in_shape, depth=10, widen_factor=1, norm="static_batch").double()
        first_weights(built)
        return built

    algorithm = ReplayedSemiFL(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=Cosine(),
        threshold=settings["threshold"],
        client_epochs=settings["epochs"],
        server_epochs=settings["epochs"],
        gradient_clip_norm=1.0,
        aggregation_optimizer=half_momentum,
        client_weighting="uniform",
        keep_client_optimizer=True,
        keep_server_optimizer=True,
    )
    algorithm.record, compared = record, Compared(record)
    data = RecordedData(
        "cifar10", num_clients=settings["clients"], num_labels=settings["labels"], partition=Given(record),
        server_batch_size=10, client_batch_size=10, validation="test",
    )  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=settings["rounds"], clients_per_round=settings["clients_per_round"], logger=False,
        precision="64-true", callbacks=[StaticBatchNorm("pooled", batch_size=30), compared],
    )  # fmt: skip
    trainer.fit(algorithm, data)
    clients = [client for number in rounds.values() for client in number["clients"].values()]
    assert compared.clients == sum(bool(client["steps"]) for client in clients) > 0
    shares = [np.mean(np.array(client["confidence"]) >= settings["threshold"]) for client in clients]
    assert min(shares) < 0.5 < max(shares)  # both kinds of clients were compared: few and many confident images


def test_semifl_server_in_parallel_is_the_authors_code() -> None:
    """Five rounds of the step that joins server and clients with momentum; in the last no client trains."""
    record = recorded("semifl_parallel")
    layer = "network.classifier."
    draw, shapes = np.random.RandomState(5), {"weight": (3, 4), "bias": (3,)}

    def drawn() -> State:
        return {layer + name: torch.from_numpy(draw.standard_normal(shape)) for name, shape in shapes.items()}

    def moved(state: State, distance: float) -> State:
        return {name: state[name] + distance * change for name, change in drawn().items()}

    algorithm = SemiFL(
        network=partial(MLP, hidden=()),
        server_phase="parallel",
        pseudo_label_source="local",
        mix_weight=0.0,
        num_classes=3,
        in_shape=(1, 2, 2),
    )
    algorithm.configure_model()
    algorithm.double()
    algorithm.server = ServerState.from_module(algorithm)
    algorithm.server.update(drawn())
    for number, theirs in enumerate(record["rounds"], start=1):
        received = {name: t.clone() for name, t in algorithm.server.parameters.items()}
        idle = number == len(record["rounds"])
        trained = [received if idle else moved(received, 0.1) for _ in theirs["clients"]]
        sums = algorithm.accumulate(ClientUpdate(k, own, {}, 1, 1) for k, own in enumerate(trained))
        algorithm.server.update(moved(received, 0.3))
        algorithm.aggregate(sums)
        for ours, expected in (
            (algorithm.server.parameters, theirs["weights"]), (momentum_of(algorithm), theirs["momentum"])
        ):  # fmt: skip
            for name in shapes:
                there = torch.tensor(expected[f"layer.{name}"], dtype=torch.float64)
                torch.testing.assert_close(ours[layer + name], there, rtol=0, atol=1e-14)


class ReplayedFedRGD(FedRGD):
    """FedRGD on the recorded run's batches: 8 labelled images at a server, 6 of a user's 8 images."""

    def on_server_start(self, data: LocalData) -> LocalWork:
        own, labels = super().on_server_start(data), images(11, 10).labels
        replica, number = self.replica, data.round - self.replica  # a second phase has the next round's number

        def batch(step: int) -> Batch:
            rows = drawn_rows(100 + replica, number, step, data.labeled, 8)
            return {"x": weak(data.plain(rows)), "y": labels[rows]}

        return LocalWork(own.num_samples, own.num_steps, batch)

    def on_client_start(self, data: LocalData) -> LocalWork:
        own = super().on_client_start(data)

        def batch(step: int) -> Batch:
            x = data.plain(drawn_rows(data.party + 1, data.round, step, data.unlabeled, 6))
            return {"x_weak": weak(x), "x_strong": strong(x)}

        return LocalWork(own.num_samples, own.num_steps, batch)


class ComparedGroups(FederatedCallback):
    """Compares what every user trained, both servers' models, the group means and the average."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.users = 0
        self.mask_rates: list[float] = []

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        user = self.record["rounds"][str(trainer.round_index)]["users"][str(algorithm.slot_of[update.client])]
        assert fingerprint(update.parameters) == pytest.approx(user["weights"], abs=CLOSE, rel=CLOSE)
        buffers = {name: t for name, t in update.buffers.items() if t.is_floating_point()}
        assert fingerprint(buffers) == pytest.approx(user["buffers"], abs=CLOSE, rel=CLOSE)
        self.users += 1

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        names = list(algorithm.server.parameters)
        for ours, server in zip(algorithm._servers, theirs["servers"], strict=True):
            assert fingerprint({name: ours[name] for name in names}) == pytest.approx(server, abs=CLOSE, rel=CLOSE)
        for ours, group in zip(algorithm.group_means(), theirs["groups"], strict=True):
            assert fingerprint(ours) == pytest.approx(group, abs=CLOSE, rel=CLOSE)
        assert fingerprint(algorithm.server.parameters) == pytest.approx(theirs["average"], abs=CLOSE, rel=CLOSE)
        buffers = {name: t for name, t in algorithm.server.buffers.items() if t.is_floating_point()}
        assert fingerprint(buffers) == pytest.approx(theirs["buffers"], abs=CLOSE, rel=CLOSE)
        assert metrics["lr"] == pytest.approx(theirs["lr"], rel=1e-14)
        self.mask_rates.append(metrics["client/mask_rate"])


def test_fedrgd_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds of ten users in two groups: every user, both servers, the group means, the average, statistics."""
    record = recorded("fedrgd")
    rounds, steps = record["rounds"], record["settings"]["steps"]
    record |= {"labeled": list(range(20)), "split": [list(range(20 + 8 * user, 28 + 8 * user)) for user in range(10)]}
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> CNN:
        built = CNN(num_classes, in_shape, width=4, norm="batch").double()
        first_weights(built, linear=1.9)
        return built

    algorithm = ReplayedFedRGD(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        schedule=FractionalCosine(),
        groups=2,
        regroup="slots",
        server_replicas="per_group",
        local_steps=steps,
        threshold=0.95,
    )
    compared = ComparedGroups(record)
    data = RecordedData(
        "svhn", num_clients=10, num_labels=20, partition=Given(record), server_batch_size=8, client_batch_size=6,
        validation="test",
    )  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=len(rounds), clients_per_round=10, logger=False, precision="64-true", callbacks=[compared]
    )
    trainer.fit(algorithm, data)
    assert compared.users == 40
    assert compared.mask_rates[0] > 0.5 > compared.mask_rates[1] > 0  # many and few confident images were compared


class ValidatedData(RecordedData):
    """80 images to train, and 20 others to validate."""

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        every = images(11, 10)
        train, validation = (ImageSplit(every.images[p], every.labels[p]) for p in (slice(0, 80), slice(80, 100)))
        return self.spec, train, validation


class ReplayedFedMatch(FedMatch):
    """FedMatch on the recorded run's order, strong views and noise image; the batches are its own."""

    def on_server_start(self, data: LocalData) -> LocalWork:
        return super().on_server_start(_Fixed(**vars(data)))

    def on_client_start(self, data: LocalData) -> LocalWork:
        return super().on_client_start(_Fixed(**vars(data)))

    def probe(self) -> Tensor:
        noise = np.random.RandomState(9).uniform(0, 1, (1, 32, 32, 3))
        return torch.from_numpy(noise).permute(0, 3, 1, 2)


def part_of(state: State, kind: str) -> State:
    """Sigma or psi of a state, with the names of the layers."""
    prefix = f"network.{kind}."
    return {name.removeprefix(prefix).replace("/", "."): t for name, t in state.items() if name.startswith(prefix)}


class ComparedParts(FederatedCallback):
    """Compares sigma and psi of every client and of the server, the choice of helpers, the rates and the embeddings."""

    def __init__(self, record: dict[str, Any], location: str) -> None:
        self.record = record
        self.location = location
        self.clients = 0

    def close(self, ours: State, kind: str, theirs: list[float]) -> None:
        assert fingerprint(part_of(ours, kind)) == pytest.approx(theirs, abs=CLOSE, rel=CLOSE), kind

    def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        self.close(algorithm.server.parameters, "sigma", theirs["trained"])
        helpers = {k: client["helpers"] for k, client in theirs["clients"].items() if "helpers" in client}
        assert {str(k) for k in algorithm.helper_models} == helpers.keys()
        for client, chosen in helpers.items():
            ours = [self.owner(algorithm, psi) for psi in algorithm.helper_models[int(client)]]
            assert ours == chosen

    def owner(self, algorithm: Any, psi: State) -> int:
        """The client whose last psi this is."""
        kept: dict[int, State] = {client: algorithm.clients.get(client, "psi") for client in range(4)}
        return next(k for k, own in kept.items() if all(torch.equal(own[name], t) for name, t in psi.items()))

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]["clients"][str(update.client)]
        self.close(update.parameters, "psi", theirs["psi"])
        if self.location == "clients":
            self.close(update.parameters, "sigma", theirs["sigma"])
        self.clients += 1

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]
        self.close(algorithm.server.parameters, "sigma", theirs["sigma"])
        self.close(algorithm.server.parameters, "psi", theirs["psi"])
        so_far = [self.record["rounds"][str(number)]["clients"] for number in range(1, trainer.round_index + 1)]
        for client, values in theirs["clients"].items():
            rate, lowest = algorithm.clients.get(int(client), "rate"), min(r[client]["validation"] for r in so_far)
            assert float(rate["factor"]) == pytest.approx(values["rate"])
            assert float(rate["lowest"]) == pytest.approx(lowest, rel=1e-12)
            embedding = algorithm.clients.get(int(client), "embedding")["p"].tolist()
            assert embedding == pytest.approx(theirs["embeddings"][client], abs=1e-13)
        if "server_rate" in theirs:
            assert float(algorithm.server.extra["rate"]["factor"]) == pytest.approx(theirs["server_rate"])
        uploads = [client["upload"] for client in theirs["clients"].values()]
        assert metrics["communication/upload_share"] == pytest.approx(np.mean(uploads))
        assert metrics["val/loss"] == pytest.approx(theirs["loss"], rel=1e-12)


@pytest.mark.parametrize("location", ["clients", "server"])
def test_fedmatch_is_the_authors_code_to_rounding(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rounds of four clients: sigma, psi, reverted entries, embeddings, helpers, votes, rates, uploads, losses."""
    record = recorded(f"fedmatch_{location}")
    settings, rounds = record["settings"], record["rounds"]
    record |= {"labeled": list(range(20)), "split": [list(range(20 + 15 * k, 35 + 15 * k)) for k in range(4)]}
    monkeypatch.setattr(fedmatch, "_LR_DIVISOR", settings["divisor"])  # their rate is a 32-bit number: a power of two

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> ResNet9:
        built = ResNet9(num_classes, in_shape, norm="none", bias=False, width=4).double()
        first_weights(built, linear=settings["linear"], conv=settings["conv"])
        return built

    names = ("labeled_weight", "helper_interval", "l1_threshold", "delta_threshold", "threshold")
    algorithm = ReplayedFedMatch(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=settings["lr"]),
        consistency_weight=settings["consistency"],
        agreement_weight=settings["agreement"],
        l1_weight=settings["l1"],
        l2_weight=settings["l2"],
        variance_scaling=False,
        lr_patience=1,
        **{name: settings[name] for name in names},
    )
    compared = ComparedParts(record, location)
    data = ValidatedData(
        "cifar10", num_clients=4, num_labels=20, label_location=location, partition=Given(record), weak="none",  # type: ignore[arg-type]
        server_batch_size=settings["server_batch"] or 6, client_batch_size=settings["batch"], normalize=False,
        validation="test",
    )  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=len(rounds), clients_per_round=4, logger=False, precision="64-true", callbacks=[compared]
    )
    trainer.fit(algorithm, data)
    assert compared.clients == 16
    clients = [client for number in rounds.values() for client in number["clients"].values()]
    assert min(client["confident"] for client in clients) < 8 < max(client["confident"] for client in clients)
    assert min(client["rate"] for client in clients) < 1


class ReplayedSemiSFL(SemiSFL):
    """Semi-SFL on the recorded run's batches, 6 images at the server and 5 at a client, and its projection head."""

    linear: float

    def configure_model(self) -> None:
        """Build the model with the recorded run's first weights, in 64 bits."""
        if hasattr(self, "teacher"):
            return
        super().configure_model()
        self.double()
        first_weights(self.network.whole, linear=self.linear)
        draw = np.random.RandomState(4)
        for _, weight in sorted(self.head.named_parameters()):
            weight.data = torch.from_numpy(0.3 * draw.standard_normal(tuple(weight.shape)))
        for name, student in self.students().items():
            self.teacher[name].load_state_dict(student.state_dict())

    def on_server_start(self, data: LocalData) -> LocalWork:
        own, labels = super().on_server_start(data), images(11, 10).labels

        def batch(step: int) -> Batch:
            rows = drawn_rows(100, data.round, step, data.labeled, 6)
            x = data.plain(rows)
            return {"x": weak(x), "x_key": strong(x), "y": labels[rows]}

        return replace(own, batch=batch)

    def on_client_start(self, data: LocalData) -> LocalWork:
        own = super().on_client_start(data)

        def batch(step: int) -> Batch:
            rows = drawn_rows(data.party + 1, data.round, step, data.unlabeled, 5)
            x = data.plain(rows)
            return {"index": rows, "x_weak": weak(x), "x_strong": strong(x)}

        return replace(own, batch=batch)


class ComparedTeacher(FederatedCallback):
    """Compares student, teacher and projection heads after every round, and both stages' losses."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.rounds = 0

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        theirs, model = self.record["rounds"][str(trainer.round_index)], algorithm.server.model()
        for part, prefix in {"student": "network.", "teacher": "teacher.network."}.items():
            ours = {name.removeprefix(prefix): t for name, t in model.items() if name.startswith(prefix)}
            assert fingerprint(ours) == pytest.approx(theirs[part], abs=CLOSE, rel=CLOSE), part
        for part, prefix in {"head": "head.", "teacher_head": "teacher.head."}.items():
            ours = {name: t for name, t in model.items() if name.startswith(prefix)}
            assert fingerprint(ours) == pytest.approx(theirs[part], abs=CLOSE, rel=CLOSE), part
        assert metrics["server/loss"] == pytest.approx(theirs["server_loss"], rel=1e-12)
        assert metrics["client/loss"] == pytest.approx(theirs["client_loss"], rel=1e-12)
        assert metrics["client/mask_rate"] == pytest.approx(np.mean(theirs["confident"]) / 10)
        assert metrics["lr"] == pytest.approx(theirs["lr"], rel=1e-14)
        self.rounds += 1


def test_semi_sfl_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds, two of four clients in each: both stages, the queues, the teacher, all losses."""
    record = recorded("semi_sfl")
    settings, rounds = record["settings"], record["rounds"]
    record |= {"labeled": list(range(20)), "split": [list(range(20 + 15 * k, 35 + 15 * k)) for k in range(4)]}
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])

    algorithm = ReplayedSemiSFL(
        network=partial(MLP, hidden=(12, 9)),
        split=1,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        server_steps=settings["server_steps"],
        client_steps=settings["client_steps"],
        threshold=settings["threshold"],
        teacher_decay=settings["decay"],
        temperature=0.2,
        projection_size=7,
        queue_size=settings["queue"],
        queue_clear="every_step",
        queue_confidence="always",
        queue_empty="count",
    )
    algorithm.linear, compared = settings["linear"], ComparedTeacher(record)
    data = RecordedData(
        "svhn", num_clients=4, num_labels=20, partition=Given(record), server_batch_size=6, client_batch_size=5,
        validation="test",
    )  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=len(rounds), clients_per_round=2, logger=False, precision="64-true", callbacks=[compared]
    )
    trainer.fit(algorithm, data)
    assert compared.rounds == len(rounds)
    assert all(0 < kept < 10 for number in rounds.values() for kept in number["confident"])


def test_fl2_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretraining and three rounds in float64: thresholds, sure images, every client's weights, weighted mean, sBN."""
    record = recorded("fl2")
    settings, rounds = record["settings"], record["rounds"]
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> CNN:
        built = CNN(num_classes, in_shape, width=4, norm="static_batch").double()
        first_weights(built, linear=settings["linear"])
        return built

    algorithm = FL2(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=settings["lr"], momentum=0.9, nesterov=True, weight_decay=5e-4),
        client_epochs=settings["epochs"],
        server_epochs=settings["epochs"],
        pretrain_epochs=10 * settings["epochs"],
        rho=settings["rho"],
    )
    data = DataInRecordedOrder(
        "cifar10", num_clients=settings["clients"], num_labels=settings["labels"], partition=Given(record),
        server_batch_size=10, client_batch_size=8, validation="test",
    )  # fmt: skip
    compared = ComparedRounds(record)
    trainer = toy_trainer(
        tmp_path, max_rounds=settings["rounds"], clients_per_round=2, logger=False, precision="64-true",
        callbacks=[StaticBatchNorm("pooled", batch_size=10), compared],
    )  # fmt: skip
    trainer.fit(algorithm, data)
    assert compared.clients == 6
    sure = [client["sure"] for number in rounds.values() for client in number["clients"].values()]
    assert min(sure) == 0 < max(sure)


class ReplayedProxyFL(ProxyFL):
    """ProxyFL with the recorded projections' first weights."""

    def configure_model(self) -> None:
        super().configure_model()
        first_weights(self.projections, linear=1.0)


class RecordedOrder:
    """The recorded permutations, one after the other."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders = iter(orders)

    def permutation(self, count: int) -> Any:
        return np.array(next(self.orders))


@pytest.mark.parametrize(("name", "method"), [("sage", SAGE), ("proxyfl", ReplayedProxyFL)])
def test_methods_with_received_labels_are_the_authors_code_to_rounding(
    name: str, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds in float64: every client's weights and batch-norm statistics after 10 steps, the mean, the loss."""
    record = recorded(name)
    settings, rounds = record["settings"], record["rounds"]
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)]["cohort"])
    usual = sampling.rng

    def rng(*words: Any) -> Any:
        return RecordedOrder(record["proxies"][str(words[2])]) if "proxies" in words else usual(*words)

    monkeypatch.setattr(sampling, "rng", rng)

    def network(**shape: Any) -> CNN | MLP:
        built = CNN(**shape, width=4, norm="batch") if name == "sage" else MLP(**shape, hidden=(16,))
        first_weights(built.double(), linear=settings["linear"])
        return built

    algorithm = method(
        network=network,
        optimizer=partial(torch.optim.SGD, lr=settings["lr"], momentum=0.9, weight_decay=1e-4),
        threshold=settings["threshold"],
        client_epochs=settings["epochs"],
        **{key: value for key, value in settings.items() if key.startswith("proxy_")},
    )
    data = DataInRecordedOrder(
        "cifar10", num_clients=4, num_labels=20, label_location="clients", partition=Given(record),
        client_batch_size=5, validation="test",
    )  # fmt: skip
    compared = ComparedRounds(record)
    trainer = toy_trainer(
        tmp_path, max_rounds=settings["rounds"], clients_per_round=2, logger=False, precision="64-true",
        callbacks=[compared],
    )  # fmt: skip
    trainer.fit(algorithm, data)
    assert compared.clients == 6
    if name == "proxyfl":
        assert algorithm.server.extra["prior"]["share"].tolist() == pytest.approx(rounds["3"]["prior"], rel=1e-7)


class Listed(Partition):
    """The recorded images of each client."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts = parts

    def assign(self, labels: Tensor, num_clients: int, num_classes: int, generator: Any) -> list[Tensor]:
        return [torch.tensor(part) for part in self.parts]


def in_batches(data: LocalData, rows: Tensor, size: int = 8) -> list[Tensor]:
    """A client's images in the order of both sides, in batches."""
    order = np.random.RandomState(1000 * data.party + data.round).permutation(len(rows))
    return list(rows[torch.from_numpy(order)].split(size))


class ComparedWeights(FederatedCallback):
    """Compares the weights of every client, and the global model's where they are recorded."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record, self.clients = record, 0

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        theirs = self.record["rounds"][str(trainer.round_index)]["clients"][str(update.client)]
        expected = theirs["weights"] if isinstance(theirs, dict) else theirs
        assert fingerprint(update.parameters) == pytest.approx(expected, abs=CLOSE, rel=CLOSE)
        self.clients += 1

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        if expected := self.record["rounds"][str(trainer.round_index)].get("global"):
            assert fingerprint(algorithm.server.parameters) == pytest.approx(expected, abs=CLOSE, rel=CLOSE)


def replay_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any], method: Any, partition: Partition,
    lr: float, **settings: Any,
) -> int:  # fmt: skip
    """Runs a method with a hidden layer of 16 units on recorded clients; returns the number of compared updates."""
    rounds = record["rounds"]
    monkeypatch.setattr(sampling, "cohort", lambda seed, number, *more: rounds[str(number)].get("cohort", range(4)))

    def network(num_classes: int, in_shape: tuple[int, int, int]) -> MLP:
        built = MLP(num_classes, in_shape, hidden=(16,)).double()
        first_weights(built)
        return built

    algorithm = method(network=network, optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9, **settings.pop("sgd")),
                       **settings)  # fmt: skip
    algorithm.recorded, compared = record, ComparedWeights(record)
    data = RecordedData("svhn", num_clients=4, num_labels="all", label_location="clients", partition=partition,
                        client_batch_size=8, validation="test")  # fmt: skip
    trainer = toy_trainer(
        tmp_path, max_rounds=len(rounds), clients_per_round=len(rounds["2"]["clients"]), logger=False,
        precision="64-true", callbacks=[compared],
    )  # fmt: skip
    trainer.fit(algorithm, data)
    return compared.clients


class ReplayedRSCFed(RSCFed):
    """RSCFed on recorded batches; its aggregation weights are compared."""

    recorded: dict[str, Any]

    def on_client_start(self, data: LocalData) -> LocalWork:
        own = super().on_client_start(data)
        batches = in_batches(data, torch.cat([data.labeled, data.unlabeled]))
        assert own.num_steps == len(batches)
        labels = images(11, 10).labels

        def batch(number: int) -> Batch:
            x = data.plain(batches[number])
            if len(data.labeled):
                return {"x": weak(x), "y": labels[batches[number]]}
            return {"x_teacher": weak(x), "x_student": strong(x), "weight": own.batch(number)["weight"]}

        return replace(own, batch=batch)

    def consensus_weights(self, drawn: Any, models: Any) -> list[float]:
        found = super().consensus_weights(drawn, models)
        expected = self.recorded["rounds"][str(self.current_round.index)]["weights"]
        assert found == pytest.approx(expected, abs=1e-12)
        return found


def test_rscfed_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of three draws: students, kept teachers and momentum, both averages, the consensus."""
    record = recorded("rscfed")
    parts = np.split(np.arange(100), np.cumsum(record["sizes"])[:-1])
    count = replay_of_clients(
        tmp_path, monkeypatch, record, ReplayedRSCFed, FullyLabeledClients(1, Listed([p.tolist() for p in parts])),
        lr=0.03, sgd={"weight_decay": 5e-4}, distance_scale=record["settings"]["scale"],
        labeled_distance_scale=record["settings"]["labeled_scale"], unlabeled_weight=2,
    )  # fmt: skip
    assert count == 27


class ReplayedCBAFed(CBAFed):
    """CBAFed on recorded orders; its thresholds, rare classes and counts are compared."""

    recorded: dict[str, Any]

    def broadcast(self, client: int) -> State:
        sent = super().broadcast(client)
        theirs = self.recorded["rounds"][str(self.current_round.index)]
        if "thresholds" in theirs:
            assert sent["classes.threshold"].tolist() == pytest.approx(theirs["thresholds"], abs=1e-6)
            assert sent["classes.rare"].nonzero().flatten().tolist() == theirs["rare"]
        return sent

    def on_client_start(self, data: LocalData) -> LocalWork:
        batches = in_batches(data, torch.cat([data.labeled, data.unlabeled]))
        if len(data.labeled):
            own, labels = super().on_client_start(data), images(11, 10).labels

            def batch(number: int) -> Batch:
                rows = batches[number % len(batches)]
                return own.batch(number) | {"x": weak(data.plain(rows)), "y": labels[rows]}

            return replace(own, batch=batch)
        order = torch.cat(batches)
        moved = _Moved(**vars(data) | {"unlabeled": order})
        return super().on_client_start(moved)

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        sent = super().on_client_end(update)
        theirs = self.recorded["rounds"][str(self.current_round.index)]["clients"][str(update.client)]
        assert sent.payload["counts"].tolist() == theirs.get("counts", sent.payload["counts"].tolist())
        return sent


class _Moved(LocalData):
    """Images in their given order, with the recorded run's weak view."""

    def permutation(self, count: int, purpose: str, *more: int) -> Tensor:
        return torch.arange(count)

    def weak(self, indices: Tensor, purpose: str, *more: Any, **places: Any) -> Tensor:
        return weak(self.plain(indices))


def test_cbafed_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up and seven rounds: thresholds, rare classes, counts, both residual connections, all weights."""
    record = recorded("cbafed")
    count = replay_of_clients(
        tmp_path, monkeypatch, record, ReplayedCBAFed, FullyLabeledClients(1, Listed(record["split"])),
        lr=0.008, sgd={"weight_decay": 5e-4}, warmup_epochs=11, threshold=record["threshold"], unlabeled_weight=1,
    )  # fmt: skip
    assert count == 1 + 7 * 4
    counts = [sum(c.get("counts", [])) for r in record["rounds"].values() for c in r["clients"].values()]
    assert 0 < min(filter(None, counts)) < 10  # few and many images had a label


class ReplayedFedDB(FedDB):
    """FedDB with the recorded views; its labels and priors are compared."""

    recorded: dict[str, Any]

    def on_client_start(self, data: LocalData) -> LocalWork:
        return super().on_client_start(_Fixed(**vars(data)))

    def label_images(self, data: LocalData, images: Tensor) -> PseudoLabels:
        pseudo = super().label_images(data, images)
        theirs = self.recorded["rounds"][str(data.round)]["clients"][str(data.party)]
        chosen = images[pseudo.mask]
        assert chosen.sort().values.tolist() == theirs["confident"]
        assert pseudo.labels[pseudo.mask][chosen.argsort()].tolist() == theirs["labels"]
        assert self.prior.get_buffer("p_s").tolist() == pytest.approx(theirs["p_s"], abs=1e-13)
        return pseudo

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        sent = super().on_client_end(update)
        theirs = self.recorded["rounds"][str(self.current_round.index)]["clients"][str(update.client)]
        assert sent.payload["p_s"].tolist() == pytest.approx(theirs["p_s_end"], abs=1e-12)
        return sent


class _Fixed(_Moved):
    """Also with the recorded run's strong view."""

    def strong(self, indices: Tensor, purpose: str, *more: Any, **places: Any) -> Tensor:
        return strong(self.plain(indices))


class SomeLabeled(Partition):
    """The recorded images of each client, and which of them are labelled."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def split(self, asked: Any, generator: Any) -> FederatedSplit:
        parts = np.split(np.arange(100), np.cumsum(self.record["sizes"])[:-1])
        clients = [
            ClientIndices(torch.tensor(own), torch.tensor(sorted({*part.tolist()} - {*own})))
            for own, part in zip(self.record["labeled"], parts, strict=True)
        ]
        return FederatedSplit(asked.seed, torch.zeros(0, dtype=torch.int64), clients)


def test_feddb_is_the_authors_code_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds: priors before and after training, labels, clients, the weights of the average, server momentum."""
    record = recorded("feddb")
    count = replay_of_clients(
        tmp_path, monkeypatch, record, ReplayedFedDB, SomeLabeled(record), lr=0.03,
        sgd={"nesterov": True, "weight_decay": 5e-4}, threshold=0.115, client_epochs=3,
    )  # fmt: skip
    assert count == 12
