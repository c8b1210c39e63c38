"""A deployment in one process: Flower's grid with ClientApps that answer at once, each message through bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.supercore.task_identity import TaskIdentity

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, FixMatch, MeanTeacher
from lightning_fedssl.deployment.node import Node, PartOfDataSet, make_client_app
from lightning_fedssl.deployment.server import DeployedFederation, Nodes
from lightning_fedssl.functional.optimizers import half_momentum
from lightning_fedssl.models import CNN
from lightning_fedssl.trainer import FederatedTrainer
from tests.algorithms import helpers as h
from tests.toy import ToyData, toy, toy_semifl, toy_trainer

AT_CLIENTS = partial(ToyData, label_location="clients", num_labels=24)


def network(norm: Literal["batch", "static_batch", "group", "none"]) -> partial[CNN]:
    return partial(CNN, width=4, norm=norm)


METHODS: dict[str, tuple[Callable[[], FederatedAlgorithm], Callable[[], ToyData]]] = {
    "FedAvg": (partial(toy, FedAvg, "batch", keep_client_optimizer=True), AT_CLIENTS),
    "FedProx": (partial(toy, FedAvg, prox_mu=0.1, aggregation_optimizer=half_momentum), AT_CLIENTS),
    "FedPer": (partial(toy, FedAvg, personal="classifier"), AT_CLIENTS),
    "SemiFL": (toy_semifl, ToyData),
    "FL2": (partial(h.toy_fl2, server_epochs=1, pretrain_epochs=1), ToyData),
    "FixMatch": (partial(toy, FixMatch, "static_batch", threshold=0.4), ToyData),
    "SAGE": (h.toy_sage, AT_CLIENTS),
    "SelfTraining": (h.toy_self_training, partial(ToyData, class_shares=h.STATED)),
    "FedSHVR": (partial(h.toy_shvr, ramp_epochs=2), AT_CLIENTS),
    "MeanTeacher": (partial(toy, MeanTeacher, "batch"), AT_CLIENTS),
    "FedSwitch": (partial(h.toy_fedswitch, beta=0.0, client_steps=3), ToyData),
}

Fault = Callable[[Message], Message | None]
"""What becomes of an answer; None: there is none."""


def through_bytes(message: Message) -> Message:
    """A message as it arrives: Flower's own serialisation and back."""
    from flwr.common.serde import message_from_proto, message_to_proto

    return message_from_proto(message_to_proto(message))


class FakeGrid:
    """Flower's grid.

    Args:
        apps: The ClientApp of each node that is connected.

    Attributes:
        sent: Every message and its answer.
        faults: By node, kind of message and round, what becomes of the answer.
    """

    def __init__(self, apps: dict[int, Any]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.apps = apps
        self.sent: list[Message] = []
        self.faults: dict[tuple[int, str, int], Fault] = {}
        self._answers: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answers.pop(name) for name in message_ids if name in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(reversed(list(self.push_messages(messages))))  # the order must not matter

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = name = f"message {len(self.sent)}"
        node, kind = message.metadata.dst_node_id, message.metadata.message_type.partition(".")
        try:
            answer = self.apps[node](through_bytes(message), Context(1, node, {}, RecordDict(), {}))
        except Exception as error:  # Flower sends its text
            answer = Message(Error(code=0, reason=f"{type(error).__name__}: {error}"), reply_to=message)
        self.sent += [message, answer]
        round_index = int(message.content.config_records["values"].get("round", 0))
        what = "train" if kind[0] == "train" else kind[2]
        fault = self.faults.get((node, what, round_index))
        answer = answer if fault is None else fault(answer)
        if answer is not None:
            answer.metadata.__dict__["_reply_to_message_id"] = name
            self._answers[name] = through_bytes(answer)
        return name


def app_of(tmp_path: Path, name: str, client: int, mods: Any = None, **keys: Any) -> Any:
    """The ClientApp of a client, which makes its node anew for every message."""
    make, make_data = METHODS[name]

    def make_node(node_config: Any, run_config: Any) -> Node:
        data = make_data()
        data.setup()
        folder = tmp_path / f"node {client}"
        trainer = toy_trainer(folder, **keys)
        return Node(trainer, trainer.fabric, make(), data, PartOfDataSet(data, client), folder)

    return make_client_app(make_node, mods)


def grid_of(tmp_path: Path, name: str, **keys: Any) -> FakeGrid:
    """A grid with the nodes 100 to 103 of the clients 0 to 3."""
    return FakeGrid({100 + client: app_of(tmp_path, name, client, **keys) for client in range(4)})


def nodes_of(grid: FakeGrid, **settings: Any) -> Nodes:
    given: dict[str, Any] = {"deadline": 10, "connect_timeout": 0, "bind": False, "poll": 0}
    return Nodes(grid, 4, **given | settings)


def server_of(tmp_path: Path, grid: FakeGrid, nodes: Nodes | None = None, **keys: Any) -> FederatedTrainer:
    """A trainer whose clients are at the nodes of a grid."""
    min_clients = keys.pop("min_clients", 1)
    trainer = toy_trainer(tmp_path / "server", **{"logger": False} | keys)
    federation = partial(DeployedFederation, nodes=nodes or nodes_of(grid), min_clients=min_clients)
    vars(trainer)["fit"] = partial(trainer.fit, federation=federation)
    return trainer


def records(tensors: dict[str, Any], values: dict[str, Any], scalars: dict[str, list[float]] | None = None) -> Any:
    """Records with what a test wants in them: arrays of Flower, or of NumPy."""
    arrays = {name: a if isinstance(a, Array) else Array(np.asarray(a)) for name, a in tensors.items()}
    return RecordDict(
        {"tensors": ArrayRecord(arrays), "values": ConfigRecord(values), "scalars": MetricRecord(scalars or {})}
    )


def changed(
    tensors: Callable[[dict[str, Any]], dict[str, Any]] = dict, values: Any = None, scalars: Any = None
) -> Fault:
    """A fault: an answer with other tensors (by name, as arrays of NumPy), values or scalars."""

    def fault(answer: Message) -> Message:
        content = answer.content
        content["tensors"] = records(
            tensors({name: array.numpy() for name, array in content.array_records["tensors"].items()}), {}
        )["tensors"]
        content.config_records["values"].update(values or {})
        content.metric_records["scalars"].update(scalars or {})
        return answer

    return fault
