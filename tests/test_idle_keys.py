"""Keys that have no effect together with the others of a run are named once, with the remedy."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, Supervised
from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.models import CNN
from lightning_fedssl.models.norm import NormKind
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer.idle_keys import warn_of_idle_keys
from tests.toy import ToyData, toy_semifl, toy_trainer

WEIGHT = (
    "model.server_weight has no effect, because model.server_phase is after: leave it out, or set server_phase: "
    "parallel"
)
BATCH = (
    "data.server_batch_size has no effect, because the server has no labelled images: leave it out, or set "
    "data.label_location: server"
)


class OwnAverage(FedAvg):
    """An average of the user's own may read every argument."""

    def aggregate(self, sums: dict[str, WeightedSum]) -> None:
        """As in the base class."""
        super().aggregate(sums)


class OwnWeights(FedAvg):
    """Weights of the user's own; another default."""

    def __init__(self, server_weight: float = 0.2, **settings: Any) -> None:
        super().__init__(server_weight=server_weight, **settings)

    def client_weight(self, update: ClientUpdate) -> float:
        """The clients share what the server leaves."""
        return 1 - self.server_weight


class OwnDefault(FedAvg):
    """Another default."""

    def __init__(self, server_weight: float = 0.2, **settings: Any) -> None:
        super().__init__(server_weight=server_weight, **settings)


class OwnData(ToyData):
    """Another default."""

    def __init__(self, server_batch_size: int = 7, **settings: Any) -> None:
        super().__init__(server_batch_size=server_batch_size, **settings)


def network() -> Any:
    return partial(CNN, width=4)


def messages(caplog: pytest.LogCaptureFixture, algorithm: FederatedAlgorithm, **data: Any) -> list[str]:
    datamodule = ToyData(**data)
    datamodule.setup()
    with caplog.at_level(logging.WARNING):
        warn_of_idle_keys(algorithm, datamodule)
    return caplog.messages


def test_fit_names_a_server_s_weight_that_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        toy_trainer(tmp_path, max_rounds=1, logger=False).fit(toy_semifl(server_weight=0.2), ToyData())
    assert [line for line in caplog.messages if "server_weight" in line] == [WEIGHT]


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda: toy_semifl(),
        lambda: toy_semifl(server_weight=0.5),
        lambda: toy_semifl(server_weight=0.2, server_phase="parallel"),
        lambda: OwnAverage(network=network(), server_weight=0.2),
        lambda: OwnWeights(network=network(), server_weight=0.3),
        lambda: OwnDefault(network=network()),
    ],
)
def test_a_server_s_weight_that_may_be_used_is_not_named(algorithm: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, algorithm()) == []


def test_a_method_without_clients_names_the_server_s_weight_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = Supervised(network=network(), server_epochs=1, server_weight=0.2)
    with caplog.at_level(logging.WARNING):
        toy_trainer(tmp_path, max_rounds=1, logger=False).fit(algorithm, ToyData())
    assert sum("server_weight" in line for line in caplog.messages) == 1


def test_a_server_s_batch_size_without_labels_at_the_server_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert messages(caplog, FedAvg(network=network()), label_location="clients", server_batch_size=7) == [BATCH]


@pytest.mark.parametrize(
    "data",
    [
        {"label_location": "server", "server_batch_size": 7},
        {"label_location": "clients", "server_batch_size": 10},
        {"label_location": "clients", "server_batch_size": 7, "client_batch_size": 7},
    ],
)
def test_a_server_s_batch_size_that_is_used_or_shared_is_not_named(
    data: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert messages(caplog, FedAvg(network=network()), **data) == []


def test_the_default_of_a_data_module_of_ones_own_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    datamodule = OwnData(label_location="clients")
    datamodule.setup()
    with caplog.at_level(logging.WARNING):
        warn_of_idle_keys(FedAvg(network=network()), datamodule)
    assert caplog.messages == []


@pytest.mark.parametrize("norm", ["batch", "static_batch", "none"])
def test_groups_of_another_norm_are_named(norm: NormKind) -> None:
    expected = rf"init_args\.norm_groups has no effect, because norm is {norm}: leave it out, or set norm: group"
    with pytest.warns(UserWarning, match=expected):
        CNN(width=4, norm=norm, norm_groups=2)


@pytest.mark.parametrize("options", [{"norm": "group", "norm_groups": 2}, {"norm": "batch"}, {}])
def test_groups_that_are_used_are_not_named(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CNN(width=4, **options)
