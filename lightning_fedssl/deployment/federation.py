"""The server side of a deployment: a federation whose clients train on separate machines."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedSHVR
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.deployment.channel import Channel, Failure, Unreadable
from lightning_fedssl.deployment.messages import Content, Kind, MessageError, Order, Report
from lightning_fedssl.deployment.node import refuse_undeployable
from lightning_fedssl.deployment.tensors import (
    FOR_STATISTICS,
    LAST_ROUND,
    OPTIMIZER,
    digest,
    named,
    parts_of,
    unpack_moments,
)
from lightning_fedssl.deployment.uploads import check_optimizer, first_optimizer_state, moments_of_two, read_update
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import Moments
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer.federation import Federation, measure_moments

_log = logging.getLogger(__name__)

STATE = "deployment"
"""The kind of client state, and the entry of ``ServerState.extra``, in which the server stores its progress."""

_RESULT = "result of round "
_OF_SERVER = ("server/", "val/", "test/", "communication/", "time/", "group/", "system/", "lr")
"""How the names of scalars begin that a client cannot log."""


class DeployedFederation(Federation):
    """A server whose clients train on separate machines; see :class:`lightning_fedssl.trainer.federation.Federation`.

    The rounds are those of the simulation with the same configuration, down to the random numbers. Clients whose nodes
    are not connected, fail or answer too late miss the round (``client/absent``); a message that cannot be read is
    rejected (``client/refused``), like an update that is not finite.

    Args:
        trainer: The trainer.
        channel: The transport.
        wait_for: Clients that must be connected before the first round. Later rounds wait only while no client is
            connected; a drawn client that is not connected misses its round.

    Raises:
        ValueError: If the method, a callback or a key of the trainer cannot be deployed.
    """

    def __init__(self, trainer: FederatedTrainer, channel: Channel, wait_for: int = 1) -> None:
        super().__init__(trainer)
        check_deployable(trainer)
        self.channel = channel
        self._needed = wait_for
        self._held: dict[int, int] = {}
        self._digest = (-1, "")
        self._moments_of_two: dict[str, Moments] | None = None
        self._optimizer_state = first_optimizer_state(trainer) if self._keeps_optimizers() else {}

    def start_round(self) -> None:
        """Begin a round when clients are connected."""
        super().start_round()
        self._run_name()  # every checkpoint of a deployment has it, also if no client takes part
        needed, self._needed = self._needed, 1
        while len(connected := self.reached(range(self.num_clients))) < needed:
            self.channel.wait()
        if not set(connected) & set(self.cohort):
            _log.warning("round %d: no client of the cohort is connected: nobody trains in it", self.round_index)

    def end_round(self) -> None:
        """Store the parts of the round's result that its clients need; delete results that no client needs any more."""
        extra, algorithm = self.trainer.algorithm.server.extra, self.trainer.algorithm
        result = algorithm.result_for_clients() if isinstance(algorithm, FedSHVR) else {}
        if result:
            extra[f"{_RESULT}{self.round_index}"] = {name: t.detach().clone() for name, t in result.items()}
        waiting = {f"{_RESULT}{self._accepted_round(client)}" for client in range(self.num_clients)}
        for name in [name for name in extra if name.startswith(_RESULT) and name not in waiting]:
            del extra[name]

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Let the nodes train the cohort; the updates are yielded in the order of the cohort."""
        self.trainer.call("on_client_phase_start")
        return self.accepted(self._train_at_nodes(self.start_clients()))

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """Not possible: clients and server would exchange messages at every step.

        Raises:
            ValueError: In any case.
        """
        raise ValueError(f"{type(self.trainer.algorithm).__name__} trains clients and server together: simulate it")

    def reached(self, clients: Sequence[int]) -> Sequence[int]:
        """Those whose nodes are connected."""
        connected = self.channel.connected()
        return [client for client in clients if client in connected]

    def moments(self, parties: Sequence[int], batch_size: int) -> Iterator[tuple[int, dict[str, Moments]]]:
        """Measure the moments of the server here, and let the nodes measure those of the clients."""
        server = self.trainer.algorithm.server
        orders = {k: replace(self._order(k), batch_size=batch_size) for k in parties if k != sampling.SERVER}
        weights = named(FOR_STATISTICS, server.parameters)
        answers = self._ask("moments", {k: Content(weights, order.values()) for k, order in orders.items()})
        for party in parties:
            if party == sampling.SERVER:
                yield party, measure_moments(self.trainer.algorithm, self.trainer.local_data(party), batch_size)
            elif (answer := answers.get(party)) is not None:
                self._held[party] = server.version
                try:
                    found = self._read_moments(party, _readable(answer))
                except MessageError as error:
                    _log.warning("round %d: client %d: %s; statistics without it", self.round_index, party, error)
                else:
                    yield party, found

    def _read_moments(self, client: int, answer: Content) -> dict[str, Moments]:
        """The moments of a client.

        Raises:
            MessageError: If the answer is of another client or round, or cannot be combined with the server's moments.
        """
        self._check_origin(client, Report.read(answer.values))
        if self._moments_of_two is None:
            self._moments_of_two = moments_of_two(self.trainer.algorithm, self.trainer.dtype)
        images = self._client_sizes[client]
        return unpack_moments(answer.tensors, self._moments_of_two, images, self.trainer.fabric.device)

    def _check_origin(self, client: int, report: Report) -> None:
        if (report.client, report.round) != (client, self.round_index):
            raise MessageError(f"it is of client {report.client} in round {report.round}")

    # One round of messages.

    def _train_at_nodes(self, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        answers = self._ask("train", {client: self._message(client) for client in clients})
        for client in clients:
            answer = answers.pop(client, None)
            if answer is None:
                self.trainer.counter.add("client/absent", 1)
                continue
            try:
                update = self._receive(client, _readable(answer))
            except MessageError as error:
                self.client_judged(client, f"sent a message that cannot be used: {error}")
                continue
            self.trainer.counter.add("client/trained", float(update is not None))
            self.trainer.counter.add("client/images", float(update.num_samples if update is not None else 0))
            if update is not None:
                yield update

    def _ask(self, kind: Kind, messages: Mapping[int, Content]) -> dict[int, Content | Unreadable]:
        """Send a message to each client that is connected; the answers of those that give one."""
        answers: dict[int, Content | Unreadable] = {}
        sent = {client: set(content.tensors) for client, content in messages.items()}
        connected = self.channel.connected()
        for client in (client for client in messages if client in connected):
            self._send(client, kind, messages[client])
        for client, answer in self.channel.receive():
            if isinstance(answer, Unreadable):
                answers[client] = answer
            elif isinstance(answer, Failure):
                self._log_absence(client, answer.reason)
            elif error := answer.values.get("error"):
                self._log_absence(client, str(error))
            elif kind == "train" and (request := answer.values.get("request")):
                self._send_request(client, messages[client], request, sent[client])
            else:
                answers[client] = answer
        return answers

    def _log_absence(self, client: int, reason: str) -> None:
        _log.warning("round %d: client %d %s; the round goes on without it", self.round_index, client, reason)

    def _send(self, client: int, kind: Kind, content: Content) -> None:
        """Send a message, and count a broadcast; the callback that asks for moments counts those itself."""
        self.channel.send(client, kind, content)
        if kind == "train":
            self.transfer(client, "down", content.sizes())

    def _send_request(self, client: int, first: Content, request: object, sent: set[str]) -> None:
        """Send tensors that a client has requested, each at most once; ``sent`` gets their names."""
        known = {**self.trainer.algorithm.server.model(), **self.trainer.algorithm.broadcast(client)}
        names = [name for name in request if isinstance(name, str)] if isinstance(request, list) else []
        if names != request or any(name not in known or name in sent for name in names):
            self._log_absence(client, f"requests {request}, which it cannot have")
            return
        sent.update(names)
        order = replace(Order.read(first.values), follow_up=1)
        self._send(client, "train", Content({name: known[name] for name in names}, order.values()))

    # What a client is sent.

    def _order(self, client: int) -> Order:
        max_steps = self.trainer.max_steps
        return Order(
            run=self._run_name(), client=client, seed=self.trainer.seed, round=self.round_index,
            max_rounds=self.max_rounds, num_clients=self.num_clients, accepted=self._accepted_round(client),
            max_steps=-1 if max_steps is None else max_steps,
        )  # fmt: skip

    def _message(self, client: int) -> Content:
        """The message that asks a client to train: its broadcast, the state that the server keeps for it, a result.

        Raises:
            RuntimeError: If the method counts a download that the message does not have, or the other way round.
        """
        algorithm, order = self.trainer.algorithm, self._order(client)
        broadcast = self._received[client] = algorithm.broadcast(client)
        counted = algorithm.download_sizes(client, broadcast)
        result = self._result_for(client, order.accepted)
        held = {name: t for name, t in broadcast.items() if name not in counted}
        if held and self._held.get(client) == algorithm.server.version:
            order = replace(order, weights=self._digest_of_weights())
        else:
            held = {}
        order = replace(order, result=list(result))
        kept = self._kept_at_server(client)
        sent = {name: t for name, t in {**broadcast, **kept}.items() if name not in held}
        sent |= {name: t for name, t in result.items() if not self._is_in_broadcast(name, t, order, broadcast)}
        content = Content(sent, order.values())
        self._compare(counted, {n: s for n, s in content.sizes().items() if n in counted or n not in broadcast}, client)
        return content

    def _kept_at_server(self, client: int) -> State:
        """The client's optimizer state, if the server keeps it."""
        algorithm = self.trainer.algorithm
        if not self._keeps_optimizers():
            return {}
        return named(OPTIMIZER, algorithm.clients.get(algorithm.state_owner(client), "optimizer"))

    def _keeps_optimizers(self) -> bool:
        algorithm = self.trainer.algorithm
        return algorithm.keep_client_optimizer and "optimizer" in getattr(algorithm, "server_keeps", ())

    def _result_for(self, client: int, accepted: int) -> State:
        return self.trainer.algorithm.server.extra.get(f"{_RESULT}{accepted}", {}) if accepted else {}

    def _is_in_broadcast(self, name: str, tensor: Tensor, order: Order, broadcast: State) -> bool:
        """Whether a tensor of the last round's result is what the client downloads anyway."""
        same = broadcast.get(name.removeprefix(LAST_ROUND)) if name.startswith(LAST_ROUND) else None
        return order.accepted == order.round - 1 and same is not None and torch.equal(same, tensor)

    def _compare(self, counted: Mapping[str, int], sent: Mapping[str, int], client: int) -> None:
        """Refuse a method whose messages differ from the communication that it counts."""
        if counted != sent:
            name = sorted(set(counted.items()) ^ set(sent.items()))[0][0]
            method = type(self.trainer.algorithm).__name__
            raise RuntimeError(
                f"{method} counts {counted.get(name, 0)} bytes of {name!r} between the server and client {client}, but "
                f"the message has {sent.get(name, 0)}: a method can be deployed only if its download_sizes and "
                "upload_sizes are what it sends"
            )

    def _digest_of_weights(self) -> str:
        server = self.trainer.algorithm.server
        if self._digest[0] != server.version:
            self._digest = (server.version, digest(server.parameters, sorted(server.parameters)))
        return self._digest[1]

    # What a client has sent.

    def _receive(self, client: int, answer: Content) -> ClientUpdate | None:
        """The update of a client, with its state and scalars staged until it is accepted; None if it skips the round.

        Raises:
            MessageError: If the message is not what the algorithm expects.
        """
        algorithm, report, tensors = self.trainer.algorithm, Report.read(answer.values), self._on_device(answer.tensors)
        self._check_origin(client, report)
        update, optimizer = None, parts_of(tensors, OPTIMIZER)
        if tensors and not report.num_steps:
            raise MessageError("it has tensors, but the client has made no step")
        if report.num_steps:
            check_optimizer(optimizer, self._optimizer_state, parts_of(self._kept_at_server(client), OPTIMIZER))
        if wrong := [name for name in answer.metrics if name.startswith(_OF_SERVER)]:
            raise MessageError(f"it logs {wrong[0]!r}, which only the server logs")
        if report.num_steps:
            update = read_update(algorithm, report, {n: t for n, t in tensors.items() if not n.startswith(OPTIMIZER)})
        with algorithm.clients.stage(client):
            algorithm.clients.put(client, STATE, {"accepted": torch.tensor(self.round_index)})
            if optimizer:
                algorithm.clients.put(algorithm.state_owner(client), "optimizer", optimizer)
            for name, (total, weight) in answer.metrics.items():
                self.trainer.log(name, total / weight, weight)
            if update is not None:
                self._count_upload(update, answer)
                self.trainer.call("on_client_end", update)
        if update is None:
            self.client_judged(client, None)
        return update

    def _count_upload(self, update: ClientUpdate, content: Content) -> None:
        """Count an upload, and compare it with what the method counts; a number of 8 bytes is no tensor."""
        sizes, counted = content.sizes(), self.trainer.algorithm.upload_sizes(update)
        numbers = {name for name, size in counted.items() if size == 8 and name not in sizes}
        self._compare({n: s for n, s in counted.items() if n not in numbers}, sizes, update.client)
        self.transfer(update.client, "up", counted)

    def _on_device(self, state: State) -> State:
        return {name: t.to(self.trainer.fabric.device) for name, t in state.items()}

    # What the server remembers, in every checkpoint.

    def _accepted_round(self, client: int) -> int:
        """The last round whose update of a client was accepted, or which the client skipped; 0 for none."""
        kept = self.trainer.algorithm.clients.get(client, STATE)
        return int(kept["accepted"]) if kept else 0

    def _run_name(self) -> str:
        """A random name of the run, which a resumed run has too."""
        extra = self.trainer.algorithm.server.extra
        if STATE not in extra:
            extra[STATE] = {"run": torch.tensor(secrets.randbits(62))}
        return f"{int(extra[STATE]['run']):016x}"


def _readable(answer: Content | Unreadable) -> Content:
    if isinstance(answer, Unreadable):
        raise MessageError(answer.reason)
    return answer


def check_deployable(trainer: FederatedTrainer) -> None:
    """Refuse what only a simulation can do, and name the callbacks that have nothing to do.

    Raises:
        ValueError: With the reason and the remedy.
    """
    refuse_undeployable(trainer.algorithm)
    refuse_callbacks(trainer.callbacks)
    if trainer.fabric.world_size > 1:
        raise ValueError("trainer.devices gives several devices, but the server of a deployment uses one: set it to 1")
    unused = {name for hook in ("on_client_start", "on_client_batch_end") for name in _names(trainer, hook)}
    if unused:
        _log.info("callbacks that need the clients' data log nothing in a deployment: %s", ", ".join(sorted(unused)))


def refuse_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that a deployment cannot have with the values of their keys.

    Raises:
        ValueError: With the reason and the remedy.
    """
    for callback in callbacks:
        if isinstance(callback, StaticBatchNorm) and callback.source == "pooled":
            raise ValueError(
                "StaticBatchNorm: source pooled needs the clients' data at the server, and data do not leave a "
                "node: use source server or moments"
            )
        if isinstance(callback, FederatedCheckpoint) and callback.every_n_rounds > 1:
            raise ValueError(
                f"FederatedCheckpoint: every_n_rounds is {callback.every_n_rounds}, but a server that resumed an older "
                "round would find clients with newer states: set it to 1 in a deployment"
            )


def _names(trainer: FederatedTrainer, hook: str) -> Iterable[str]:
    return (type(callback).__name__ for callback in trainer.listeners(hook))
