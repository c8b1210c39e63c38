"""The model card of an exported model, as model hubs show it."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_fedssl.export.description import Description
from lightning_fedssl.export.model_file import is_number

_CARD = """\
---
{header}---

# {method} on {data_set}

A `{network}` with {classes} classes, trained for {rounds} rounds by federated semi-supervised learning with the method
{method} of the package lightning-fedssl {version}.

## Results

{results}

## Use

`model.pt2` needs PyTorch alone. It takes {inputs}; the normalisation is inside.

```python
import torch
network = torch.export.load("model.pt2").module()
logits = network(torch.rand(1, {shape}))
```

`model.safetensors` holds the weights under the network's own names, for samples that were normalised with the mean and
the standard deviation in `model.json`.

Classes, in the order of the logits: {class_names}.

## Citation

{citation}
"""

_INPUTS = {
    "pixels": "images `(batch, {shape})` with values in 0..1",
    "numbers": "samples `(batch, {shape})` in the units of the data set",
}
"""What the exported network takes, by the ``input`` of the description."""


def model_card(description: Description) -> str:
    """The text of ``README.md``, with a header that model hubs read.

    Args:
        description: What :func:`~lightning_fedssl.export.describe_model` returned.
    """
    network = description["network"]
    shape = ", ".join(map(str, network["in_shape"]))
    method = description["algorithm"].rpartition(".")[2]
    rows = [_row(description, name, value) for name, value in sorted(description["metrics"].items())]
    return _CARD.format(
        header=yaml.safe_dump(_header(description, method), sort_keys=False),
        method=method,
        data_set=description["data_set"],
        network=(network["class_path"] or "network").rpartition(".")[2],
        classes=network["num_classes"],
        inputs=_INPUTS[description.get("input", "pixels")].format(shape=shape),
        rounds=description["rounds"],
        version=description["version"],
        results="\n".join(["| metric | value |", "|---|---|", *rows]) if rows else "The run evaluated nothing.",
        shape=shape,
        class_names=", ".join(description["class_names"]),
        citation=description["citation"],
    )


def _row(description: Description, name: str, value: float | None) -> str:
    """A row of the results; it names the round of a metric that an earlier model has."""
    rounds = description["rounds"]
    evaluated = description.get("metric_rounds", {}).get(name.partition("/")[0], rounds)
    when = "" if evaluated == rounds else f" (of round {evaluated})"
    return f"| {name}{when} | {f'{value:.4f}' if is_number(value) else '-'} |"


def _header(description: Description, method: str) -> dict[str, Any]:
    header: dict[str, Any] = {
        "library_name": "pytorch",
        "tags": ["federated-learning", "semi-supervised-learning", "lightning-fedssl", method],
        "datasets": [description["data_set"]],
    }
    if is_number(accuracy := description["metrics"].get("test/accuracy")):
        result = {
            "task": {"type": "classification"},
            "dataset": {"name": description["data_set"], "type": description["data_set"]},
            "metrics": [{"type": "accuracy", "value": accuracy}],
        }
        header["model-index"] = [{"name": f"{method} {description['data_set']}", "results": [result]}]
    return header
