"""The transport of a server: messages to clients over Flower's grid."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from lightning_fedssl.deployment.channel import Failure, Unreadable
from lightning_fedssl.deployment.flower.client import MESSAGE_TYPES
from lightning_fedssl.deployment.flower.records import from_records, to_records
from lightning_fedssl.deployment.messages import Content, Kind, MessageError

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Open:
    """A message without an answer.

    Attributes:
        client: The client; for a question which clients a node has, None.
        node: The node.
        kind: What it asks for.
        content: Its content.
        limit: Seconds that the node has for an answer.
        until: When these are over, in seconds of the clock.
        sent: When it was sent last.
    """

    client: int | None
    node: int
    kind: Kind
    content: Content
    limit: float
    until: float
    sent: float


@dataclass
class _Question:
    """When a node was last asked for its clients, and after how many seconds without an answer it is asked again."""

    sent: float
    patience: float


class FlowerChannel:
    """Messages to clients over Flower's grid; see :class:`lightning_fedssl.deployment.channel.Channel`.

    A node that connects is asked which clients it has. A node that Flower no longer lists is gone, and so are its
    clients, until a node with them connects.

    Flower loses a message if the connection breaks while the node fetches it, and an answer if it breaks at the wrong
    moment while the node sends it. The SuperLink reports some losses. To find the others, a node that has not answered
    for long is asked for its clients, too: a SuperNode answers its messages one after another, so once it has answered
    this question, every older message without an answer is lost. A lost message is sent again, and
    :class:`~lightning_fedssl.deployment.node.Node` trains only once for it.

    Args:
        grid: Flower's grid.
        timeout: Seconds that a client has for an answer.
        connect_timeout: Seconds to wait for clients before a round.
        repeat_after: Seconds without an answer after which a node is asked for its clients; twice as many before each
            further question, as the node may still be training.
        poll: Seconds between two looks at the grid.
        clock: Seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        grid: Grid,
        timeout: float = 3600.0,
        connect_timeout: float = 3600.0,
        repeat_after: float = 60.0,
        poll: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.repeat_after = repeat_after
        self.poll = poll
        self._clock, self._sleep = clock, sleep
        self._clients_of: dict[int, list[int]] = {}
        self._questions: dict[int, _Question] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._open: dict[str, _Open] = {}
        self._waiting_since: float | None = None

    def connected(self) -> frozenset[int]:
        """The clients whose nodes are connected now."""
        nodes = set(self.grid.get_node_ids())
        for node in [node for node in self._clients_of if node not in nodes]:
            _log.warning("the node with the clients %s has left", self._clients_of.pop(node))
        list(self._pull())
        return frozenset(self._node_of())

    def _ask_for_clients(self, nodes: set[int]) -> None:
        """Ask the nodes that are new, and those that have not answered for long, which clients they have."""
        now = self._clock()
        silent = {m.node for m in self._open.values() if m.client is not None and now - m.sent >= self.repeat_after}
        for node in sorted(nodes & (silent | nodes - self._clients_of.keys())):
            asked = self._questions.get(node)
            if asked is None or now - asked.sent >= asked.patience:
                question = _Question(now, 2 * asked.patience if asked else self.repeat_after)
                self._questions[node] = question
                # A node that trains has at most one question waiting: the older ones expire.
                self._ask(None, node, "describe", Content(), question.patience if node in silent else self.timeout)

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
        self._ask(client, self._node_of()[client], kind, content, self.timeout)

    def receive(self) -> Iterator[tuple[int, Content | Failure]]:
        """The answers to all messages as they arrive, and a failure for each that will not.

        Nodes that connect meanwhile are asked for their clients, so that these can take part in the next round.
        """
        while any(message.client is not None for message in self._open.values()):
            found = list(self._pull())
            yield from found
            if not found:
                self._sleep(self.poll)

    def _pull(self) -> Iterator[tuple[int, Content | Failure]]:
        """The answers that have arrived, and the failures of messages whose time is over or whose node has left."""
        nodes, now = set(self.grid.get_node_ids()), self._clock()
        self._ask_for_clients(nodes)
        answered: list[_Open] = []
        lost: list[_Open] = []
        for answer in self.grid.pull_messages(list(self._open)) if self._open else ():
            if (message := self._open.pop(answer.metadata.reply_to_message_id, None)) is None:
                continue  # it was sent twice, and the other answer has arrived before
            if _is_lost(answer) and now < message.until:
                lost.append(message)
                continue
            answered.append(message)
            self._close(message)
            yield from self._take(message, _content_of(answer))
        for message in dict.fromkeys([*lost, *self._overtaken(answered)]):
            if message not in answered:
                self._send_again(message)
        yield from self._failures(nodes, now)

    def _send_again(self, message: _Open) -> None:
        if message.client is not None:
            _log.warning("a message to client %d or its answer was lost; the message is sent again", message.client)
        self._push(message)

    def _overtaken(self, answered: Sequence[_Open]) -> Iterator[_Open]:
        """The messages to clients that are older than a question which their node has answered."""
        for question in (message for message in answered if message.client is None):
            for message in self._open.values():
                if message.client is not None and message.node == question.node and message.sent < question.sent:
                    yield message

    def _failures(self, nodes: set[int], now: float) -> Iterator[tuple[int, Content | Failure]]:
        """A failure for each message whose time is over or whose node is not among the connected nodes."""
        for message in dict.fromkeys(self._open.values()):
            late = now > message.until
            if late or message.node not in nodes:
                self._close(message)
                reason = f"did not answer in {message.limit:g} s" if late else "has lost its node"
                yield from self._take(message, Failure(reason))

    def _ask(self, client: int | None, node: int, kind: Kind, content: Content, limit: float) -> None:
        """Send a new message to a node, which has ``limit`` seconds for an answer."""
        now = self._clock()
        self._push(_Open(client, node, kind, content, limit, now + limit, now))

    def _push(self, message: _Open) -> None:
        """Send a message, for the first time or again."""
        message.sent = self._clock()
        records, ttl = to_records(message.content), max(1.0, message.until - message.sent)
        sent = Message(records, dst_node_id=message.node, message_type=MESSAGE_TYPES[message.kind], ttl=ttl)
        (message_id,) = self.grid.push_messages([sent])
        self._open[message_id] = message

    def _close(self, message: _Open) -> None:
        """Forget a message, which may have been sent several times."""
        self._open = {i: other for i, other in self._open.items() if other is not message}

    def _take(self, message: _Open, content: Content | Failure) -> Iterator[tuple[int, Content | Failure]]:
        """The answer of a client; the clients of a node are noted instead."""
        if not isinstance(content, Failure):
            self._questions.pop(message.node, None)
        if message.client is not None:
            yield message.client, content
        elif not isinstance(content, Failure):
            self._note(message.node, content)
        elif message.node not in self._clients_of:
            _log.warning("a node does not name its clients: it %s", content.reason)

    def _note(self, node: int, content: Content) -> None:
        """Note the clients of a node."""
        clients, labeled, unlabeled = (_numbers(content, name) for name in ("clients", "labeled", "unlabeled"))
        self._sizes |= dict(zip(clients, zip(labeled, unlabeled, strict=False), strict=False))
        if self._clients_of.get(node) == clients:
            return  # it was asked because it had not answered for long
        self._clients_of.pop(node, None)
        if twice := sorted(self._node_of().keys() & set(clients)):
            _log.warning("two nodes say that they have the clients %s: the one that connected last is asked", twice)
        self._clients_of[node] = clients
        _log.info("a node with the clients %s has connected", clients)


def _numbers(content: Content, name: str) -> list[int]:
    """The numbers from 0 of a value; none if it is something else."""
    value = content.values.get(name)
    entries: list[object] = list(value) if isinstance(value, list | tuple) else []
    return [entry for entry in entries if type(entry) is int and entry >= 0]


def _is_lost(answer: Message) -> bool:
    """Whether the SuperLink reports that a message or its answer does not exist any more."""
    return bool(answer.has_error() and answer.error.code == ErrorCode.MESSAGE_UNAVAILABLE)


def _content_of(message: Message) -> Content | Failure:
    if message.has_error():
        reason = (message.error.reason or f"error {message.error.code} without a reason").rstrip(".")
        return Failure(f"failed: {reason}")
    try:
        return from_records(message.content)
    except MessageError as error:
        return Unreadable(str(error))
