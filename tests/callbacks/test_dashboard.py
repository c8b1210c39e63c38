"""The TensorBoard dashboard and the result file of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_fedssl.callbacks import ClientEvaluation, LocalSteps, PseudoLabelQuality
from lightning_fedssl.callbacks.dashboard import LAYOUT
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


def test_the_charts_of_the_overview_show_scalars_of_the_run(trained: FederatedTrainer) -> None:
    assert set(charts_shown(trained)) == {"Overview", "Clients"}
    scalars = events_of(trained).Tags()["scalars"]
    for chart, (_, patterns) in LAYOUT["Overview"].items():
        for pattern in patterns:
            assert any(re.match(pattern, tag) for tag in scalars), (chart, pattern)


def charts_shown(trainer: FederatedTrainer) -> dict[str, list[str]]:
    """The titles of the charts of the run's last layout, by group."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    last = events_of(trainer).Tensors("custom_scalars__config__")[-1]
    layout = layout_pb2.Layout.FromString(last.tensor_proto.string_val[0])
    return {group.title: [chart.title for chart in group.chart] for group in layout.category}


def test_a_chart_appears_with_its_callback_or_metric(trained: FederatedTrainer, tmp_path: Path) -> None:
    assert charts_shown(trained)["Clients"] == ["clients that took part"]
    callbacks = [PseudoLabelQuality(per_class=True), LocalSteps(), ClientEvaluation()]
    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=callbacks, metrics=["recall"])
    trainer.fit(toy_semifl(), ToyData())
    assert charts_shown(trainer) == {group: list(charts) for group, charts in LAYOUT.items()}


def test_the_run_is_described_as_text(trained: FederatedTrainer) -> None:
    texts = plugin(trained, "text")
    assert {"partition/text_summary", "method and paper/text_summary"} <= set(texts)
    (event,) = events_of(trained).Tensors("method and paper/text_summary")
    assert b"2106.01432" in event.tensor_proto.string_val[0]


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
