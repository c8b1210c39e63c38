"""The table of runs in TensorBoard."""

from __future__ import annotations

import pytest

from lightning_fedssl.trainer import FederatedTrainer
from tests.callbacks.helpers import events_of
from tests.toy import ToyData, toy_semifl, toy_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FederatedTrainer:
    """SemiFL after two rounds."""
    trainer = toy_trainer(tmp_path_factory.mktemp("run"), max_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    return trainer


def plugin(trainer: FederatedTrainer, name: str) -> dict[str, bytes]:
    """What a plugin of TensorBoard finds in the run, by tag."""
    content: dict[str, bytes] = events_of(trainer).summary_metadata
    return {tag: data for tag, data in content.items() if data.plugin_data.plugin_name == name}  # type: ignore[attr-defined]


def test_the_table_of_runs_has_seed_data_hyper_parameters_and_accuracy(trained: FederatedTrainer) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    found = plugin(trained, "hparams")
    start = plugin_data_pb2.HParamsPluginData.FromString(
        found["_hparams_/session_start_info"].plugin_data.content  # type: ignore[attr-defined]
    ).session_start_info
    assert start.hparams["seed"].number_value == trained.seed
    assert start.hparams["method"].string_value == "SemiFL"
    assert start.hparams["data.num_clients"].number_value == 4
    assert start.hparams["model.threshold"].number_value == 0.4
    experiment = plugin_data_pb2.HParamsPluginData.FromString(
        found["_hparams_/experiment"].plugin_data.content  # type: ignore[attr-defined]
    ).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["test/accuracy"]


def test_the_table_of_runs_tells_runs_apart_that_python_configures(trained: FederatedTrainer) -> None:
    row = trained.table_row
    assert (row["model.optimizer"], row["model.optimizer.lr"], row["model.server_optimizer.lr"]) == ("SGD", 0.05, 0.05)
    assert (row["model.network"], row["model.network.width"]) == ("CNN", 4)
    assert (row["model.schedule"], row["data.partition"], row["data.dataset"]) == ("Cosine", "Iid", "mnist")
    assert (row["data.num_labels"], row["data.server_batch_size"], row["data.client_batch_size"]) == (12, 5, 5)
    assert (row["trainer.clients_per_round"], row["trainer.max_rounds"], row["trainer.precision"]) == (3, 2, "32-true")
