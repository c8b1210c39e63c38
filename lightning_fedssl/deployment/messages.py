"""The content of the messages between server and nodes: tensors by name, plain values, and sums of scalars.

A message carries no pickled object. Its tensors are those of the communication ledger, with the same names and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from lightning_fedssl.functional.averaging import State, sizes_of

Kind = Literal["describe", "train", "moments"]
"""What a message asks a node to do: name its clients, train a client, or measure the batch-norm moments of a client."""

Value = int | str | list[int] | list[str]

_Values = TypeVar("_Values", bound="Values")


class MessageError(ValueError):
    """A message that its receiver cannot use; the text says what is wrong with it."""


@dataclass(frozen=True)
class Content:
    """The content of a message.

    Attributes:
        tensors: Tensors by name.
        values: Plain values by name.
        metrics: For each scalar that a client logged, the weighted sum of its values and the sum of their weights.
    """

    tensors: State = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """The bytes of every tensor by its name."""
        return sizes_of(self.tensors)


@dataclass(frozen=True)
class Values:
    """A dataclass that is sent as the plain values of a message."""

    def values(self) -> dict[str, Value]:
        """The values of the message."""
        return asdict(self)

    @classmethod
    def read(cls: type[_Values], values: Mapping[str, Value]) -> _Values:
        """The object that a message holds.

        Raises:
            MessageError: If a value is missing, of another type, or not a value that it can have.
        """
        return cls(**_typed(cls, values))


@dataclass(frozen=True)
class Order(Values):
    """The values of a message that asks a node to train a client, or to measure its moments.

    Attributes:
        run: Names the run; a node keeps the files of different runs apart.
        client: The client.
        seed: The run's seed.
        round: The round, from 1.
        max_rounds: T, the length of the run in rounds.
        num_clients: M, the number of all clients.
        accepted: The last round whose update of this client the server has accepted; 0 for none.
        max_steps: Steps of the client at most; -1 for no limit.
        batch_size: Images per batch of a measurement of moments; 0 for training.
        weights: The digest of the weights that the client has downloaded before and that are therefore not sent.
        result: Names of the tensors that are the result of the client's last round.
        follow_up: 1 if the tensors are those that the client has requested in this round; else 0.
    """

    run: str
    client: int
    seed: int
    round: int
    max_rounds: int
    num_clients: int
    accepted: int = 0
    max_steps: int = -1
    batch_size: int = 0
    weights: str = ""
    result: list[str] = field(default_factory=list)
    follow_up: int = 0

    def __post_init__(self) -> None:
        # A node makes a folder of this name, which must be in its own folder whatever a server sends.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.run):
            raise MessageError(f"its run {self.run!r} is no name of letters, digits, '-' and '_'")
        if self.client < 0 or self.round < 0 or self.accepted < 0:
            raise MessageError(f"it has a negative number: client {self.client}, round {self.round}")


@dataclass(frozen=True)
class Report(Values):
    """The values of a node's answer to an :class:`Order`.

    Attributes:
        client: The client.
        round: The round.
        num_samples: Images trained on.
        num_steps: Local steps; 0 if the client skips the round.
        request: Names of tensors that the client needs in addition, before it can train.
        error: Why there is no result; empty if there is one.
    """

    client: int
    round: int
    num_samples: int = 0
    num_steps: int = 0
    request: list[str] = field(default_factory=list)
    error: str = ""


_TYPES: dict[str, type] = {"int": int, "str": str, "list[str]": list}


def _typed(kind: type[Any], values: Mapping[str, Value]) -> dict[str, Any]:
    """The values that a dataclass takes, if each is there and of its type."""
    found: dict[str, Any] = {}
    for name, described in kind.__dataclass_fields__.items():
        expected = _TYPES[str(described.type)]
        value: Any = values.get(name, [] if expected is list else None)  # a transport may leave out an empty list
        value = list(value) if isinstance(value, tuple) else value
        entries = value if isinstance(value, list) else []
        if type(value) is not expected or any(type(entry) is not str for entry in entries):
            raise MessageError(f"its value {name!r} is {value!r}, not of type {described.type}")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise MessageError(f"its value {name!r} is {value}, a number beyond 64 bits")
        found[name] = value
    return found
