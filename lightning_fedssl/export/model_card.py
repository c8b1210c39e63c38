"""The model card of an exported model, as model hubs show it."""

from __future__ import annotations

import yaml

from lightning_fedssl.export.description import Description
from lightning_fedssl.export.model_file import is_number
from lightning_fedssl.functional.dictionaries import map_values

_CARD = """\
---
{header}---

# {method} on {data_set}

A network `{network}`, trained for {rounds} rounds by federated semi-supervised learning with the
method {method} of the package lightning-fedssl {version}.

| metric | value |
|---|---|
{results}

`model.pt2` needs PyTorch alone, and has all normalisation inside; it takes {inputs} `(batch,
{shape})`:

```python
import torch
outputs = torch.export.load("model.pt2").module()(torch.rand(1, {shape}))
```

Outputs ({task}), in this order: {class_names}. They are {outputs}. `model.safetensors` holds the
weights under the network's own names, for samples that were normalised as `model.json` says.
{privacy}
{citation}
"""


def model_card(description: Description) -> str:
    """The text of ``README.md``, with a header that model hubs read.

    Args:
        description: What :func:`~lightning_fedssl.export.describe_model` returned, or a file of
            anybody has. No name in it begins a new line.
    """
    texts = map_values(_one_line, description)
    method = texts["algorithm"].rpartition(".")[2]
    header = {
        "library_name": "pytorch",
        "tags": ["federated-learning", "semi-supervised-learning", method],
    }
    privacy = (
        f"\nPrivacy: {_one_line(description['privacy']['statement'])}.\n"
        if "privacy" in description
        else ""
    )
    return _CARD.format(
        **texts
        | {
            "network": _one_line(description["network"]["class_path"] or "network"),
            "privacy": privacy,
        },
        header=yaml.safe_dump(header | {"datasets": [description["data_set"]]}, sort_keys=False),
        method=method,
        inputs="values in 0..1"
        if description.get("input") == "pixels"
        else "samples in the units of the data set",
        shape=", ".join(map(str, description["network"]["in_shape"])),
        results="\n".join(
            _row(description, name, value) for name, value in sorted(description["metrics"].items())
        ),
    )


def _row(description: Description, name: str, value: float | None) -> str:
    """A row of the results; it names the round of a metric that an earlier model has."""
    rounds = description["rounds"]
    evaluated = description.get("metric_rounds", {}).get(name.partition("/")[0], rounds)
    when = "" if evaluated == rounds else f" (of round {evaluated})"
    return f"| {_one_line(name)}{when} | {f'{value:.4f}' if is_number(value) else '-'} |"


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
