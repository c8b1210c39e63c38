from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs import build_methods_page
from docs.build_methods_page import Features, features, methods, page, smallest_config, target
from lightning_fedssl import algorithms
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.cli.lightning_cli import FederatedCLI


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def found() -> dict[str, Features]:
    """What is seen of every method."""
    return {method.__name__: features(method) for method in methods() if smallest_config(method) is not None}


def test_every_method_has_a_row_of_its_own_configuration(found: dict[str, Features]) -> None:
    public = {name for name in algorithms.__all__ if issubclass(getattr(algorithms, name), FederatedAlgorithm)}
    assert {method.__name__ for method in methods()} == public >= set(found)
    assert len({features.config for features in found.values()}) == len(found)


def test_the_page_is_what_the_code_says(found: dict[str, Features]) -> None:
    """A new method needs no row to be tested; a row that is there must be right, and names no method that is gone."""
    text = target().read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert listed <= found.keys()
    assert text == page([features for name, features in found.items() if name in listed]), (
        "docs/methods.md is not up to date: python docs/build_methods_page.py writes it"
    )


def test_what_is_known_of_some_methods_is_found(found: dict[str, Features]) -> None:
    assert found["FedAvg"].labels == ("clients",)
    assert found["FedAvg"].seams == ("training_step",)
    assert found["FedAvg"].up == {"weights": found["FedAvg"].weights} == found["FedAvg"].down
    assert found["Supervised"].up == found["Supervised"].down == {}
    assert found["SemiFL"].labels == ("server",)
    assert "StaticBatchNorm" in found["SemiFL"].brings
    assert "control" in found["FedSHVR"].clients_keep
    assert found["EASGD"].clients_keep == ()
    assert found["EASGD"].server_keeps == ("buffers", "optimizer of each slot", "weights of each slot")
    assert found["FedRGD"].up["optimizer state"] == found["FedRGD"].up["weights"]
    assert found["FedMatch"].clients_keep == ("rate",)
    assert {"embedding of each client", "psi of each client"} < set(found["FedMatch"].server_keeps)
    assert found["FedMatch"].down["weights (helper)"] > 0
    for name in ("SemiFL", "FixMatch"):
        assert found[name].down["weights (for statistics)"] == found[name].weights
        assert "weights" not in found[name].down  # the sweep has brought them
    assert found["SemiFL"].takes == ("batch", "static_batch", "group", "none")
    assert found["FedSwitch"].takes == found["SemiSFL"].takes == ("batch", "group", "none")
    assert all(features.together.startswith(("yes", "no")) for features in found.values())


def test_a_method_that_sends_more_or_cannot_be_stacked_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chatty(FedAvg):
        """Counts its steps in an attribute, and sends its weights twice."""

        steps = 0

        def training_step(self, *args: Any) -> Any:
            self.steps += 1
            return super().training_step(*args)

        def upload_sizes(self, update: Any) -> dict[str, int]:
            sizes = super().upload_sizes(update)
            return {**sizes, **{f"payload.extra.{name}": size for name, size in sizes.items()}}

    config = smallest_config(FedAvg)
    assert config is not None
    own = config.parent / config.name
    monkeypatch.setattr(build_methods_page, "smallest_config", lambda method: own)

    def with_chatty(arguments: list[str], **kwargs: Any) -> Any:
        cli = FederatedCLI(arguments, **kwargs)
        cli.model.__class__ = Chatty
        return cli

    monkeypatch.setattr("docs.build_methods_page.FederatedCLI", with_chatty)
    seen = features(Chatty)
    assert seen.up == {"weights": seen.weights, "weights (payload.extra)": seen.weights}
    assert (
        seen.together == "no: training_step changes the attribute steps, which clients that train together would share"
    )
    assert "| no | batch, static batch, group, none |" in page([seen])
    assert "| yes | batch, static batch |" in page([replace(seen, takes=("batch", "static_batch"))])
    row = next(line for line in page([seen]).splitlines() if "`Chatty`" in line)
    assert row == "| `Chatty` | clients | weights x 1 | weights x 1, weights (payload.extra) x 1 | nothing | nothing |"


def test_a_method_without_a_configuration_is_named() -> None:
    class Homeless(FedAvg):
        """No file names it."""

    with pytest.raises(ValueError, match="Homeless has no configuration: add configs/"):
        features(Homeless)
