from __future__ import annotations

import contextlib
import csv
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import (
    EASGD,
    DataSharing,
    FedAvg,
    FedMatch,
    FedRGD,
    FedSHVR,
    FedSwitch,
    FixMatch,
    MeanTeacher,
    SemiFL,
    SemiSFL,
    Supervised,
)
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.cli.deploy import _seen_from_here, clients_of, make_parts
from lightning_fedssl.cli.deploy import main as deploy_command
from lightning_fedssl.cli.deploy import make_node as app_node
from lightning_fedssl.cli.lightning_cli import FederatedCLI
from lightning_fedssl.data import Arrays
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.deployment.channel import Failure, Unreadable
from lightning_fedssl.deployment.federation import DeployedFederation
from lightning_fedssl.deployment.messages import Content, Kind, MessageError, Order, Report
from lightning_fedssl.deployment.node import Node
from lightning_fedssl.deployment.node_state import ClientFolder
from lightning_fedssl.deployment.own_data import OwnData, ServerData, module_of_spec, save_spec
from lightning_fedssl.deployment.tensors import pack_moments, unpack_moments
from lightning_fedssl.functional.batch_norm import Moments
from lightning_fedssl.models import CNN
from lightning_fedssl.schedules import Cosine
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage.files import new_partial
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer.setup import warn_of_clients_without_images

from .fake_channel import FakeChannel, Fault, deploy, make_node
from .toy import SPEC, ToyData, Transfers, assert_same, images_of, sgd, toy_semifl, toy_trainer, weights

AT_CLIENTS = partial(ToyData, label_location="clients", num_labels=24)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def network(norm: Literal["batch", "static_batch", "group", "none"]) -> partial[CNN]:
    return partial(CNN, width=4, norm=norm)


METHODS: dict[str, tuple[Callable[[], FederatedAlgorithm], Callable[[], ToyData]]] = {
    "FedAvg": (lambda: FedAvg(network=network("batch"), optimizer=sgd, keep_client_optimizer=True), AT_CLIENTS),
    "FedProx": (lambda: FedAvg(network=network("group"), optimizer=sgd, prox_mu=0.1, server_momentum=0.5), AT_CLIENTS),
    "SemiFL": (toy_semifl, ToyData),
    "FixMatch": (lambda: FixMatch(network=network("static_batch"), optimizer=sgd, threshold=0.4), ToyData),
    "FedSHVR": (lambda: FedSHVR(network=network("group"), optimizer=plain, ramp_epochs=2), AT_CLIENTS),
    "FedRGD": (
        lambda: FedRGD(network=network("batch"), optimizer=sgd, threshold=0.4, local_steps=3, schedule=Cosine()),
        ToyData,
    ),
    "EASGD": (lambda: EASGD(network=network("batch"), optimizer=sgd, local_steps=3), AT_CLIENTS),
    "MeanTeacher": (lambda: MeanTeacher(network=network("batch"), optimizer=sgd), AT_CLIENTS),
    "FedSwitch": (
        lambda: FedSwitch(
            network=network("batch"), optimizer=sgd, threshold=0.4, beta=0.0, client_steps=3, server_steps=3
        ),
        ToyData,
    ),
}


def fit(trainer: FederatedTrainer, algorithm: FederatedAlgorithm, data: ToyData, **options: Any) -> FederatedAlgorithm:
    trainer.fit(algorithm, data, **options)
    return algorithm


def simulated(tmp_path: Path, name: str, **keys: Any) -> tuple[FederatedAlgorithm, Transfers]:
    make, make_data = METHODS[name]
    seen = Transfers()
    trainer = toy_trainer(tmp_path / "simulation", **{"logger": False, "callbacks": [seen]} | keys)
    return fit(trainer, make(), make_data()), seen


def deployed(tmp_path: Path, name: str, **keys: Any) -> tuple[FederatedAlgorithm, Transfers, FakeChannel]:
    make, make_data = METHODS[name]
    seen = Transfers()
    given: dict[str, Any] = {"logger": False, "callbacks": [seen]}
    trainer, channel = deploy(tmp_path, make, make_data, **given | keys)
    return fit(trainer, make(), make_data()), seen, channel


Counted = dict[tuple[int, int, str], dict[str, int]]


def merged(seen: Transfers) -> Counted:
    """Bytes by round, client and direction; a broadcast and what the client requested after it count together."""
    found: Counted = {}
    for round_index, client, direction, sizes in seen.seen:
        found.setdefault((round_index, client, direction), {}).update(sizes)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_deployment_equals_the_simulation(tmp_path: Path, name: str) -> None:
    """Weights and buffers are bitwise identical, and so are the counted transfers."""
    expected, counted = simulated(tmp_path, name)
    algorithm, seen, _ = deployed(tmp_path, name)
    assert_same(weights(algorithm), weights(expected))
    assert merged(seen) == merged(counted)


def in_messages(channel: FakeChannel) -> Counted:
    """Bytes of the tensors in the messages, by round, client and direction."""
    found: Counted = {}
    for _, client, direction, content in channel.sent:
        if "round" in content.values:
            key = (int(content.values["round"]), client, direction)  # type: ignore[arg-type]
            found.setdefault(key, {}).update(content.sizes())
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_tensors_of_the_messages_are_those_of_the_simulation_s_ledger(tmp_path: Path, name: str) -> None:
    """Tensor by tensor; ``tau`` of Fed-SHVR, a number of 8 bytes, is the value ``num_steps`` of every message."""
    _, counted = simulated(tmp_path, name)
    *_, channel = deployed(tmp_path, name)
    expected = {key: {n: s for n, s in sizes.items() if n != "tau"} for key, sizes in merged(counted).items()}
    assert {key: sizes for key, sizes in in_messages(channel).items() if sizes} == expected


@pytest.mark.parametrize("name", METHODS)
def test_no_image_and_no_label_is_in_a_message(tmp_path: Path, name: str) -> None:
    *_, channel = deployed(tmp_path, name, max_rounds=2)
    fields = {*Order.__dataclass_fields__, *Report.__dataclass_fields__}
    secrets = []
    for node in set(channel.nodes.values()):
        for client in node.data.clients:
            data = node.data.local_data(client, 1, torch.float32)
            secrets += [data.images[0], data.plain(torch.tensor([0]))[0], data.images.float()[0]]
            secrets += [data.labels] if len(data.labels) else []
    assert len(channel.sent) > 4
    for _, _, direction, content in channel.sent:
        assert content.values.keys() <= fields
        sent = [t.numpy().tobytes() for t in content.tensors.values()]
        assert not any(secret.numpy().tobytes() in tensor for secret in secrets for tensor in sent), direction


OBSTACLES = [
    (lambda: FedMatch(network=network("none")), ToyData, "FedMatch sends clients the models of other clients"),
    (lambda: SemiSFL(network=network("batch")), ToyData, "SemiSFL exchanges features and gradients"),
    (lambda: Supervised(network=network("none")), ToyData, "Supervised trains at the server alone"),
    (lambda: DataSharing(network=network("none")), AT_CLIENTS, "DataSharing gives clients images of the server"),
]


@pytest.mark.parametrize(("make", "make_data", "reason"), OBSTACLES)
def test_a_method_that_cannot_be_deployed_is_refused_by_name(
    tmp_path: Path, make: Callable[[], FederatedAlgorithm], make_data: Callable[[], ToyData], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*simulate it"):
        deploy(tmp_path, make, make_data)


def test_equal_in_64_bits_and_with_stored_momentum_of_every_client(tmp_path: Path) -> None:
    expected, _ = simulated(tmp_path, "SemiFL", precision="64-true")
    algorithm, *_ = deployed(tmp_path, "SemiFL", precision="64-true")
    for name, tensor in weights(algorithm).items():
        torch.testing.assert_close(tensor, weights(expected)[name], rtol=0, atol=1e-10)
    assert algorithm.clients.having("optimizer") == []  # it is at the nodes
    assert len(list(tmp_path.glob("node */node/*/client-*/round-*.state.safetensors"))) >= 3


def test_moments_of_all_clients_give_the_same_statistics_and_the_weights_are_sent_once(tmp_path: Path) -> None:
    asked = toy_semifl_with_moments()
    data = ToyData
    reference = fit(toy_trainer(tmp_path / "a", logger=False), asked(), data())
    trainer, channel = deploy(tmp_path / "b", asked, data, logger=False)
    assert_same(weights(fit(trainer, asked(), data())), weights(reference))
    after_moments = [content for kind, _, way, content in channel.sent if (kind, way) == ("train", "down")]
    assert all("network.convs.0.weight" not in content.tensors for content in after_moments)
    assert all("network.norms.0.running_mean" in content.tensors for content in after_moments)


def toy_semifl_with_moments() -> Callable[[], FederatedAlgorithm]:
    class WithMoments(SemiFL):
        def configure_callbacks(self) -> list[Callback]:
            return [StaticBatchNorm(source="moments")]

    return lambda: WithMoments(**dict(toy_semifl().hparams))


def test_a_client_that_requests_lost_weights_still_uses_the_result_of_its_last_round(tmp_path: Path) -> None:
    """The request splits a broadcast into two messages, and only the first of them has the result."""

    class WithMoments(FedSHVR):
        def configure_callbacks(self) -> list[Callback]:
            return [StaticBatchNorm(source="moments")]

    def make() -> FederatedAlgorithm:
        return WithMoments(network=network("static_batch"), optimizer=plain, ramp_epochs=2)

    def forgetful(node: Node) -> Callable[[Kind, Content], Content]:
        original, folder = node.answer, node.folder

        def answer(kind: Kind, content: Content) -> Content:
            for file in folder.rglob("weights.safetensors") if kind == "train" else ():
                file.unlink()
            return original(kind, content)

        return answer

    trainer, channel = deploy(tmp_path / "b", make, AT_CLIENTS, logger=False)
    for node in dict.fromkeys(channel.nodes.values()):
        vars(node)["answer"] = forgetful(node)
    algorithm = fit(trainer, make(), AT_CLIENTS())
    repeated = [content for kind, _, _, content in channel.sent if kind == "train" and content.values.get("follow_up")]
    assert any(content.values["result"] for content in repeated)
    assert_same(weights(algorithm), weights(fit(toy_trainer(tmp_path / "a", logger=False), make(), AT_CLIENTS())))


def test_a_client_that_requests_the_same_tensor_again_misses_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise server and node would send messages to each other without an end."""
    make, make_data = METHODS["FedSwitch"]
    shares = ((0,), (1,), (2,), (3,))
    trainer, channel = deploy(tmp_path, make, make_data, shares, logger=False, max_rounds=1)
    client = client_of_round(1)

    def insatiable(kind: Kind, content: Content) -> Content:
        return Content(values=Report(client, 1, request=["teacher.network.classifier.bias"]).values())

    vars(channel.nodes[client])["answer"] = insatiable
    fit(trainer, make(), make_data())
    assert f"client {client} requests ['teacher.network.classifier.bias'], which it cannot have" in caplog.text


def test_a_request_that_is_no_list_of_names_costs_its_client_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: Any = [["network.classifier.bias"]]
    algorithm, client = with_fault(
        tmp_path, "FedAvg", lambda content: replace(content, values={**content.values, "request": wrong})
    )
    assert f"client {client} requests {wrong}, which it cannot have" in caplog.text
    assert_same(weights(algorithm), weights(without_client(tmp_path, "FedAvg", client, 2)))


class SendsPayload(FedAvg):
    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        return replace(update, payload={"threshold": torch.tensor(0.5)})


class NamesPayload(SendsPayload):
    def uploaded_payload(self) -> dict[str, torch.Tensor]:
        return {"threshold": torch.tensor(0.0)}


@pytest.mark.parametrize(("method", "refused"), [(SendsPayload, 3), (NamesPayload, None)])
def test_a_payload_is_accepted_if_the_method_names_its_tensors(
    tmp_path: Path, method: type[FedAvg], refused: int | None
) -> None:
    def make() -> FederatedAlgorithm:
        return method(network=network("group"), optimizer=sgd)

    trainer, _ = deploy(tmp_path, make, AT_CLIENTS, logger=False, max_rounds=1)
    trainer.fit(make(), AT_CLIENTS())
    assert trainer.callback_metrics.get("client/refused") == refused


ADAM_64: dict[str, Any] = {"precision": "64-true", "max_rounds": 2, "logger": False}


@pytest.mark.parametrize("keys", [{"max_rounds": 2, "logger": False}, ADAM_64])
def test_states_of_adam_are_those_that_the_server_expects(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Its step counts are numbers without dimensions, of a type that depends on the implementation."""

    def make() -> FederatedAlgorithm:
        return FedRGD(network=network("group"), optimizer=torch.optim.Adam, threshold=0.4, local_steps=3)

    expected = fit(toy_trainer(tmp_path / "simulation", **keys), make(), ToyData())
    trainer, _ = deploy(tmp_path, make, ToyData, **keys)
    algorithm = fit(trainer, make(), ToyData())
    assert float(trainer.callback_metrics["client/trained"]) == 3
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(algorithm)[name], tensor, rtol=0, atol=1e-6)


class CountsMoreUp(FedAvg):
    def upload_sizes(self, update: ClientUpdate) -> dict[str, int]:
        return super().upload_sizes(update) | {"secret": 100}


class CountsLessDown(FedAvg):
    def download_sizes(self, client: int, received: dict[str, torch.Tensor]) -> dict[str, int]:
        return super().download_sizes(client, received) | {"network.classifier.bias": 1}


@pytest.mark.parametrize(("method", "name"), [(CountsMoreUp, "secret"), (CountsLessDown, "network.classifier.bias")])
def test_a_method_that_counts_what_it_does_not_send_is_refused(tmp_path: Path, method: type[FedAvg], name: str) -> None:
    def make() -> FederatedAlgorithm:
        return method(network=network("group"), optimizer=sgd)

    trainer, _ = deploy(tmp_path, make, AT_CLIENTS, logger=False)
    with pytest.raises(RuntimeError, match=f"{method.__name__} counts .* bytes of '{name}'.*upload_sizes are what it"):
        trainer.fit(make(), AT_CLIENTS())


def test_statistics_of_pooled_images_are_refused(tmp_path: Path) -> None:
    trainer, _ = deploy(tmp_path, toy_semifl, ToyData, logger=False, callbacks=[StaticBatchNorm(source="pooled")])
    with pytest.raises(ValueError, match="data do not leave a node"):
        trainer.fit(toy_semifl(), ToyData())


def test_a_checkpoint_after_every_second_round_is_refused(tmp_path: Path) -> None:
    every_second = FederatedCheckpoint(every_n_rounds=2)
    trainer, _ = deploy(tmp_path, toy_semifl, ToyData, logger=False, callbacks=[every_second])
    with pytest.raises(ValueError, match=r"every_n_rounds is 2, .*: set it to 1 in a deployment"):
        trainer.fit(toy_semifl(), ToyData())
    options = ["--config", "semifl_digits.yaml", "--trainer.callbacks+=FederatedCheckpoint"]
    with pytest.raises(ValueError, match="every_n_rounds is 5"):
        deploy_command(["init", str(tmp_path / "app"), *options, "--trainer.callbacks.every_n_rounds=5"])
    assert not (tmp_path / "app").exists()


# Faults.


def client_of_round(round_index: int) -> int:
    """The first client that is asked to train in a round."""
    return sampling.cohort(0, round_index, 4, 3)[0]


def with_fault(
    tmp_path: Path, name: str, fault: Fault, round_index: int = 2, **keys: Any
) -> tuple[FederatedAlgorithm, int]:
    """A run in which the first client of a round has a fault, and that client."""
    make, make_data = METHODS[name]
    given: dict[str, Any] = {"logger": False}
    trainer, channel = deploy(tmp_path, make, make_data, **given | keys)
    client = client_of_round(round_index)
    channel.faults[client, round_index] = fault
    return fit(trainer, make(), make_data()), client


def without_client(tmp_path: Path, name: str, client: int, round_index: int) -> FederatedAlgorithm:
    """The simulation in which a client's update of a round is rejected because it is not finite."""
    make, make_data = METHODS[name]
    algorithm = make()
    original = algorithm.on_client_end

    def poisoned(update: ClientUpdate) -> ClientUpdate:
        update = original(update)
        if (update.client, algorithm.federation.round_index) != (client, round_index):
            return update
        return replace(update, parameters={n: torch.full_like(p, math.nan) for n, p in update.parameters.items()})

    vars(algorithm)["on_client_end"] = poisoned
    return fit(toy_trainer(tmp_path / "reference", logger=False), algorithm, make_data())


def nan(content: Content) -> Content:
    return replace(content, tensors={n: torch.full_like(t, math.nan) for n, t in content.tensors.items()})


def other_shape(content: Content) -> Content:
    return replace(content, tensors={n: t[..., None] for n, t in content.tensors.items()})


def renamed(content: Content) -> Content:
    return replace(content, tensors={f"{n}x": t for n, t in content.tensors.items()})


def other_client(content: Content) -> Content:
    return replace(content, values={**content.values, "client": 99})


def no_values(content: Content) -> Content:
    return replace(content, values={})


REFUSALS: dict[str, tuple[Fault, str]] = {
    "nan": (nan, "returned weights that are not finite"),
    "shape": (other_shape, "cannot be used: .* instead of float32"),
    "names": (renamed, "cannot be used: its weights and buffers have other names"),
    "client": (other_client, "cannot be used: it is of client 99"),
    "values": (no_values, "cannot be used: its value 'client' is None"),
    "garbage": (lambda content: Unreadable("its array 'w' cannot be read (ValueError)"), "cannot be read"),
}


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("name", ["FedAvg", "FedSHVR"])
def test_a_message_that_is_no_update_is_rejected_and_the_client_s_state_with_it(
    tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is that of the simulation with the same client rejected: its state is that of the round before."""
    fault, reason = REFUSALS[kind]
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        algorithm, client = with_fault(tmp_path, name, fault)
    assert re.search(f"client {client} .*{reason}.*left out of the average", caplog.text)
    assert_same(weights(algorithm), weights(without_client(tmp_path, name, client, 2)))


def scalar_of_server(content: Content) -> Content:
    return replace(content, metrics={"val/accuracy": (1.0, 1.0)})


def momentum_of_nan(content: Content) -> Content:
    momentum = {n: torch.full_like(t, math.nan) for n, t in content.tensors.items() if n.startswith("optimizer.")}
    assert momentum
    return replace(content, tensors=content.tensors | momentum)


def foreign_momentum(content: Content) -> Content:
    return replace(content, tensors=content.tensors | {"optimizer.0.momentum_buffer": torch.zeros(1)})


def with_tensor(name: str) -> Fault:
    return lambda content: replace(content, tensors=content.tensors | {name: torch.zeros(())})


def without(prefix: str) -> Fault:
    return lambda content: replace(
        content, tensors={name: t for name, t in content.tensors.items() if not name.startswith(prefix)}
    )


def with_value(name: str, value: int) -> Fault:
    return lambda content: replace(content, values={**content.values, name: value})


@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    [
        ("FedAvg", scalar_of_server, "it logs 'val/accuracy', which only the server logs"),
        ("FedAvg", foreign_momentum, "it has an optimizer state, which stays at the client"),
        ("FedRGD", foreign_momentum, "'0.momentum_buffer' of its tensors of the optimizer is float32 (1,) instead of"),
        ("FedRGD", momentum_of_nan, "'0.momentum_buffer' of its tensors of the optimizer is not finite"),
        ("FedRGD", with_tensor("optimizer.0"), "its tensors of the optimizer have other names: '0' is unknown"),
        ("FedRGD", with_tensor("optimizer.0.junk"), "its tensors of the optimizer have other names: '0.junk' is u"),
        ("FedRGD", with_tensor("optimizer.99.x"), "its tensors of the optimizer have other names: '99.x' is unknown"),
        ("FedRGD", without("optimizer."), "its tensors of the optimizer have other names: '0.momentum_buffer' is miss"),
        ("FedRGD", without("optimizer.1."), "its tensors of the optimizer have other names: '1.momentum_buffer' is mi"),
        ("FedAvg", with_tensor("payload.junk"), "its tensors of the payload have other names: 'junk' is unknown"),
        ("FedAvg", with_value("num_steps", 0), "it has tensors, but the client has made no step"),
        ("FedAvg", with_value("num_samples", 10**30), f"its value 'num_samples' is {10**30}, a number beyond 64 bits"),
    ],
)
def test_a_message_cannot_change_what_is_not_the_client_s(
    tmp_path: Path, name: str, fault: Fault, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        algorithm, client = with_fault(tmp_path, name, fault)
    assert f"client {client} sent a message that cannot be used: {reason}" in caplog.text
    assert_same(weights(algorithm), weights(without_client(tmp_path, name, client, 2)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"moments.n.mean": torch.full((2,), math.nan)}, "are not finite"),
        ({"moments.n.mean": torch.zeros(3)}, r"is float32 \(3,\) instead of float32 \(2,\)"),
        ({"moments.n.variance": -torch.ones(2)}, "have a negative variance"),
        ({"moments.n.count": torch.tensor(4)}, "count 4 values, not those of its images"),
        ({"moments.n.count": torch.tensor(41)}, "count 41 values, not those of its images"),
        ({"moments.n.count": torch.tensor(1 << 62)}, "not those of its images"),
        ({"moments.m.count": torch.tensor(8)}, "the layer 'm' count 8 values, not those of its images"),
        ({"moments.n.count": None}, "'moments.n.count' is missing"),
        ({"moments.m.count": None, "moments.m.mean": None, "moments.m.variance": None}, "'moments.m.count' is missing"),
        ({"moments.other.mean": torch.zeros(2)}, "'moments.other.mean' is unknown"),
    ],
)
@pytest.mark.parametrize("images", [5, 0])
def test_moments_that_cannot_be_combined_are_refused(change: dict[str, Any], reason: str, images: int) -> None:
    """Layer ``n`` has 8 values of an image, layer ``m`` 2. The number of a client's images may not be known (0)."""

    def moments(images: int) -> dict[str, Moments]:
        values = torch.zeros(2), torch.ones(2)
        return {"n": Moments(8 * images, *values), "m": Moments(2 * images, *values)}

    good, cpu = pack_moments(moments(5)), torch.device("cpu")
    assert unpack_moments(good, moments(2), images, cpu)["n"].count == 40
    wrong = {name: t for name, t in (good | change).items() if t is not None}
    with pytest.raises(MessageError, match=reason):
        unpack_moments(wrong, moments(2), images, cpu)


def test_only_a_client_with_fewer_than_two_images_may_have_no_moments() -> None:
    two = {"n": Moments(8, torch.zeros(2), torch.ones(2))}
    assert unpack_moments({}, two, 1, torch.device("cpu")) == {}
    with pytest.raises(MessageError, match=r"'moments.n.count' is missing"):
        unpack_moments({}, two, 2, torch.device("cpu"))


def test_moments_of_another_client_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = toy_semifl_with_moments()
    trainer, channel = deploy(tmp_path, make, ToyData, logger=False, max_rounds=1)
    original = channel.nodes[1].answer

    def answer(kind: Kind, content: Content) -> Content:
        found = original(kind, content)
        return found if kind == "train" else replace(found, values={**found.values, "client": 3, "round": 77})

    vars(channel.nodes[1])["answer"] = answer
    fit(trainer, make(), ToyData())
    assert "round 1: client 1: it is of client 3 in round 77; statistics without it" in caplog.text


def test_weights_for_statistics_are_counted_for_the_clients_that_are_connected(tmp_path: Path) -> None:
    make, seen = toy_semifl_with_moments(), Transfers()
    trainer, channel = deploy(tmp_path, make, ToyData, logger=False, callbacks=[seen], max_rounds=1)
    channel.present = lambda: frozenset({0})
    fit(trainer, make(), ToyData())
    counted = {k for _, k, way, sizes in seen.seen if way == "down" and any(n.startswith("for stat") for n in sizes)}
    assert counted == {0}


def test_a_round_whose_clients_are_gone_takes_place_while_others_are_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server waits only while nobody is connected."""
    make, make_data = METHODS["FedAvg"]
    trainer, channel = deploy(tmp_path, make, make_data, logger=False, clients_per_round=1, wait_for=4)
    ((gone,), everyone) = sampling.cohort(0, 2, 4, 1), frozenset(range(4))

    def present() -> frozenset[int]:
        if trainer.round_index == 3:
            return everyone if channel.waited >= 5 else frozenset()
        return everyone - {gone} if trainer.round_index == 2 else everyone

    channel.present = present
    fit(trainer, make(), make_data())
    assert (trainer.round_index, channel.waited) == (3, 5)
    trained = [int(content.values["round"]) for _, _, way, content in channel.sent if way == "down"]  # type: ignore[arg-type]
    assert trained == [1, 3]
    assert caplog.messages == ["round 2: no client of the cohort is connected: nobody trains in it"]


@pytest.mark.parametrize("name", ["SemiFL", "FedSHVR"])
def test_a_client_without_an_answer_misses_the_round_and_its_state_is_that_of_the_round_before(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        algorithm, client = with_fault(
            tmp_path, name, lambda content: Failure("did not answer in 60 s"), logger=CSVLogger(tmp_path)
        )
    assert f"round 2: client {client} did not answer in 60 s; the round goes on without it" in caplog.text
    assert_same(weights(algorithm), weights(without_client(tmp_path, name, client, 2)))
    rows = list(csv.DictReader(next(tmp_path.rglob("metrics.csv")).open()))
    assert [row["client/absent"] for row in rows if row["client/absent"]] == ["1.0"]


def test_a_node_that_joins_late_takes_part_from_then_on(tmp_path: Path) -> None:
    make, make_data = METHODS["FedAvg"]
    trainer, channel = deploy(tmp_path, make, make_data, logger=False, clients_per_round=4)
    algorithm = make()
    channel.present = lambda: frozenset({0, 1, 3} if trainer.round_index < 3 else {0, 1, 2, 3})
    fit(trainer, algorithm, make_data())
    trained = {(content.values["round"], client) for kind, client, way, content in channel.sent if way == "down"}
    assert trained == {(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3)}


def test_the_first_round_waits_for_the_clients_that_were_asked_for(tmp_path: Path) -> None:
    make, make_data = METHODS["FedAvg"]
    trainer, channel = deploy(tmp_path, make, make_data, wait_for=4, logger=False, max_rounds=1)
    channel.present = lambda: frozenset(range(min(4, channel.waited)))
    fit(trainer, make(), make_data())
    assert channel.waited == 4


@pytest.mark.parametrize("name", ["FedAvg", "SemiFL", "FedSHVR", "FedRGD"])
def test_a_server_that_is_killed_resumes_as_if_it_had_not_been(tmp_path: Path, name: str) -> None:
    """It ends in round 3, after clients have trained; the nodes have states of a round that the server has not."""
    make, make_data = METHODS[name]
    expected, _ = simulated(tmp_path, name, max_rounds=4)
    trainer, channel = deploy(tmp_path, make, make_data, max_rounds=4)

    def killed(content: Content) -> Content:
        raise KeyboardInterrupt

    last = sampling.cohort(0, 3, 4, 3)[0]  # its answer is the last to arrive
    channel.faults[last, 3] = killed
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(make(), make_data())
    channel.faults.clear()
    channel._open.clear()
    second = toy_trainer(tmp_path / "server", max_rounds=4)
    second.make_federation = partial(DeployedFederation, channel=channel)
    algorithm = fit(second, make(), make_data(), ckpt_path="last")
    assert_same(weights(algorithm), weights(expected))


@pytest.mark.parametrize("name", METHODS)
def test_a_message_that_arrives_three_times_gets_the_same_answer_and_its_client_trains_once(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, make_data = METHODS[name]
    expected, _ = simulated(tmp_path, name)
    trainer, channel = deploy(tmp_path, make, make_data, logger=False)
    channel.copies = 3
    with caplog.at_level(logging.INFO, logger="lightning_fedssl"):
        algorithm = fit(trainer, make(), make_data())
    assert_same(weights(algorithm), weights(expected))
    trained, repeated = (sum(text in line for line in caplog.messages) for text in (" made ", "its answer again"))
    requests = sum(way == "up" and bool(content.values["request"]) for _, _, way, content in channel.sent)
    assert trained == 3 * trainer.max_rounds
    assert repeated == 2 * (trained + requests)


def test_a_message_that_is_overtaken_by_one_of_a_later_round_changes_nothing(tmp_path: Path) -> None:
    _, _, channel = deployed(tmp_path, "FedSHVR", max_rounds=4)
    client = client_of_round(1)
    orders = [content for _, k, way, content in channel.sent if k == client and way == "down"]
    before = {path: path.read_bytes() for path in tmp_path.rglob(f"client-{client}/*")}
    report = Report.read(channel.nodes[client].answer("train", orders[0]).values)
    last = orders[-1].values["round"]
    assert report.error == f"has trained in round {last}, so it does not train in round 1 any more"
    assert before == {path: path.read_bytes() for path in tmp_path.rglob(f"client-{client}/*")}
    assert len({path.name for path in before if ".reply-" in path.name}) == 1


@pytest.mark.parametrize("name", ["SemiFL", "FedSHVR"])
def test_a_node_that_restarts_has_its_clients_states(tmp_path: Path, name: str) -> None:
    """Every message is answered by a node that was made for it, as Flower's processes are."""
    make, make_data = METHODS[name]
    expected, _ = simulated(tmp_path, name)
    trainer, channel = deploy(tmp_path, make, make_data, logger=False)
    folders = {client: node.folder for client, node in channel.nodes.items()}

    class Anew(dict[int, Node]):
        def __getitem__(self, client: int) -> Node:
            return make_node(folders[client].parent, make(), make_data(), [client])

    channel.nodes = Anew(channel.nodes)
    assert_same(weights(fit(trainer, make(), make_data())), weights(expected))


def test_a_node_that_has_lost_its_state_says_so_and_misses_the_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, make_data = METHODS["SemiFL"]
    trainer, channel = deploy(tmp_path, make, make_data, logger=False)
    client = client_of_round(1)

    def lose(content: Content) -> Content:
        for folder in tmp_path.glob(f"node */node/*/client-{client}"):
            shutil.rmtree(folder)
        return content

    channel.faults[client, 1] = lose
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        fit(trainer, make(), make_data())
    later = [t for t in (2, 3) if client in sampling.cohort(0, t, 4, 3)]
    assert later
    assert re.search(f"round {later[0]}: client {client} has no state after round 1: .* fresh-start=true", caplog.text)
    sent = [str(content.values.get("error")) for _, _, way, content in channel.sent if way == "up"]
    assert any("has no state" in text for text in sent)
    assert not any(str(tmp_path) in text for text in sent)


class LosesClientState(FederatedCallback):
    """A client of the simulation begins a round without its state."""

    def __init__(self, client: int, round_index: int) -> None:
        self.client, self.round_index = client, round_index

    def on_client_phase_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        if trainer.round_index == self.round_index:
            assert algorithm.clients.of(self.client)
            algorithm.clients.replace(self.client, {})


@pytest.mark.parametrize(("name", "damaged"), [("SemiFL", False), ("FedSHVR", False), ("FedSHVR", True)])
def test_a_client_that_has_lost_its_state_may_begin_again_without_it(
    tmp_path: Path, name: str, damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make, make_data = METHODS[name]
    client = client_of_round(1)
    later = next(t for t in (2, 3, 4) if client in sampling.cohort(0, t, 4, 3))
    lost: Any = [LosesClientState(client, later)]
    expected, _ = simulated(tmp_path, name, max_rounds=4, callbacks=lost)
    trainer, channel = deploy(tmp_path, make, make_data, logger=False, max_rounds=4)

    def lose(content: Content) -> Content:
        for folder in tmp_path.glob(f"node */node/*/client-{client}"):
            if damaged:
                (folder / "round-1.state.safetensors").write_bytes(b"half")
            else:
                shutil.rmtree(folder)
        return content

    channel.faults[client, 1] = lose
    for node in channel.nodes.values():
        node.fresh_start = True
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        algorithm = fit(trainer, make(), make_data())
    assert_same(weights(algorithm), weights(expected))
    assert caplog.messages == [f"round {later}: client {client} begins again without its state of round 1"]


def test_damaged_and_half_written_files_of_a_client(tmp_path: Path) -> None:
    """Weights for statistics are requested again, and what a killed node was writing is removed."""
    folder = ClientFolder(tmp_path / "client-0")
    folder.save_weights({"w": torch.ones(2)})
    assert_same(folder.weights(), {"w": torch.ones(2)})
    (folder.path / "weights.safetensors").write_bytes(b"")
    assert folder.weights() == {}
    left = folder.path / ".round-3.state.safetensors.abc.partial"
    left.write_bytes(b"half")
    descriptor, written = new_partial(folder.path / "round-4.state.safetensors")
    folder.begin(0)
    assert not left.exists()
    assert Path(written).exists()
    os.close(descriptor)


@pytest.mark.parametrize(("freeze", "missing"), [((), None), (("classifier",), "there is no file")])
def test_a_node_needs_the_initial_weights_only_of_frozen_layers(
    tmp_path: Path, freeze: tuple[str, ...], missing: str | None
) -> None:
    def make() -> FederatedAlgorithm:
        return FedAvg(network=network("group"), optimizer=sgd, init_from=tmp_path / "w.safetensors", freeze=freeze)

    expected = (
        contextlib.nullcontext() if missing is None else pytest.raises((FileNotFoundError, ValueError), match=missing)
    )
    with expected:
        make_node(tmp_path, make(), AT_CLIENTS(), [0])


# Data of each machine's own.

SAMPLES = np.zeros((2, 1, 8, 8), dtype=np.uint8)


class ServerToy(ServerData, ToyData):
    """The server's labelled images of ToyData's partition, and its test images; no client's image."""

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        whole = ToyData(validation=0)
        whole.setup()
        own, (spec, train, test) = whole.split.server_labeled, ToyData._load(self)
        return spec, ImageSplit(train.images[own], train.labels[own]), test


def own_file(path: Path, data: ToyData, client: int) -> Path:
    part = data.local_data(client, 1)
    arrays = {"labeled": part.images[part.labeled], "labels": part.labels, "unlabeled": part.images[part.unlabeled]}
    values: dict[str, Any] = {name: t.numpy() for name, t in arrays.items()}
    np.savez(path, **values)
    return path


def test_clients_with_images_of_their_own_equal_the_simulation(tmp_path: Path) -> None:
    """The server has no image of a client; a node has one file with its own."""
    whole = ToyData(validation=0)
    expected = fit(toy_trainer(tmp_path / "simulation", logger=False), toy_semifl(), whole)
    save_spec(SPEC, tmp_path / "data.json")
    module = module_of_spec(tmp_path / "data.json")
    nodes = []
    for client in range(4):
        data = module("nowhere", num_clients=4, num_labels=12, server_batch_size=5, client_batch_size=5)
        own = OwnData(data, own_file(tmp_path / f"{client}.npz", whole, client), client)
        nodes.append(Node(toy_trainer(tmp_path), toy_semifl(), data, own, tmp_path / f"node {client}"))
    channel, trainer = FakeChannel(nodes), toy_trainer(tmp_path / "server", logger=False)
    trainer.make_federation = partial(DeployedFederation, channel=channel)
    data = ServerToy(validation=0)
    counts = {client: (0, len(whole.split.clients[client].unlabeled)) for client in range(4)}
    assert {c: (n["labeled"][0], n["unlabeled"][0]) for c, n in described(channel).items()} == counts
    data.client_sizes = counts
    assert_same(weights(fit(trainer, toy_semifl(), data)), weights(expected))
    with pytest.raises((IndexError, RuntimeError)):
        data.local_data(0, 1).plain(data.local_data(0, 1).unlabeled)


def test_the_server_counts_labelled_images_that_only_nodes_have() -> None:
    """Their classes are not known to it, but a client with labelled images alone is not a client without images."""
    data = ServerToy(validation=0, num_clients=2, label_location="clients")
    data.client_sizes = {0: (5, 10), 1: (4, 0)}
    data.setup()
    assert data.statistics.sizes.tolist() == [15, 4]
    assert "of unknown class: 19 images at the clients" in data.statistics.summary()


def test_a_client_that_connects_later_is_not_one_without_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = ServerToy(validation=0)
    data.client_sizes = {0: (0, 9), 1: (0, 0), 2: (0, 9)}
    data.setup()
    warn_of_clients_without_images(data)
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "1 of 4 clients have no image and skip every round (1)"
    ]


@pytest.mark.parametrize("unlabeled", [0, 6])
def test_labelled_images_that_a_method_does_not_use_are_named(
    tmp_path: Path, unlabeled: int, caplog: pytest.LogCaptureFixture
) -> None:
    arrays: dict[str, Any] = {"labeled": SAMPLES, "labels": np.array([0, 1])}
    np.savez(tmp_path / "own.npz", **arrays, unlabeled=np.zeros((unlabeled, 1, 8, 8), dtype=np.uint8))

    def node_of(make: Callable[[], FederatedAlgorithm]) -> Node:
        data = ToyData()
        return Node(toy_trainer(tmp_path), make(), data, OwnData(data, tmp_path / "own.npz", 0), tmp_path)

    node_of(METHODS["FixMatch"][0]).answer("describe", Content())
    assert not caplog.messages
    text = f"{tmp_path / 'own.npz'} has 2 labelled images, and SemiFL does not use labelled images of clients"
    if not unlabeled:
        with pytest.raises(ValueError, match=re.escape(f"{text}: put them in unlabeled/, or leave out their labels")):
            node_of(toy_semifl)
        return
    node = node_of(toy_semifl)
    assert not caplog.messages  # Flower makes the node anew for every message
    node.answer("describe", Content())
    assert caplog.messages == [f"{text}: they are left out of the training"]


def described(channel: FakeChannel) -> dict[int, Any]:
    return {client: node.answer("describe", Content()).values for client, node in channel.nodes.items()}


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_image_files_of_a_node(tmp_path: Path, kind: str) -> None:
    images = images_of(torch.tensor([0, 2, 1]), 5)
    for folder, number in (("labeled/a", 0), ("labeled/c", 1), ("unlabeled/x", 2)):
        (tmp_path / "own" / folder).mkdir(parents=True)
        Image.fromarray(images[number, 0].numpy()).save(tmp_path / "own" / folder / "1.png")
    table = "label,file\n ,own/unlabeled/x/1.png\na, own/labeled/a/1.png\n c,own/labeled/c/1.png\n"
    (tmp_path / "own.csv").write_text(table)
    (tmp_path / "own" / "labeled" / ".ipynb_checkpoints").mkdir()
    own = OwnData(ToyData(), tmp_path / ("own" if kind == "folder" else "own.csv"), 2).local_data(2, 3, torch.float32)
    assert own.labels.tolist() == [0, 2]
    assert torch.equal(own.images[own.labeled], images[:2])
    assert torch.equal(own.images[own.unlabeled], images[2:])
    assert (own.party, own.round) == (2, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("missing", "do not exist"),
        ("empty", "have no image"),
        ("class", "has a class 'd'; the classes are a, b, c"),
    ],
)
def test_folders_of_a_node_that_do_not_fit_are_refused(tmp_path: Path, wrong: str, message: str) -> None:
    path = tmp_path / "own"
    if wrong != "missing":
        folder = path / ("labeled/d" if wrong == "class" else ".")
        folder.mkdir(parents=True)
        if wrong == "class":
            Image.new("L", (8, 8)).save(folder / "1.png")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        OwnData(ToyData(), path, 0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"path,label\n1.png,a\n", "has no column 'file'; there are path, label"),
        (b"", "has no column 'file', 'label'; the file is empty"),
        (b"file;label\n1.png;a\n", "its columns are separated by semicolons: separate them by commas"),
        (b"file,label\n", "have no image: .*, or rows of a CSV file"),
        (b"file,label\n1.png,d\n", "has a class 'd'; the classes are a, b, c"),
        (b"file,label\n1.png,a\n2.png,b\n./1.png,\n", r"own\.csv', lines 2 and 4: both list './1\.png', but an image"),
        (b"file,label\n1.png,a,b\n", "line 2: 'b' is beyond the last column"),
        (b"label,file\na\n", "has a row without a file name"),
        (b"file,label\n\xff.png,a\n", "is no CSV file in UTF-8"),
    ],
)
def test_tables_of_a_node_that_do_not_fit_are_refused(tmp_path: Path, table: bytes, message: str) -> None:
    (tmp_path / "own.csv").write_bytes(table)
    with pytest.raises(ValueError, match=message):
        OwnData(ToyData(), tmp_path / "own.csv", 0)


def test_a_table_that_a_spreadsheet_has_saved_is_read(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 7).save(tmp_path / "1.png")
    (tmp_path / "own.csv").write_text("file,label\n1.png\n", encoding="utf-8-sig")  # a short row: no label
    own = OwnData(ToyData(), tmp_path / "own.csv", 0).local_data(0, 1, torch.float32)
    assert (len(own.labeled), len(own.unlabeled), int(own.images.max())) == (0, 1, 7)


@pytest.mark.parametrize("name", ["own", "own.csv", "own.npz"])
def test_missing_data_of_a_node_are_refused_with_what_to_give(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"the node's data '.*{name}' do not exist: give a folder, a .csv or"):
        OwnData(ToyData(), tmp_path / name, 0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "has an array 'x'"),
        ({"unlabeled": np.zeros((2, 1, 9, 9), dtype=np.uint8)}, r"has samples of the shapes \[\(1, 9, 9\)\]"),
        ({"unlabeled": SAMPLES / 255.0}, "unlabeled is float64; the app takes pixels from 0 to 255 as uint8"),
        ({"labeled": SAMPLES, "labels": np.array([0.5, 1.0])}, "labels is float64"),
        ({"labeled": SAMPLES, "labels": np.array([0])}, "and 1 labels of 2 samples"),
    ],
)
def test_arrays_of_a_node_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        OwnData(ToyData(), tmp_path / "own.npz", 0)


def test_a_file_that_holds_no_arrays_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "own.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"own\.npz' is no readable file of numpy\.savez"):
        OwnData(ToyData(), tmp_path / "own.npz", 0)


def own_numbers(path: Path, in_shape: tuple[int, ...] = SPEC.in_shape) -> OwnData:
    """A node's data in an app whose samples are no 8-bit pixels."""
    save_spec(replace(SPEC, pixels=False, in_shape=in_shape), path.parent / "data.json")
    module = module_of_spec(path.parent / "data.json")
    return OwnData(module("nowhere", weak="none", strong="none", num_clients=4), path, 0)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.full((2, 1, 8, 8), np.nan), "2 of 2 unlabeled samples hold NaN or infinite values"),
        (np.full((2, 1, 8, 8), 1e300), r"hold NaN or infinite values \(the first is sample 0\) in float32; repair"),
        (SAMPLES, "unlabeled has 8-bit pixels, but the app was written for numbers that are no 8-bit pixels; give"),
        (SAMPLES.astype(np.int32), "unlabeled images of torch.int32 have no fixed range; give uint8, uint16 or float"),
        (SAMPLES.astype(str), "unlabeled is <U3; the app takes numbers: give float32"),
    ],
)
def test_arrays_of_a_node_that_are_no_numbers_of_the_app_are_refused(
    tmp_path: Path, samples: Any, message: str
) -> None:
    np.savez(tmp_path / "own.npz", unlabeled=samples)
    with pytest.raises(ValueError, match=rf"own\.npz: .*{message}"):
        own_numbers(tmp_path / "own.npz")


@pytest.mark.parametrize(
    ("kind", "shape"), [("uint16", (1, 8, 8)), ("float64", (1, 8, 8)), ("int64", (5,)), ("uint8", (5,))]
)
def test_arrays_of_a_node_are_converted_as_those_of_the_server(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    samples: Any = np.random.default_rng(0).integers(0, 256, (6, *shape)).astype(kind)
    labels: Any = np.arange(6) % 3
    np.savez(tmp_path / "server.npz", train=samples, train_labels=labels, test=samples, test_labels=labels)
    expected = Arrays(str(tmp_path / "server.npz")).load().train.images
    swapped: Any = samples.astype(samples.dtype.newbyteorder())
    for unlabeled in (samples, swapped):
        np.savez(tmp_path / "own.npz", labeled=np.zeros(0), unlabeled=unlabeled)
        own = own_numbers(tmp_path / "own.npz", shape).local_data(0, 1, torch.float32)
        assert torch.equal(own.images, expected)


@pytest.mark.parametrize("name", ["own", "own.csv"])
def test_image_files_of_a_node_are_refused_where_samples_are_no_pixels(tmp_path: Path, name: str) -> None:
    """They would be 255 times as large as the server's numbers from 0 to 1."""
    (tmp_path / "own" / "unlabeled").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "own" / "unlabeled" / "1.png")
    (tmp_path / "own.csv").write_text("file,label\nown/unlabeled/1.png,\n")
    with pytest.raises(ValueError, match=rf"{name}' are no \.npz file, but .* no 8-bit pixels, .*; give an \.npz file"):
        own_numbers(tmp_path / name)


@pytest.mark.parametrize("wrong", [{"run": "../x"}, {"run": "/x"}, {"run": ""}, {"client": -1}, {"round": -1}])
def test_a_node_refuses_a_run_that_would_leave_its_folder(tmp_path: Path, wrong: dict[str, Any]) -> None:
    node = make_node(tmp_path, toy_semifl(), ToyData(), [0])
    values = {**Order("r", 0, 0, 1, 3, 4).values(), **wrong}
    answer = node.answer("train", Content(values=values))
    assert "its run" in str(answer.values["error"]) or "negative" in str(answer.values["error"])
    assert not (tmp_path / "x").exists()
    assert not Path("/x").exists()


# The command.


def test_deploy_init_writes_an_app_with_the_whole_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["init", str(tmp_path / "app"), "--config", "semifl_digits.yaml", "--data.num_clients", "3"]
    assert deploy_command([*arguments, "--trainer.clients_per_round", "2"]) == 0
    app = tmp_path / "app"
    config = yaml.safe_load((app / "fedssl_app" / "config.yaml").read_text())
    assert (config["data"]["num_clients"], config["trainer"]["clients_per_round"]) == (3, 2)
    project = (app / "pyproject.toml").read_text()
    assert 'serverapp = "fedssl_app.server_app:app"' in project
    assert "flwr run" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="has files"):
        deploy_command(arguments)


def test_deploy_init_copies_the_file_of_a_partition_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server and nodes run in folders of their own, where a relative path leads nowhere."""
    small = ["--config", "semifl_digits.yaml", "--data.num_clients=3", "--trainer.clients_per_round=2"]
    monkeypatch.chdir(tmp_path)
    drawn = FederatedCLI(args=small, run=False).datamodule
    drawn.setup()
    drawn.split.save(tmp_path / "p.json")
    given = ["--data.partition=FromFile", "--data.partition.path=p.json"]
    assert deploy_command(["init", "app", *small, *given]) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "p.json").unlink()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, _, data = make_parts(tmp_path / "app" / "fedssl_app" / "config.yaml", {})
    data.setup()
    assert data.split.hash == drawn.split.hash
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"partition file 'p.json' does not exist"):
        deploy_command(["init", "other", *small, *given])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("log", "code"), [("test/accuracy 0.8931\n", 0), ("KeyError: 'test/accuracy'\n", 1)])
def test_the_demonstration_succeeds_if_it_prints_an_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str, code: int
) -> None:
    class NoProcesses(contextlib.nullcontext[Any]):
        def __init__(self, folder: Path) -> None:
            super().__init__(self)

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: []

        def log(self, name: str) -> Path:
            (tmp_path / name).write_text(f"started\n{log}")
            return tmp_path / name

    module = ModuleType("lightning_fedssl.deployment.flower.local")
    vars(module)["LocalFederation"] = NoProcesses
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("lightning_fedssl.cli.deploy.find_spec", lambda name: "found")
    assert deploy_command(["demo", str(tmp_path / "demo")]) == code


@pytest.mark.parametrize("existed", [False, True])
def test_deploy_init_leaves_no_half_of_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool) -> None:
    def full_disk(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    app = tmp_path / "app"
    if existed:
        app.mkdir()
    arguments = ["init", str(app), "--own_data", "--config", "fixmatch_digits.yaml"]
    monkeypatch.setattr("lightning_fedssl.cli.deploy.save_spec", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        deploy_command(arguments)
    assert list(tmp_path.iterdir()) == [app] * existed
    assert list(app.rglob("*")) == []
    monkeypatch.undo()
    assert deploy_command(arguments) == 0


def test_preload_without_a_program_of_flower_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        deploy_command(["preload"])
    assert capsys.readouterr().err.startswith("error: preload needs a program of Flower: ")
    monkeypatch.setattr("lightning_fedssl.cli.deploy.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"Flower is not installed; run in a checkout of this package: "):
        deploy_command(["preload", "flower-supernode"])
    monkeypatch.setattr("lightning_fedssl.cli.deploy.find_spec", lambda name: "found")
    with pytest.raises(FileNotFoundError, match="no program 'supernode': give flower-supernode or flower-superlink"):
        deploy_command(["preload", "supernode"])


def test_deploy_init_refuses_a_method_that_only_the_simulation_can_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SemiSFL exchanges features"):
        deploy_command(["init", str(tmp_path / "app"), "--config", "semisfl_digits.yaml"])
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("node_config", "clients"),
    [({"clients": "0,3"}, [0, 3]), ({"partition-id": 1, "num-partitions": 3}, [1, 4]), ({"partition-id": 2}, [2])],
)
def test_the_clients_of_a_node(node_config: dict[str, Any], clients: list[int]) -> None:
    assert clients_of(node_config, 5) == clients


@pytest.mark.parametrize(
    ("node_config", "message"),
    [
        ({}, "the node does not know its clients: give"),
        ({"clients": "first"}, "give numbers with commas"),
        ({"clients": "0,0"}, "give each client once"),
        ({"clients": "5"}, "numbers from 0 to 4"),
        ({"partition-id": -1, "num-partitions": 3}, "number the nodes from 0 to 2"),
        ({"partition-id": 3, "num-partitions": 3}, "number the nodes from 0 to 2"),
        ({"partition-id": 5, "num-partitions": 9}, "no client is left for it; number the nodes from 0 to 4"),
        ({"partition-id": "first"}, "the node's partition-id is 'first': give a whole number, as in partition-id=0"),
        ({"partition-id": 0, "num-partitions": "x"}, "the node's num-partitions is 'x': give a whole number"),
        (
            {"partition-id": 0, "num-partitions": 0},
            "the node's num-partitions is 0: give the number of nodes, 1 or more",
        ),
    ],
)
def test_a_node_whose_clients_do_not_exist_is_refused(node_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clients_of(node_config, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "--config", "semifl_digits.yaml", "my_app"], "give the folder before --config"),
        (["demo", "my_app", "--rounds", "2"], "demo takes a folder and no options; leave out --rounds 2"),
        ([], "the following arguments are required: action, FOLDER"),
        (["init"], "the following arguments are required: FOLDER"),
        (["start", "my_app"], "argument action: invalid choice: 'start'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        deploy_command(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert line.endswith("; see lightning-fedssl deploy --help")


def save_images(folder: Path, labels: list[int], seed: int) -> None:
    """Write toy images below a folder for each class, or into the folder itself if the labels are hidden."""
    for number, (image, label) in enumerate(zip(images_of(torch.tensor(labels), seed), labels, strict=True)):
        place = folder / "" if folder.name == "unlabeled" else folder / "abc"[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place / f"{number:03}.png")


def test_an_app_whose_nodes_have_folders_of_their_own(tmp_path: Path) -> None:
    """From the command to the last round, with the functions that Flower's processes call."""
    save_images(tmp_path / "server" / "train", [0, 1, 2] * 6, 0)
    save_images(tmp_path / "server" / "test", [0, 1, 2] * 4, 1)
    for client in range(2):
        save_images(tmp_path / f"client {client}" / "unlabeled", [0, 1, 2] * 5, 2 + client)
    options = ["--data.dataset=image_folder", f"--data.root={tmp_path / 'server'}", "--data.image_size=8"]
    options += ["--data.num_labels=all", "--data.num_clients=2", "--trainer.clients_per_round=2"]
    options += ["--trainer.max_rounds=2", f"--trainer.default_root_dir={tmp_path / 'run'}", "--model.threshold=0.3"]
    app = tmp_path / "app"
    assert deploy_command(["init", str(app), "--own_data", "--config", "fixmatch_digits.yaml", *options]) == 0
    config = app / "fedssl_app" / "config.yaml"
    nodes = [
        app_node(config, {"clients": str(k), "data": str(tmp_path / f"client {k}"), "state-dir": str(tmp_path)}, {})
        for k in range(2)
    ]
    trainer, algorithm, data = make_parts(config, {"options": "--trainer.enable_progress_bar false"})
    channel = FakeChannel(nodes)
    assert isinstance(data, ServerData)
    data.client_sizes = dict.fromkeys(range(2), (0, 15))
    trainer.make_federation = partial(DeployedFederation, channel=channel)
    trainer.fit(algorithm, data)
    assert (trainer.round_index, len(data._train.images)) == (2, 18)
    assert float(trainer.callback_metrics["client/trained"]) == 2
    assert {kind for kind, *_ in channel.sent} == {"train", "moments"}
    assert "of unknown class: 30 images" in data.statistics.summary()


def test_a_node_without_its_data_is_refused(tmp_path: Path) -> None:
    save_images(tmp_path / "server" / "train", [0, 1, 2], 0)
    save_images(tmp_path / "server" / "test", [0, 1, 2], 1)
    options = ["--data.dataset=image_folder", f"--data.root={tmp_path / 'server'}", "--data.image_size=8"]
    deploy_command(["init", str(tmp_path / "app"), "--own_data", "--config", "fixmatch_digits.yaml", *options])
    with pytest.raises(ValueError, match=r"has one client: give --node-config .*data="):
        app_node(tmp_path / "app" / "fedssl_app" / "config.yaml", {"clients": "0,1"}, {})


def test_the_next_command_can_be_pasted_and_the_app_has_no_licence_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deploy_command(["init", "my app!", "--config", "semifl_digits.yaml"]) == 0
    assert "next: flwr run 'my app!' SUPERLINK" in capsys.readouterr().out
    assert "license" not in (tmp_path / "my app!" / "pyproject.toml").read_text()


def test_the_run_folder_of_the_demonstration_is_seen_from_here() -> None:
    assert _seen_from_here("run folder: runs/a/version_0\n", Path("demo")) == "run folder: demo/runs/a/version_0\n"
    assert _seen_from_here("run folder: /runs/a\n", Path("demo")) == "run folder: /runs/a\n"


def test_make_installs_flower_for_the_demonstration() -> None:
    text = (Path(__file__).parent.parent / "Makefile").read_text()
    assert "-c 'import flwr' 2>/dev/null || $(INSTALL) --editable '.[flower]'" in text
