"""The tensors of messages: their names, as in the communication ledger, and checks of what arrives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_fedssl.deployment.messages import MessageError, Values
from lightning_fedssl.functional.averaging import State, is_finite
from lightning_fedssl.functional.batch_norm import Moments

OPTIMIZER = "optimizer."
PAYLOAD = "payload."
LAST_ROUND = "last_round."
FOR_STATISTICS = "for statistics "
"""How the names of tensors begin that are not weights or buffers, as in the ledger."""

_MOST_IMAGES = 10**9
"""No client whose number of images is not known has more."""


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


def unpack_moments(
    tensors: State, of_two: Mapping[str, Moments], images: int, device: torch.device
) -> dict[str, Moments]:
    """Batch-norm moments from the tensors that :func:`pack_moments` made.

    Args:
        tensors: The tensors of a message; none of a client with fewer than two images.
        of_two: The moments of two images at every layer, measured here.
        images: The number of the client's images; 0 if it is not known.
        device: Where the moments are needed.

    Raises:
        MessageError: If they are not finite moments of these layers, all of the same and of this number of images.
    """
    if not tensors and images < 2:
        return {}
    check_tensors(tensors, pack_moments(of_two), "moments")
    if not is_finite([t for t in tensors.values() if t.is_floating_point()]):
        raise MessageError("its moments are not finite")
    found: dict[str, Moments] = {}
    for layer, two in of_two.items():
        count, mean, variance = (tensors[f"moments.{layer}.{part}"] for part in ("count", "mean", "variance"))
        counted, rest = divmod(2 * int(count), two.count)
        images = images or min(counted, _MOST_IMAGES)
        if counted != images or rest or counted < 2:
            raise MessageError(f"its moments of the layer {layer!r} count {int(count)} values, not those of its images")
        if float(variance.min()) < 0:
            raise MessageError(f"its moments of the layer {layer!r} have a negative variance")
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


def digest_of_message(values: Values, tensors: State) -> str:
    """A digest of the values and tensors of a message, equal for a message that is repeated only."""
    text = json.dumps(values.values(), sort_keys=True) + digest(tensors, sorted(tensors))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
