"""The API pages of the site: one for each group of objects, and one for each method. `site_hooks.py` adds them."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_fedssl import algorithms, data

PACKAGE = "lightning_fedssl"
GROUPS = {
    "Trainer and experiments": "trainer.FederatedTrainer cli.experiment.Experiment",
    "Data modules": "data.datamodule",
    "Sources of data": "data.sources",
    "Partitions": "data.partition",
    "Views": "data.augment",
    "Tasks": "task",
    "Networks": "models",
    "Callbacks": "callbacks callback",
    "Schedules, devices, metrics": "schedules system metrics",
    "Rules for updates": "updates.rule updates.acceptance updates.aggregators updates.attacks",
    "Privacy": "updates.privacy updates.accounting",
    "Extension points": "algorithm round run local_work state data.local_data sampling",
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
    for name in algorithms.__all__:
        yield name, _address(name), _page(name, [getattr(algorithms, name).__module__.removeprefix(f"{PACKAGE}.")])


def _objects(place: str) -> list[str]:
    names = [name for name in data.__all__ if getattr(data, name).__module__.startswith(f"{PACKAGE}.{place}")]
    return [f"data.{name}" for name in names] or [place]


def _address(title: str) -> str:
    return f"api/{title.lower().replace(',', '').replace(' ', '_')}.md"


def _page(title: str, objects: list[str]) -> str:
    return "\n\n".join([f"# {title}", *(f"::: {PACKAGE}.{name}" for name in objects)])


def _overview() -> str:
    titles = [*GROUPS, *algorithms.__all__]
    rows = [f"* [{title}]({_address(title).removeprefix('api/')})" for title in titles]
    rows.insert(len(GROUPS), "\n## Methods\n")
    return "\n".join([f"# API\n\nClasses can be imported from `{PACKAGE}` itself.\n", *rows])
