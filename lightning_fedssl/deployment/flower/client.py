"""The ClientApp: hands Flower's messages to a :class:`~lightning_fedssl.deployment.node.Node`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from lightning_fedssl.deployment.flower.records import from_records, to_records
from lightning_fedssl.deployment.messages import Kind
from lightning_fedssl.deployment.node import Node

MESSAGE_TYPES: dict[Kind, str] = {"describe": "query.describe", "moments": "query.moments", "train": "train.client"}
"""Flower's type of each kind of message."""

_log = logging.getLogger(__name__)

MakeNode = Callable[[Mapping[str, Any], Mapping[str, Any]], Node]
"""Makes a node from Flower's node configuration and run configuration."""


class NodeError(Exception):
    """A node cannot answer. The text, which the server gets, has only the kind of the error; the node's log has all."""


def make_client_app(make_node: MakeNode, mods: list[Any] | None = None) -> ClientApp:
    """The ClientApp of a deployment. Flower starts a process for each message, which makes the node anew.

    Args:
        make_node: Makes the node.
        mods: Flower's modifiers of the messages that ask a client to train, such as ``LocalDpMod``.
    """
    app = ClientApp()

    def handle(kind: Kind, message: Message, context: Context) -> Message:
        try:
            answer = make_node(context.node_config, context.run_config).answer(kind, from_records(message.content))
            return Message(to_records(answer), reply_to=message)
        except Exception as error:
            # Flower sends the text of an exception to the server, and texts name files and classes of the node.
            _log.exception("the node cannot answer a message (%s)", kind)
            raise NodeError(f"{type(error).__name__}: see the log of node {context.node_id}") from None

    @app.train("client", mods=mods)  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        """Train a client."""
        return handle("train", message, context)

    @app.query("moments")  # type: ignore[untyped-decorator]
    def moments(message: Message, context: Context) -> Message:
        """Measure a client's batch-norm moments."""
        return handle("moments", message, context)

    @app.query("describe")  # type: ignore[untyped-decorator]
    def describe(message: Message, context: Context) -> Message:
        """Name the clients of the node."""
        return handle("describe", message, context)

    return app
