"""The messages between server and nodes: tensors by name, plain values, and sums of scalars, as
Flower's records.

The tensors are those of the communication ledger, with the same names and sizes. Nothing is
pickled. What a node sends may be anything: :func:`read_answer` compares it with what the server
expects before it reads a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import LayerMoments, Moments

LAST_ROUND = "last_round."
FOR_STATISTICS = "for statistics "
"""How the names of tensors begin that are not weights or buffers, as in the ledger."""

LARGEST = 2**53
"""The largest number in a message."""

Scalars = Mapping[str, tuple[float, float]]
"""For each scalar that a client logs, the weighted sum of its values and the sum of their weights.
"""


class MessageError(ValueError):
    """An answer that the server cannot use; the text says what is wrong with it."""


def to_records(
    tensors: State, values: Mapping[str, Any], scalars: Scalars | None = None
) -> RecordDict:
    """The records of a message."""
    arrays = ArrayRecord(
        {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in tensors.items()}
    )
    sums = MetricRecord({name: list(map(float, pair)) for name, pair in (scalars or {}).items()})
    return RecordDict({"tensors": arrays, "values": ConfigRecord(dict(values)), "scalars": sums})


def read_order(records: RecordDict) -> tuple[State, dict[str, Any]]:
    """The tensors and values of a message of the server, which nodes trust."""
    tensors = {}
    for name, array in records.array_records["tensors"].items():
        tensors[name] = torch.from_numpy(np.array(array.numpy()))
    return tensors, dict(records.config_records["values"])


def read_answer(
    answer: Message, numbers: Sequence[str], expected: State, scalars: Collection[str] = ()
) -> tuple[list[int], State, dict[str, tuple[float, float]]]:
    """The whole numbers, the tensors and the scalars of a node's answer.

    Args:
        answer: The answer.
        numbers: Names of the whole numbers, from 0 to 2**53, that it must have.
        expected: Tensors of the names, shapes and types that it must have, or none of them.
        scalars: Names of scalars that it may have; others are ignored.

    Raises:
        MessageError: Whatever it has instead.
    """
    try:
        if answer.has_error():
            raise MessageError(f"failed: {printable(answer.error.reason)}")
        content = answer.content
        values = list(map(content.config_records["values"].get, numbers))
        for name, number in zip(numbers, values, strict=True):
            if type(number) is not int or not 0 <= number <= LARGEST:
                raise MessageError(f"its value {name!r} is {printable(number)}")
        sums = content.metric_records.get("scalars", {})
        arrays = content.array_records["tensors"]
        if arrays and (wrong := sorted(arrays.keys() ^ expected.keys())):
            raise MessageError(
                f"{printable(wrong[0])!r} of its tensors is {'un' * (wrong[0] in arrays)}known or "
                "missing"
            )
        # In our order, not the node's: rules that combine join the tensors of an update.
        names = [name for name in expected if name in arrays]
        tensors = {name: _tensor(name, arrays[name], expected[name]) for name in names}
        return values, tensors, {name: _pair(name, sums[name]) for name in scalars if name in sums}
    except MessageError:
        raise
    except Exception as error:  # a node may send anything
        raise MessageError(f"cannot be read ({type(error).__name__})") from error


def _pair(name: str, value: Any) -> tuple[float, float]:
    total, weight = value
    if not (math.isfinite(total) and 0 < weight <= LARGEST):
        raise MessageError(f"its scalar {name!r} is {printable(value)}")
    return float(total), float(weight)


def _tensor(name: str, array: Array, expected: Tensor) -> Tensor:
    """A tensor from the bytes that ``numpy.save`` writes of one of this shape and type.

    Others are not parsed.
    """
    kind = np.dtype(str(expected.dtype).removeprefix("torch."))
    start = max(0, len(array.data) - expected.nbytes)
    text = f"{{'descr': {kind.str!r}, 'fortran_order': False, 'shape': {tuple(expected.shape)}, }}"
    header = rb"\x93NUMPY[\x01\x02]\x00.{2,4}" + re.escape(text.encode()) + rb" {0,99}\n"
    as_expected = (array.dtype, tuple(array.shape)) == (kind.name, tuple(expected.shape))
    if not as_expected or not re.fullmatch(header, array.data[:start], re.DOTALL):
        raise MessageError(
            f"{name!r} of its tensors is {printable(array.dtype)} "
            f"{printable(tuple(array.shape[:9]))} in {len(array.data)} bytes instead of "
            f"{kind.name} {tuple(expected.shape)} as numpy saves it"
        )
    if not expected.nbytes:
        return torch.empty(expected.shape, dtype=expected.dtype)
    return torch.frombuffer(bytearray(array.data[start:]), dtype=expected.dtype).reshape(
        expected.shape
    )


def printable(text: object) -> str:
    """A text from another machine as a log may show it: at most 200 characters, without line breaks
    and escapes.
    """
    return str(text)[:200].encode("unicode_escape").decode()[:200]


def pack_moments(moments: Mapping[str, Moments]) -> State:
    """Batch-norm moments as tensors, under the names of the ledger: ``moments.LAYER.count``,
    ``mean``, ``variance``.
    """
    packed = {}
    for layer, of_layer in moments.items():
        for part, value in of_layer._asdict().items():
            packed[f"moments.{layer}.{part}"] = torch.as_tensor(value)
    return packed


def unpack_moments(tensors: State, of_two: Mapping[str, Moments], images: int) -> LayerMoments:
    """Batch-norm moments of a client with so many images; none of a client with fewer than two.

    Args:
        tensors: Those of the names, shapes and types of ``pack_moments(of_two)``, or none.
        of_two: The moments of two images at every layer.
        images: The number of the client's images.

    Raises:
        MessageError: If they are not moments of this number of images. Their values are checked
            with those of all clients.
    """
    if bool(tensors) != (images >= 2):
        raise MessageError(f"it has {'no ' * (not tensors)}moments of {images} images")
    moments = {}
    for layer, two in of_two.items() if tensors else ():
        count, mean, variance = (tensors[f"moments.{layer}.{part}"] for part in Moments._fields)
        if int(count) * 2 != images * two.count:
            raise MessageError(
                f"its moments of the layer {layer!r} are not those of {images} images"
            )
        moments[layer] = Moments(int(count), mean.to(two.mean.device), variance.to(two.mean.device))
    return moments
