"""Contents of messages as Flower's records, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from lightning_fedssl.deployment.messages import Content, MessageError

_TENSORS, _VALUES, _METRICS = "tensors", "values", "metrics"
_DTYPES = ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")


def to_records(content: Content) -> RecordDict:
    """The records of a content: its tensors as arrays, its values as a configuration, its scalars as metrics."""
    arrays = {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in content.tensors.items()}
    values = {name: list(v) if isinstance(v, list) else v for name, v in content.values.items()}
    metrics = {name: [float(total), float(weight)] for name, (total, weight) in content.metrics.items()}
    return RecordDict({_TENSORS: ArrayRecord(arrays), _VALUES: ConfigRecord(values), _METRICS: MetricRecord(metrics)})


def from_records(records: RecordDict) -> Content:
    """The content of records from another machine, which may be anything.

    Raises:
        MessageError: If a record is missing, or an array cannot be read. Pickled objects are not read.
    """
    try:
        arrays, values = records.array_records[_TENSORS], records.config_records[_VALUES]
        metrics = records.metric_records.get(_METRICS, {})
    except KeyError as error:
        raise MessageError(f"it has no record {error}") from error
    return Content(
        {name: _tensor(name, array) for name, array in arrays.items()},
        dict(values),
        {name: _pair(name, value) for name, value in metrics.items()},
    )


def _tensor(name: str, array: Array) -> torch.Tensor:
    try:
        values = array.numpy()  # np.load without pickle
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise MessageError(f"its array {name!r} cannot be read ({type(error).__name__})") from error
    if values.dtype.name not in _DTYPES:
        raise MessageError(f"its array {name!r} has the type {values.dtype}")
    return torch.from_numpy(np.array(values, order="C"))  # a copy: the bytes of a message cannot be written to


def _pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2 or not np.isfinite(value).all() or not value[1] > 0:
        raise MessageError(f"its scalar {name!r} is {value!r}, not a sum and a weight above 0")
    return float(value[0]), float(value[1])
