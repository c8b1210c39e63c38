"""The settings that affect a run's results, as plain values, which are saved and compared on
resuming.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.dictionaries import exclude
from lightning_fedssl.functional.optimizers import build_optimizer
from lightning_fedssl.run import Run

Settings = dict[str, Any]
"""Numbers, texts and tuples of them by their keys, such as ``model.client_epochs``."""

_UNIMPORTANT = {
    "data.root",
    "data.download",
    "data.eval_batch_size",
    "data.predict_root",
    "data.cache_dir",
    "model.num_classes",
    "model.in_shape",
    "model.task",
    "model.init_except",
    "model.init_from",
    "model.labeling_batch_size",
}
_KERNELS = {"foreach", "fused", "differentiable", "capturable", "initial_lr"}
"""Arguments of optimizers that choose an implementation and do not affect results."""
LONGEST_TEXT = 200
"""Characters of a value in a table of runs: the clients of every sample are not a column."""


def settings_of(run: Run) -> Settings:
    """The settings of trainer, model and data.

    Objects count by their class and their plain attributes.

    Data of the user's own count by hashes over all samples and labels.

    ``max_rounds`` is not among them: a run may be made longer.
    """
    algorithm = run.algorithm
    data = run.datamodule
    names = inspect.signature(FederatedDataModule).parameters
    keys = run.settings
    of_data = {name: getattr(data, name) for name in names if hasattr(data, name)}
    own_data = {"data.samples_sha256": content[:16]} if (content := data.own_data_hash()) else {}
    left_out = ("optimizer", "schedule")
    of_model = {k: v for k, v in algorithm.hparams.items() if not k.endswith(left_out)}
    settings = {
        "trainer.clients_per_round": run.clients_per_round,
        "trainer.precision": keys.precision,
        **_flat("trainer", {"faults": keys.faults, "updates": keys.updates}),
        "trainer.updates": tuple(type(rule).__name__ for rule in keys.updates),
        **_flat("data", exclude(of_data, ["partition"])),
        **own_data,
        **_flat("model", of_model),
        **_of_optimizer("model.optimizer", run.client_optimizer),
        **_of_optimizer("model.server_optimizer", run.server_optimizer),
        "model.schedule": type(algorithm.schedule).__name__,
        **_flat("model.schedule", vars(algorithm.schedule)),
    }
    if "aggregation_optimizer" in vars(algorithm):
        settings |= _of_aggregation("model.aggregation_optimizer", algorithm.aggregation_optimizer)
    return exclude(settings, _UNIMPORTANT)


def table_row_of(run: Run) -> dict[str, str | float | bool]:
    """The settings that distinguish runs in a table of runs, partition and length included.

    Lists become texts.

    Values that are not set, and lists of more than :data:`LONGEST_TEXT` characters, are left out.
    """
    data = run.datamodule
    columns = {"trainer.max_rounds": run.settings.max_rounds, **run.described}
    columns |= {"data.dataset": data.spec.name, **_flat("data", {"partition": data.partition})}
    row = {}
    for key, value in columns.items():
        if value is not None and len(str(value)) <= LONGEST_TEXT:
            row[key] = str(value) if isinstance(value, tuple) else value
    return row


def differences(saved: Settings, now: Settings) -> list[str]:
    """One phrase for each key with different values; a key that one side lacks is ignored.

    Args:
        saved: The settings of a checkpoint.
        now: Those of the present trainer.
    """
    both = sorted(saved.keys() & now.keys())
    return [f"{key} {saved[key]} (now {now[key]})" for key in both if saved[key] != now[key]]


def _of_optimizer(key: str, optimizer: Optimizer) -> Settings:
    values = exclude(optimizer.defaults, _KERNELS)
    return {key: type(optimizer).__name__, **_flat(key, values)}


def _of_aggregation(key: str, factory: Any) -> Settings:
    """The settings of an optimizer that a method makes anew in each round; None for none."""
    if factory is None:
        return {key: None}
    return _of_optimizer(key, build_optimizer(factory, [nn.Parameter(torch.zeros(1, 1))], key))


def _flat(prefix: str, values: Mapping[Any, Any], depth: int = 4) -> Settings:
    """The plain values, and those inside of mappings, lists, objects, and classes with their
    arguments.
    """
    flat: Settings = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if isinstance(value, functools.partial):
            flat |= {key: getattr(value.func, "__name__", ""), **_flat(key, value.keywords)}
        elif isinstance(value, dict) and "class_path" in value:
            flat |= {
                key: value["class_path"].rpartition(".")[2],
                **_flat(key, value.get("init_args", {})),
            }
        elif str(name).startswith("_"):
            continue
        elif _is_plain(value):
            flat[key] = tuple(value) if isinstance(value, list) else value
        elif depth and (parts := _parts(key, value)) is not None:
            flat |= {key: type(value).__name__, **_flat(key, parts, depth - 1)}
    return flat


def _parts(key: str, value: Any) -> Mapping[Any, Any] | None:
    """What a value consists of by name; None for what is not compared: data, networks, tensors and
    functions.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if (
        key == "data.dataset"
        or isinstance(value, nn.Module | Tensor | type)
        or not hasattr(value, "__dict__")
    ):
        return None
    return None if inspect.isroutine(value) else vars(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, bool, str)
