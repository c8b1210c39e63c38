"""A deployment in one process: nodes that answer at once, each with an algorithm and data of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.deployment.channel import Failure
from lightning_fedssl.deployment.federation import DeployedFederation
from lightning_fedssl.deployment.messages import Content, Kind
from lightning_fedssl.deployment.node import Node
from lightning_fedssl.deployment.node_data import PartitionOfDataSet
from lightning_fedssl.trainer import FederatedTrainer

from .toy import ToyData, toy_trainer

Fault = Callable[[Content], Content | Failure]


def copied(content: Content) -> Content:
    """What arrives at the other side: nothing shares storage with the sender."""
    tensors = {name: t.detach().cpu().clone() for name, t in content.tensors.items()}
    return Content(tensors, dict(content.values), dict(content.metrics))


class FakeChannel:
    """Delivers messages to nodes of the same process.

    Args:
        nodes: The nodes.

    Attributes:
        sent: Every message: kind, client, direction and content.
        faults: By client and round, what becomes of the answer to a training message.
        copies: How often each message arrives at its node; the last answer counts.
        present: Names the clients that are connected.
    """

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = {client: node for node in nodes for client in node.data.clients}
        self.sent: list[tuple[Kind, int, str, Content]] = []
        self.faults: dict[tuple[int, int], Fault] = {}
        self.copies = 1
        self.present: Callable[[], frozenset[int]] = lambda: frozenset(self.nodes)
        self.waited = 0
        self._open: list[tuple[int, Kind, Content]] = []

    def connected(self) -> frozenset[int]:
        return self.present()

    def wait(self) -> None:
        self.waited += 1

    def send(self, client: int, kind: Kind, content: Content) -> None:
        content = copied(content)
        self.sent.append((kind, client, "down", content))
        self._open.append((client, kind, content))

    def receive(self) -> Iterator[tuple[int, Content | Failure]]:
        while self._open:
            client, kind, content = self._open.pop()  # the last one first: the order of arrival must not matter
            answer = [copied(self.nodes[client].answer(kind, content)) for _ in range(self.copies)][-1]
            self.sent.append((kind, client, "up", answer))
            fault = self.faults.get((client, int(content.values["round"])))  # type: ignore[arg-type]
            yield client, fault(answer) if fault and kind == "train" else answer


def make_node(tmp_path: Path, algorithm: FederatedAlgorithm, data: ToyData, clients: list[int], **keys: Any) -> Node:
    data.setup()
    return Node(toy_trainer(tmp_path, **keys), algorithm, data, PartitionOfDataSet(data, clients), tmp_path / "node")


def deploy(
    tmp_path: Path,
    make: Callable[[], FederatedAlgorithm],
    make_data: Callable[[], ToyData],
    shares: tuple[tuple[int, ...], ...] = ((0, 3), (1,), (2,)),
    wait_for: int = 1,
    **keys: Any,
) -> tuple[FederatedTrainer, FakeChannel]:
    """A trainer whose clients are at nodes.

    Args:
        tmp_path: Where server and nodes write.
        make: Makes the algorithm of a node.
        make_data: Makes its data.
        shares: The clients of each node.
        wait_for: Clients that must be connected before the first round.
        keys: Keys of the trainer.
    """
    nodes = [
        make_node(tmp_path / f"node {i}", make(), make_data(), list(clients), **keys)
        for i, clients in enumerate(shares)
    ]
    channel = FakeChannel(nodes)
    trainer = toy_trainer(tmp_path / "server", **keys)
    trainer.make_federation = partial(DeployedFederation, channel=channel, wait_for=wait_for)
    return trainer, channel
