"""The content of the messages between server and nodes: tensors by name, plain values, and sums of scalars.

A message carries no pickled object. Its tensors are those of the communication ledger, with the same names and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedssl.functional.averaging import State, is_finite, sizes_of
from lightning_fedssl.functional.batch_norm import Moments

Kind = Literal["describe", "train", "moments"]
"""What a message asks a node to do: name its clients, train a client, or measure the batch-norm moments of a client."""

Value = int | str | list[int] | list[str]

OPTIMIZER = "optimizer."
PAYLOAD = "payload."
LAST_ROUND = "last_round."
FOR_STATISTICS = "for statistics "
"""How the names of tensors begin that are not weights or buffers, as in the ledger."""


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
class Order:
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

    def values(self) -> dict[str, Value]:
        """The values of the message."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Value]) -> Order:
        """The order of a message.

        Raises:
            MessageError: If a value is missing or of another type.
        """
        return cls(**_typed(cls, values))


@dataclass(frozen=True)
class Report:
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

    def values(self) -> dict[str, Value]:
        """The values of the message."""
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Value]) -> Report:
        """The report of a message.

        Raises:
            MessageError: If a value is missing or of another type.
        """
        return cls(**_typed(cls, values))


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
        found[name] = value
    return found


def check_tensors(found: State, expected: State, what: str) -> None:
    """Refuse tensors whose names, shapes or types are not those that are expected.

    Args:
        found: The tensors of a message.
        expected: Tensors of the right shapes and types.
        what: What they are, for the message.

    Raises:
        MessageError: Naming the first tensor that differs.
    """
    if wrong := sorted(found.keys() ^ expected.keys()):
        raise MessageError(f"its {what} have other names: {wrong[0]!r} is {_where(wrong[0], found)}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise MessageError(f"{name!r} of its {what} is {_shape(tensor)} instead of {_shape(expected[name])}")


def _where(name: str, found: State) -> str:
    return "unknown" if name in found else "missing"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def parts_of(tensors: State, prefix: str) -> State:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def named(prefix: str, tensors: State) -> State:
    """The same tensors with a prefix before every name."""
    return {f"{prefix}{name}": t for name, t in tensors.items()}


def pack_moments(moments: Mapping[str, Moments]) -> State:
    """Batch-norm moments as tensors, under the names of the ledger: ``moments.LAYER.count``, ``mean``, ``variance``."""
    return {
        f"moments.{layer}.{part}": torch.as_tensor(getattr(found, part))
        for layer, found in moments.items()
        for part in ("count", "mean", "variance")
    }


def unpack_moments(tensors: State, channels: Mapping[str, int], device: torch.device) -> dict[str, Moments]:
    """Batch-norm moments from the tensors that :func:`pack_moments` made.

    Args:
        tensors: The tensors of a message.
        channels: The number of channels of every batch-norm layer by its name.
        device: Where the moments are needed.

    Raises:
        MessageError: If they are not finite moments of these layers.
    """
    layers = dict.fromkeys(name.removeprefix("moments.").rpartition(".")[0] for name in tensors)
    found: dict[str, Moments] = {}
    for layer in layers:
        count, mean, variance = (tensors.get(f"moments.{layer}.{part}") for part in ("count", "mean", "variance"))
        if layer not in channels or count is None or mean is None or variance is None:
            raise MessageError(f"its moments of the layer {layer!r} are incomplete, or there is no such layer")
        if count.dim() or count.dtype != torch.int64 or int(count) < 2:
            raise MessageError(f"its moments of the layer {layer!r} have no count")
        of_channels = {tuple(t.shape) for t in (mean, variance)} == {(channels[layer],)}
        if not of_channels or not is_finite([mean, variance]) or float(variance.min()) < 0:
            raise MessageError(f"its moments of the layer {layer!r} are not numbers of {channels[layer]} channels")
        found[layer] = Moments(int(count), mean.to(device), variance.to(device))
    return found


def digest(tensors: State, names: Sequence[str]) -> str:
    """A digest of the names and contents of tensors, equal for equal tensors only."""
    total = hashlib.blake2b(digest_size=16)
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
