"""The ClientApp: hands Flower's messages to a :class:`~lightning_fedssl.deployment.node.Node`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from lightning_fedssl.deployment.flower.records import from_records, to_records
from lightning_fedssl.deployment.messages import Kind
from lightning_fedssl.deployment.node import Node

MESSAGE_TYPES: dict[Kind, str] = {"describe": "query.describe", "moments": "query.moments", "train": "train.client"}
"""Flower's type of each kind of message."""

MakeNode = Callable[[Mapping[str, Any], Mapping[str, Any]], Node]
"""Makes a node from Flower's node configuration and run configuration."""


def make_client_app(make_node: MakeNode, mods: list[Any] | None = None) -> ClientApp:
    """The ClientApp of a deployment. Flower starts a process for each message, which makes the node anew.

    Args:
        make_node: Makes the node.
        mods: Flower's modifiers of the messages that ask a client to train, such as ``LocalDpMod``.
    """
    app = ClientApp()

    def handle(kind: Kind, message: Message, context: Context) -> Message:
        answer = make_node(context.node_config, context.run_config).answer(kind, from_records(message.content))
        return Message(to_records(answer), reply_to=message)

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
