"""The description of a trained model as plain values: a part of each checkpoint, and without the
settings the content of ``model.json``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_fedssl.data.image_files import RESAMPLING
from lightning_fedssl.functional.dictionaries import first_number
from lightning_fedssl.storage.named_value import NotNamedError, named_value, named_values
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.data.datasets import Moments

Description = dict[str, Any]
"""Plain values under the keys that :func:`describe_model` documents."""


def describe_model(
    algorithm: FederatedAlgorithm,
    data: FederatedDataModule,
    settings: Mapping[str, Any],
    round_index: int,
    metrics: Mapping[str, float],
    metric_rounds: Mapping[str, int],
    privacy: Mapping[str, Any] | None,
) -> Description:
    """Describe the global model of a run.

    It is the only description of a configuration: a checkpoint, ``model.json``, the guard of
    resumed runs and the model card read it.

    The keys are ``format`` (1), ``package`` and ``version``, ``algorithm`` (class path) and its
    ``arguments``, ``settings`` (what affects the results of the run, by key; not in
    ``model.json``, because it may name files), ``network`` (class path, ``init_args``,
    ``num_classes``, ``in_shape``, and with a target for every pixel ``out_shape``; the path is None
    for a network that has no import path),
    ``data_set``, ``task``, ``outputs`` (what they mean), of numbers ``target_normalization``,
    ``class_names``, ``input`` (``pixels``, scaled to 0..1, or ``numbers`` as the data set holds
    them), ``normalization`` (mean and standard deviation of the input per channel or feature),
    ``resize`` (how image files get the size of ``in_shape``; None for other samples),
    ``trained_dtype`` (the type of the weights in the run), ``rounds``, ``metrics``,
    ``metric_rounds``, ``citation``, of a table ``inputs`` (how the cells of a row become the
    numbers that the network takes, in this order:
    :data:`~lightning_fedssl.data.table_rows.Input`) and, of a private run, ``privacy``. Of a run on
    features also ``backbone``: the frozen network in front (class path and ``init_args``) and the
    samples that it takes (``in_shape``, ``input``, ``normalization``).

    Args:
        algorithm: The method of the run.
        data: The data that it was trained on.
        settings: See above.
        round_index: The number of finished rounds.
        metrics: The last value of every scalar.
        metric_rounds: The round of the model that ``val`` and ``test`` evaluated last, which may be
            an earlier one.
        privacy: What a private run has spent (``trainer.describe_privacy()``).
    """
    return {
        "format": 1,
        "package": "lightning-fedssl",
        "version": __version__,
        "algorithm": f"{type(algorithm).__module__}.{type(algorithm).__qualname__}",
        "arguments": named_arguments(algorithm),
        "settings": dict(settings),
        "network": _describe_network(algorithm, data),
        "data_set": data.spec.name,
        **describe_data(data),
        "resize": {"function": "PIL.ImageOps.fit", "filter": RESAMPLING}
        if data.spec.pixels
        else None,
        "trained_dtype": dtype_of(algorithm),
        "rounds": round_index,
        "metrics": {
            name: float(value)
            for name, value in metrics.items()
            if name.startswith(("val", "test", "bound/"))
        },
        "metric_rounds": dict(metric_rounds),
        "citation": citation(type(algorithm)),
        **({"privacy": dict(privacy)} if privacy else {}),
        **({"backbone": _describe_backbone(data)} if data.backbone is not None else {}),
    }


def named_arguments(algorithm: FederatedAlgorithm) -> dict[str, Any]:
    """A method's arguments as plain values.

    Args:
        algorithm: The method, built for its data.
    """
    # The checkpoint has the weights, so the file that they started from need not exist any more.
    # Inference needs no optimizer, so functions that make one are left out; a default one that the
    # command line has taken is its name.
    arguments = {}
    for name, value in algorithm.hparams.items():
        function = value.func if isinstance(value, partial) else value
        makes_optimizer = name != "network" and inspect.isroutine(function)
        is_default = name.endswith("optimizer") and isinstance(value, str)
        unused = name.startswith("_") or name in ("init_from", "init_except")
        if not (unused or is_default or makes_optimizer):
            arguments[name] = value
    arguments["task"] = algorithm.task
    sizes = {"num_classes": algorithm.num_classes, "in_shape": list(algorithm.in_shape or ())}
    return named_values(arguments) | sizes


def describe_data(data: FederatedDataModule) -> Description:
    """The class names, the kind of input and its normalisation: without them, predictions mean
    something else.

    Args:
        data: The data.
    """
    unit = data.task.target_normalization()
    return {
        "task": type(data.task).__name__,
        "outputs": data.task.outputs,
        **({"target_normalization": unit} if unit else {}),
        "class_names": list(data.spec.class_names),
        "input": "pixels" if data.spec.pixels and data.backbone is None else "numbers",
        "normalization": _by_name(data.inputs.normalization),
        **({"inputs": list(map(dict, data.spec.inputs))} if data.spec.inputs else {}),
    }


def dtype_of(module: nn.Module) -> str:
    """The name of the type of a module's weights, e.g. ``float32``.

    Args:
        module: The module.
    """
    return str(first_number(module.parameters()).dtype).removeprefix("torch.")


def citation(algorithm: type[FederatedAlgorithm]) -> str:
    """The citation of a method's paper, from the docstring of its module.

    Args:
        algorithm: The method's class.
    """
    doc = inspect.cleandoc(sys.modules[algorithm.__module__].__doc__ or "")
    return " ".join(" ".join(doc.split("\n\n")[:2]).split())


def _by_name(moments: Moments) -> dict[str, list[float]]:
    return {"mean": list(moments[0]), "std": list(moments[1])}


def _named(value: Any, otherwise: Description) -> Description:
    """Class path and arguments of a network; without an import path None and the others."""
    try:
        named = named_value(value)
    except NotNamedError:
        named = {"class_path": None, "init_args": otherwise}
    return {"class_path": named["class_path"], "init_args": named.get("init_args") or {}}


def _describe_backbone(data: FederatedDataModule) -> Description:
    """The frozen network in front of the trained one, and the samples that it takes."""
    spec = data.spec
    return {
        **_named(data.backbone, {}),
        "in_shape": list(spec.in_shape),
        "input": "pixels" if spec.pixels else "numbers",
        "normalization": _by_name(data.inputs.of_samples),
    }


def _describe_network(algorithm: FederatedAlgorithm, data: FederatedDataModule) -> Description:
    """The configured network's class and arguments, with those that the data set."""
    arguments = named_values(getattr(algorithm.network, "hparams", {}))
    shape = data.task.output_shape(data.num_classes, data.in_shape)
    return {
        **_named(algorithm.hparams.get("network", algorithm.network_factory), arguments),
        "num_classes": shape[0] if data.class_names else None,
        "in_shape": list(data.in_shape) if data.class_names else [],
        **({"out_shape": list(shape)} if data.task.per_pixel else {}),
    }
