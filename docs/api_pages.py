"""The API pages of the site: one for each group of objects, and one for each method. `site_hooks.py` adds them."""

from __future__ import annotations

from collections.abc import Iterator

import lightning_fedssl
from lightning_fedssl import algorithms, data

PACKAGE = "lightning_fedssl"
METHODS = sorted(algorithms.__all__, key=str.lower)
GROUPS = {
    "Trainer and experiments": "trainer.trainer.FederatedTrainer cli.experiment.Experiment",
    "Data modules": "data.datamodule",
    "Sources of data": "data.sources",
    "Partitions": "data.partition",
    "Views": "data.augment",
    "Tasks": "task",
    "Networks": "models",
    "Callbacks": "callbacks callback",
    "Schedules, devices, metrics": "functional.schedules system metrics functional.optimizers.FedOpt",
    "Rules for updates": "updates.rule updates.acceptance updates.aggregators updates.attacks",
    "Privacy": "updates.privacy updates.accounting",
    "Extension points": "algorithm storage.hyperparameters.hyperparameters round run local_work state data.local_data "
    "sampling",
    "Export, comparison, deployment": "export comparison.verdicts deployment.server",
    "Functions of tensors": "functional.averaging functional.pseudo_labels functional.losses functional.contrastive "
    "functional.ema functional.batch_norm",
}
"""Modules and classes of each page; of ``data`` the public classes that are defined there."""


def pages() -> Iterator[tuple[str, str, str]]:
    """Title, address and text of every page: first the list of them, last the methods."""
    yield "All objects", "api/index.md", _overview()
    for title, places in GROUPS.items():
        objects = [name for place in places.split() for name in _objects(place)]
        yield title, _address(title), _page(title, objects)
    for name in METHODS:
        yield name, _address(name), _page(name, [getattr(algorithms, name).__module__.removeprefix(f"{PACKAGE}.")])


def _objects(place: str) -> list[str]:
    names = [name for name in data.__all__ if getattr(data, name).__module__.startswith(f"{PACKAGE}.{place}")]
    return [f"data.{name}" for name in names] or [place]


def _address(title: str) -> str:
    return f"api/{title.lower().replace(',', '').replace(' ', '_')}.md"


def _page(title: str, objects: list[str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {PACKAGE}.{name}" for name in objects)])


def _overview() -> str:
    lines = ["# API", "Classes can be imported from `lightning_fedssl` itself."]
    for title, places in GROUPS.items():
        classes = ", ".join(f"[{name}][{path}]" for place in places.split() for name, path in _classes(place))
        lines.append(f"**[{title}]({_address(title).removeprefix('api/')})** {classes}")
    methods = (f"[{name}]({_address(name).removeprefix('api/')})" for name in METHODS)
    return "\n\n".join([*lines, f"**Methods** {', '.join(methods)}"])


def _classes(place: str) -> Iterator[tuple[str, str]]:
    """Names and paths of the public classes that a module or folder of the package defines."""
    for name in sorted(lightning_fedssl.__all__):
        path = f"{getattr(getattr(lightning_fedssl, name), '__module__', '')}.{name}"
        if f"{path}.".startswith(f"{PACKAGE}.{place}."):
            yield name, path
