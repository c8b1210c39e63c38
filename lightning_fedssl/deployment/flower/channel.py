"""The transport of a server: messages to clients over Flower's grid."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from lightning_fedssl.deployment.channel import Failure, Unreadable
from lightning_fedssl.deployment.flower.client import MESSAGE_TYPES
from lightning_fedssl.deployment.flower.records import from_records, to_records
from lightning_fedssl.deployment.messages import Content, Kind, MessageError

_log = logging.getLogger(__name__)

_ASK_AGAIN = 60.0
"""Seconds after which a node that has not named its clients is asked again."""


@dataclass
class _Open:
    """A message without an answer.

    Attributes:
        client: The client; for a question which clients a node has, None.
        node: The node.
        until: When to give up, in seconds of the clock.
    """

    client: int | None
    node: int
    until: float


class FlowerChannel:
    """Messages to clients over Flower's grid; see :class:`lightning_fedssl.deployment.channel.Channel`.

    A node that connects is asked which clients it has. A node that Flower no longer lists is gone, and so are its
    clients, until a node with them connects.

    Args:
        grid: Flower's grid.
        timeout: Seconds that a client has for an answer.
        connect_timeout: Seconds to wait for clients before a round.
        poll: Seconds between two looks at the grid.
        clock: Seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        grid: Grid,
        timeout: float = 3600.0,
        connect_timeout: float = 3600.0,
        poll: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.poll = poll
        self._clock, self._sleep = clock, sleep
        self._clients_of: dict[int, list[int]] = {}
        self._asked: dict[int, float] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._open: dict[str, _Open] = {}
        self._waiting_since: float | None = None

    def connected(self) -> frozenset[int]:
        """The clients whose nodes are connected now."""
        nodes = set(self.grid.get_node_ids())
        for node in [node for node in self._clients_of if node not in nodes]:
            _log.warning("the node with the clients %s has left", self._clients_of.pop(node))
        self._ask_for_clients(nodes)
        list(self._pull(describe_only=True))
        return frozenset(self._node_of())

    def _ask_for_clients(self, nodes: set[int]) -> None:
        """Ask the nodes that are new which clients they have."""
        now = self._clock()
        self._asked = {node: then for node, then in self._asked.items() if node in nodes}
        open_questions = {message.node for message in self._open.values() if message.client is None}
        for node in sorted(nodes - self._clients_of.keys() - open_questions):
            if now - self._asked.get(node, -_ASK_AGAIN) >= _ASK_AGAIN:
                self._asked[node] = now
                self._push(None, node, "describe", Content())

    def client_sizes(self) -> dict[int, tuple[int, int]]:
        """By client, the number of its labelled and of its unlabelled images, as its node has named them."""
        return dict(self._sizes)

    def _node_of(self) -> dict[int, int]:
        """The node of each client; that which has connected last if several say that they have it."""
        return {client: node for node, clients in self._clients_of.items() for client in clients}

    def wait(self) -> None:
        """Wait a moment for nodes to connect.

        Raises:
            TimeoutError: If this has taken ``connect_timeout`` seconds since a message was sent.
        """
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
            _log.info("waiting for clients; connected: %s", sorted(self._node_of()) or "none")
        if now - self._waiting_since > self.connect_timeout:
            raise TimeoutError(
                f"too few clients have connected in {self.connect_timeout:g} s (connected: {sorted(self._node_of())}): "
                "start their SuperNodes, or raise connect-timeout"
            )
        self._sleep(self.poll)

    def send(self, client: int, kind: Kind, content: Content) -> None:
        """Send a message to the node of a client."""
        self._waiting_since = None
        self._push(client, self._node_of()[client], kind, content)

    def receive(self) -> Iterator[tuple[int, Content | Failure]]:
        """The answers to all messages as they arrive, and a failure for each that will not.

        Nodes that connect meanwhile are asked for their clients, so that these can take part in the next round.
        """
        while any(message.client is not None for message in self._open.values()):
            found = list(self._pull())
            yield from found
            if not found:
                self._sleep(self.poll)

    def _push(self, client: int | None, node: int, kind: Kind, content: Content) -> None:
        message = Message(to_records(content), dst_node_id=node, message_type=MESSAGE_TYPES[kind], ttl=self.timeout)
        (message_id,) = self.grid.push_messages([message])
        self._open[message_id] = _Open(client, node, self._clock() + self.timeout)

    def _pull(self, describe_only: bool = False) -> Iterator[tuple[int, Content | Failure]]:
        """The answers that have arrived, and the failures of messages whose time is over or whose node has left."""
        wanted = [i for i, message in self._open.items() if not describe_only or message.client is None]
        for message in self.grid.pull_messages(wanted) if wanted else ():
            opened = self._open.pop(message.metadata.reply_to_message_id, None)
            if opened is not None:
                yield from self._take(opened, _content_of(message))
        nodes = set(self.grid.get_node_ids()) if wanted else set()
        if not describe_only:
            self._ask_for_clients(nodes)
        for message_id in [i for i in wanted if i in self._open]:
            opened = self._open[message_id]
            late = self._clock() > opened.until
            if late or opened.node not in nodes:
                del self._open[message_id]
                reason = f"did not answer in {self.timeout:g} s" if late else "has lost its node"
                yield from self._take(opened, Failure(reason))

    def _take(self, opened: _Open, content: Content | Failure) -> Iterator[tuple[int, Content | Failure]]:
        """The answer of a client; the clients of a node are noted instead."""
        if opened.client is not None:
            yield opened.client, content
        elif isinstance(content, Failure):
            _log.warning("a node does not name its clients: it %s", content.reason)
        else:
            self._note(opened.node, content)

    def _note(self, node: int, content: Content) -> None:
        clients, labeled, unlabeled = (_numbers(content, name) for name in ("clients", "labeled", "unlabeled"))
        if twice := sorted(self._node_of().keys() & set(clients)):
            _log.warning("two nodes say that they have the clients %s: the one that connected last is asked", twice)
        self._clients_of[node] = clients
        self._sizes |= dict(zip(clients, zip(labeled, unlabeled, strict=False), strict=False))
        _log.info("a node with the clients %s has connected", clients)


def _numbers(content: Content, name: str) -> list[int]:
    """The numbers from 0 of a value; none if it is something else."""
    value = content.values.get(name)
    entries: list[object] = list(value) if isinstance(value, list | tuple) else []
    return [entry for entry in entries if type(entry) is int and entry >= 0]


def _content_of(message: Message) -> Content | Failure:
    if message.has_error():
        return Failure(f"failed: {message.error.reason.rstrip('.')}")
    try:
        return from_records(message.content)
    except MessageError as error:
        return Unreadable(str(error))
