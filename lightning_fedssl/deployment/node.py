"""The client side of a deployment: what a machine that holds the data of one or more clients does with a message."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.algorithms import DataSharing, FedMatch, FedSHVR, Supervised
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.deployment.messages import Content, Kind, MessageError, Order, Report
from lightning_fedssl.deployment.node_state import ClientFolder
from lightning_fedssl.deployment.own_data import OwnData
from lightning_fedssl.deployment.tensors import (
    FOR_STATISTICS,
    LAST_ROUND,
    OPTIMIZER,
    PAYLOAD,
    digest,
    digest_of_message,
    named,
    pack_moments,
    parts_of,
)
from lightning_fedssl.functional.averaging import State, WeightedSum
from lightning_fedssl.functional.batch_norm import Moments
from lightning_fedssl.local_training import sequential
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.metrics import MetricCollector
from lightning_fedssl.state import ClientUpdate, Direction, load_state
from lightning_fedssl.storage.client_store import ClientStore
from lightning_fedssl.trainer import launch, setup
from lightning_fedssl.trainer.federation import measure_moments
from lightning_fedssl.trainer.fit_loop import set_learning_rates
from lightning_fedssl.trainer.trainer import FederatedTrainer

_log = logging.getLogger(__name__)


class NodeData(Protocol):
    """The data of a node: those of its clients."""

    @property
    def clients(self) -> Sequence[int]:
        """The numbers of its clients."""

    def local_data(self, client: int, round_index: int, dtype: torch.dtype) -> LocalData:
        """What one of its clients may train on in a round."""


@dataclass
class NodeFederation:
    """The federation from the view of one client; see :class:`lightning_fedssl.trainer.federation.Federation`.

    Attributes:
        round_index: The round, from 1.
        max_rounds: The length of the run in rounds.
        num_clients: The number of all clients.
        cohort: The clients of the round that this client knows: itself.
        client_optimizer: The optimizer of the client's steps, with its learning rate.
    """

    round_index: int
    max_rounds: int
    num_clients: int
    cohort: Sequence[int]
    client_optimizer: Optimizer

    @property
    def progress(self) -> float:
        """The fraction of the run that is complete at the end of the round."""
        return self.round_index / self.max_rounds

    @property
    def client_lr(self) -> float:
        """The learning rate of the client's steps."""
        return float(self.client_optimizer.param_groups[0]["lr"])

    @property
    def clients_per_round(self) -> int:
        """Not known to a client."""
        raise self._refusal("clients_per_round")

    @property
    def server_optimizer(self) -> Optimizer:
        """Not known to a client."""
        raise self._refusal("server_optimizer")

    def validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Not known to a client."""
        raise self._refusal("validation_batches")

    def reached(self, clients: Sequence[int]) -> Sequence[int]:
        """Not known to a client."""
        raise self._refusal("reached")

    def moments(self, parties: Sequence[int], batch_size: int) -> Iterator[tuple[int, dict[str, Moments]]]:
        """Not known to a client."""
        raise self._refusal("moments")

    def train_server(self) -> None:
        """Not known to a client."""
        raise self._refusal("train_server")

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Not known to a client."""
        raise self._refusal("train_clients")

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Not known to a client."""
        raise self._refusal("train_jointly")

    def reduce(self, sums: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
        """Not known to a client."""
        raise self._refusal("reduce")

    def transfer(self, client: int, direction: Direction, sizes: Mapping[str, int]) -> None:
        """Not known to a client."""
        raise self._refusal("transfer")

    @staticmethod
    def _refusal(name: str) -> RuntimeError:
        return RuntimeError(f"a client in a deployment has no federation.{name}: only the server has it")


class _RequestError(Exception):
    """A client needs tensors that it has not received."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"the client needs {', '.join(names)}")
        self.names = list(names)


@dataclass
class _Received:
    """The server as the local trainer sees it, and what the local trainer reports; all of it for one client.

    Attributes:
        state: The broadcast, and what the client has requested.
        collector: The scalars that the client logs.
        steps: Steps of the client; 0 if it skips the round.
    """

    state: State
    collector: MetricCollector
    steps: int = 0

    def broadcast(self, client: int) -> State:
        """What the client has received."""
        return self.state

    def download_sizes(self, client: int, received: State) -> dict[str, int]:
        """Nothing: the server counts what it sends."""
        return {}

    def state_owner(self, client: int) -> int:
        """The client's own number: a state that is stored under another number comes with the broadcast."""
        return client

    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: State) -> None:
        """Request the tensors that the client's work needs in addition to its broadcast."""
        if missing := [name for name in work.extra_download if name not in self.state]:
            raise _RequestError(missing)
        self.steps = work.num_steps
        if work.pseudo_labels is not None and len(work.pseudo_labels.mask):
            self.collector.update(
                "client/mask_rate", work.pseudo_labels.mask.double().mean(), len(work.pseudo_labels.mask)
            )

    def client_batch_ended(self, step: int) -> None:
        """Nothing."""

    def client_ended(self, update: ClientUpdate) -> None:
        """Nothing: the server counts what it receives."""


class Node:
    """Trains the clients of one machine as the server's messages request.

    Args:
        trainer: Device, precision and similar keys of the configuration.
        algorithm: The algorithm, of the same configuration as the server's.
        datamodule: Knows the number of classes and the shape of an image.
        data: The data of the clients of this machine.
        folder: Where the clients' persistent states are stored.
        fresh_start: A client whose state is lost begins again without one, instead of missing the rounds.

    Raises:
        ValueError: If the method cannot be deployed, or the node has no data that it uses.
    """

    def __init__(
        self,
        trainer: FederatedTrainer,
        algorithm: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        data: NodeData,
        folder: Path,
        fresh_start: bool = False,
    ) -> None:
        refuse_undeployable(algorithm)
        self.trainer = trainer
        self.algorithm = algorithm
        self.data = data
        self.folder = folder
        self.fresh_start = fresh_start
        self._unused = data.unused_labels(algorithm) if isinstance(data, OwnData) else ""
        if not algorithm.freeze_patterns:
            algorithm.init_from = None  # all weights come from the server; frozen ones are not sent
        setup.prepare_model(trainer, algorithm, datamodule)
        weights = [p for p in algorithm.parameters() if p.requires_grad]
        self.optimizer = setup.build_optimizer(algorithm.optimizer_factory, weights, "model.optimizer")

    def answer(self, kind: Kind, content: Content) -> Content:
        """The answer to a message of the server.

        Args:
            kind: What the message asks for.
            content: Its content.
        """
        if kind == "describe":
            return self._describe()
        try:
            order = Order.read(content.values)
        except MessageError as error:
            return Content(values=Report(-1, 0, error=str(error)).values())
        try:
            self._check(order)
            with launch.settings(self.trainer.fabric.device, self.trainer.deterministic):
                return self._train_once(order, content) if kind == "train" else self._measure(order, content)
        except MessageError as error:
            _log.warning("round %d: client %d %s (state-dir: %s)", order.round, order.client, error, self.folder)
            return Content(values=Report(order.client, order.round, error=str(error)).values())

    def _describe(self) -> Content:
        """The clients of this node, and how many labelled and unlabelled images each has."""
        if self._unused:
            _log.warning("%s", self._unused)
        parts = [self.data.local_data(client, 0, self.trainer.dtype) for client in self.data.clients]
        return Content(
            values={
                "clients": list(self.data.clients),
                "labeled": [len(part.labeled) for part in parts],
                "unlabeled": [len(part.unlabeled) for part in parts],
            }
        )

    def _check(self, order: Order) -> None:
        if order.client not in self.data.clients:
            raise MessageError(f"is not at its node, which has the clients {list(self.data.clients)}")
        own = self._data(order).seed
        if own != order.seed:
            raise MessageError(f"has the configuration's seed_everything {own}, the server has {order.seed}: use one")

    def _data(self, order: Order) -> LocalData:
        return self.data.local_data(order.client, order.round, self.trainer.dtype)

    def _folder(self, order: Order) -> ClientFolder:
        return ClientFolder(self.folder / order.run / f"client-{order.client}")

    def _measure(self, order: Order, content: Content) -> Content:
        """Measure the client's moments; the weights stay here, as training may start from the same."""
        weights = parts_of(content.tensors, FOR_STATISTICS)
        self._folder(order).save_weights(weights)
        load_state(self.algorithm, weights)
        with self.trainer.fabric.autocast():
            moments = measure_moments(self.algorithm, self._data(order), order.batch_size)
        return Content(pack_moments(moments), Report(order.client, order.round).values())

    def _train_once(self, order: Order, content: Content) -> Content:
        """The answer to a message that asks a client to train; a repeated message gets the stored answer.

        Raises:
            MessageError: If the client cannot train, or the message was overtaken by one of a later round.
        """
        folder, request = self._folder(order), digest_of_message(order, content.tensors)
        if (reply := folder.reply(order.round, request)) is not None:
            _log.info("round %d/%d: client %d sends its answer again", order.round, order.max_rounds, order.client)
            return reply
        if (newest := folder.newest_round()) > order.round:
            raise MessageError(f"has trained in round {newest}, so it does not train in round {order.round} any more")
        try:
            reply = self._train(order, content, folder)
        except _RequestError as missing:
            reply = Content(values=Report(order.client, order.round, request=missing.names).values())
        folder.save_reply(order.round, request, reply)
        return reply

    def _train(self, order: Order, content: Content, folder: ClientFolder) -> Content:
        """Train the client of a message, and store its state.

        Raises:
            MessageError: If the client cannot train.
            _RequestError: If it needs further tensors first.
        """
        algorithm = self.algorithm
        names, order = order.result, self._without_lost_state(order, folder)
        state = folder.begin(order.accepted, keep=order.round if order.follow_up else 0)
        received = {**(folder.received(order.round) if order.follow_up else {}), **content.tensors}
        folder.save_received(order.round, received)
        result = {name: received.pop(name) for name in names if name in received}
        if order.weights:
            received = self._with_held_weights(order, folder, received)
            folder.save_received(order.round, {**received, **result})
        algorithm.clients = ClientStore()
        algorithm.clients.load_state_dict({order.client: {**state, **_part(received, OPTIMIZER)}})
        if order.result:
            self._take_result(order, folder, result, received)
        collector = MetricCollector()
        algorithm.collector = collector.update
        update, seen = self._train_client(order, _model_of(received), collector)
        _log.info(
            "round %d/%d: client %d made %d steps%s", order.round, order.max_rounds, order.client, seen.steps,
            "".join(f", {name} {total / weight:.4g}" for name, (total, weight) in collector.sums().items() if weight),
        )  # fmt: skip
        folder.save_state(order.round, self._state_of(order.client, at_server=False))
        report = Report(order.client, order.round, update.num_samples if update else 0, seen.steps)
        tensors = {**_tensors_of(update), **self._state_of(order.client, at_server=True)} if update else {}
        return Content(tensors, report.values(), {name: pair for name, pair in collector.sums().items() if pair[1]})

    def _without_lost_state(self, order: Order, folder: ClientFolder) -> Order:
        """The order; for a client that has lost its state and may begin again, as if this were its first round."""
        if not self.fresh_start or folder.can_read_round(order.accepted):
            return order
        _log.warning(
            "round %d: client %d begins again without its state of round %d", order.round, order.client, order.accepted
        )
        return replace(order, accepted=0, result=[])

    def _with_held_weights(self, order: Order, folder: ClientFolder, received: State) -> State:
        """The broadcast with the weights that the client has downloaded before.

        Raises:
            _RequestError: If it has not, or has others.
        """
        missing = sorted(self.algorithm.server.parameters.keys() - received.keys())
        if not missing:
            return received
        weights = folder.weights()
        if not weights or digest(weights, sorted(weights)) != order.weights:
            raise _RequestError(missing)
        return {**weights, **received}

    def _take_result(self, order: Order, folder: ClientFolder, result: State, received: State) -> None:
        """Let the client use the result of its last round.

        What the result has in common with what the client has just received is not sent twice.
        """
        missing = [name for name in order.result if name not in result]
        result = {**result, **{name: received[name.removeprefix(LAST_ROUND)] for name in missing}}
        then = replace(order, round=order.accepted)
        self._begin_round(then, _model_of(folder.received(order.accepted)))
        if isinstance(self.algorithm, FedSHVR):
            self.algorithm.on_result(order.client, self._on_device(result))

    def _train_client(
        self, order: Order, model: State, collector: MetricCollector
    ) -> tuple[ClientUpdate | None, _Received]:
        """Train the client; no update if it skips the round."""
        algorithm, seen = self.algorithm, _Received(self._on_device(model), collector)
        max_steps = None if order.max_steps < 0 else order.max_steps
        self._begin_round(order, model)
        updates = sequential.train_clients(
            algorithm, [self._data(order)], self.optimizer, self.trainer.fabric, seen, max_steps, seen
        )
        update = next(iter(updates), None)
        algorithm.clients.commit(order.client)
        return update, seen

    def _begin_round(self, order: Order, model: State) -> None:
        """Prepare the algorithm for a client in a round: the received model becomes the global model."""
        algorithm, server = self.algorithm, self.algorithm.server
        algorithm.federation = NodeFederation(
            order.round, order.max_rounds, order.num_clients, [order.client], self.optimizer
        )
        server.update(
            {name: t for name, t in model.items() if name in server.parameters},
            {name: t for name, t in model.items() if name in server.buffers},
        )
        set_learning_rates(algorithm, [self.optimizer], order.round, order.max_rounds)

    def _state_of(self, client: int, at_server: bool) -> State:
        """The client's state, which is stored at the server or here."""
        kinds = getattr(self.algorithm, "server_keeps", ())
        kept = self.algorithm.clients.of(client)
        return {name: t for name, t in kept.items() if (name.partition(".")[0] in kinds) == at_server}

    def _on_device(self, state: State) -> State:
        return {name: t.to(self.trainer.fabric.device) for name, t in state.items()}


def refuse_undeployable(algorithm: FederatedAlgorithm) -> None:
    """Refuse a method whose clients cannot train on separate machines.

    Raises:
        ValueError: With the reason.
    """
    for kind, reason in _OBSTACLES.items():
        if isinstance(algorithm, kind):
            raise ValueError(
                f"{type(algorithm).__name__} {reason}, so it cannot be deployed: simulate it with lightning-fedssl fit"
            )


_OBSTACLES: dict[type[FederatedAlgorithm], str] = {
    JointAlgorithm: "exchanges features and gradients with every client at every step",
    FedMatch: "sends clients the models of other clients",
    DataSharing: "gives clients images of the server",
    Supervised: "trains at the server alone, without clients",
}
"""The methods that only the simulation can run, and why."""


def _model_of(received: State) -> State:
    return {name: t for name, t in received.items() if not name.startswith(OPTIMIZER)}


def _part(received: State, prefix: str) -> State:
    return {name: t for name, t in received.items() if name.startswith(prefix)}


def _tensors_of(update: ClientUpdate) -> State:
    return {**update.parameters, **update.buffers, **named(PAYLOAD, update.payload)}
