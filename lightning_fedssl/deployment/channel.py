"""The interface of a transport for the server: connected clients, sending messages, and receiving answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lightning_fedssl.deployment.messages import Content, Kind


@dataclass(frozen=True)
class Failure:
    """A message without an answer.

    Attributes:
        reason: What happened, to follow the client's number in a sentence: "client 3 did not answer in 60 s".
    """

    reason: str


class Unreadable(Failure):
    """An answer that is no message of a node."""


class Channel(Protocol):
    """A transport."""

    def connected(self) -> frozenset[int]:
        """The clients whose nodes are connected now."""

    def wait(self) -> None:
        """Wait a moment for nodes to connect.

        Raises:
            TimeoutError: If the time limit is over.
        """

    def send(self, client: int, kind: Kind, content: Content) -> None:
        """Send a message to the node of a client."""

    def receive(self) -> Iterator[tuple[int, Content | Failure]]:
        """The answers to all messages as they arrive, and a failure for each that will not.

        It ends when there is no message without an answer. Messages may be sent meanwhile.
        """
