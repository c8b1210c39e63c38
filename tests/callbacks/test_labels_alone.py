from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_fedssl.algorithms import FedAvg, FixMatch, SelfTraining, Supervised
from lightning_fedssl.callbacks import LabelsAlone, labels_alone
from lightning_fedssl.cli import export
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.export import load_network
from lightning_fedssl.models import CNN, MLP
from lightning_fedssl.models.head import best_linear
from lightning_fedssl.models.network import NetworkFactory
from lightning_fedssl.sampling import SERVER
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.task import MultiLabel
from lightning_fedssl.trainer import FederatedTrainer
from tests.callbacks.helpers import events_of
from tests.toy import ToyData, sgd, toy_trainer


def method(**kwargs: Any) -> FixMatch:
    network = partial(CNN, width=4, norm="static_batch")
    return FixMatch(network=network, optimizer=sgd, threshold=0.4, server_steps=3, label_mode="eval", **kwargs)


def run(folder: Path, rounds: int = 2, ckpt_path: Path | None = None, **kwargs: Any) -> FederatedTrainer:
    callbacks = [LabelsAlone()]
    devices = kwargs.pop("devices", 1)
    data = ToyData(validation=kwargs.pop("validation", 0.2))
    trainer = toy_trainer(
        folder, max_rounds=rounds, clients_per_round=2, devices=devices, callbacks=callbacks, enable_progress_bar=True
    )
    trainer.fit(method(**kwargs), data, ckpt_path)
    return trainer


def folder_of(trainer: FederatedTrainer) -> Path:
    return Path(trainer.log_dir or "")


def test_the_bound_is_supervised_training_with_the_servers_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path / "method")
    printed = capsys.readouterr().out.splitlines()
    alone = toy_trainer(tmp_path / "alone", max_rounds=2, clients_per_round=1, logger=False)
    bound = Supervised(network=partial(CNN, width=4, norm="static_batch"), optimizer=sgd, server_steps=3)
    alone.fit(bound, ToyData(validation=0.2))
    expected = float(alone.callback_metrics["test/accuracy"])
    assert float(trainer.callback_metrics["bound/accuracy"]) == expected
    for name in ("result.json", "checkpoints/model.json"):
        assert json.loads((folder_of(trainer) / name).read_text())["metrics"]["bound/accuracy"] == expected
    assert f"labels alone {100 * expected:.1f}, with clients" in "\n".join(printed[-4:])
    assert [event.step for event in events_of(trainer).Scalars("bound/accuracy")] == [1, 2]  # a line over the rounds


def test_a_resumed_run_and_two_ranks_have_the_same_bound(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", rounds=3)
    first = run(tmp_path / "first", rounds=2)
    resumed = run(tmp_path / "resumed", rounds=3, ckpt_path=folder_of(first) / "checkpoints/last.ckpt")
    ranks = run(tmp_path / "ranks", rounds=3, devices=2)
    names = ("bound/accuracy", "test/loss")
    expected = [float(whole.callback_metrics[name]) for name in names]
    for other in (resumed, ranks):
        assert [float(other.callback_metrics[name]) for name in names] == expected


def test_with_labels_at_the_clients_a_run_goes_on_without_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[LabelsAlone()], clients_per_round=2)
    trainer.fit(FedAvg(network=CNN, optimizer=sgd), ToyData(label_location="clients"))
    assert "data.label_location is clients" in caplog.text
    assert "bound/accuracy" not in trainer.callback_metrics
    assert capsys.readouterr().out.splitlines()[-1].startswith("next: lightning-fedssl export")


@pytest.mark.parametrize("chosen", ["linear", "labels alone", "with clients"])
def test_the_chosen_model_is_exported_under_the_one_name(
    tmp_path: Path, chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(candidates: Any, stated_shares: bool = False) -> Any:
        return next(each for each in candidates if each.name == chosen), "asked for"

    monkeypatch.setattr(labels_alone, "decide", choose)
    trainer = run(tmp_path, validation=0)  # so that there is no best.ckpt
    result = json.loads((folder_of(trainer) / "result.json").read_text())
    by_name = {each["name"]: each["test"] for each in result["answer"]["candidates"]}
    assert [*by_name] == ["largest class", "linear", "labels alone", "with clients", "trees"]
    assert by_name["labels alone"] == pytest.approx(result["metrics"]["bound/accuracy"])
    assert by_name["with clients"] == pytest.approx(result["metrics"]["test/accuracy"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"chosen: {chosen}") for line in lines)
    first = next(place for place, line in enumerate(lines) if line.startswith("test, %"))
    assert all(len(line) <= 100 for line in lines[first:-1])
    command = lines[-1].removeprefix("next: lightning-fedssl export ")
    assert export.main([*shlex.split(command), "--output", str(tmp_path / "out")]) == 0
    network, _ = load_network(tmp_path / "out")
    x, y = next(trainer.datamodule.evaluation_batches("test"))
    accuracy = float((network(x).argmax(1) == y).double().mean())
    assert accuracy == pytest.approx(result["metrics"]["chosen/accuracy"]) == by_name[chosen]
    assert result["answer"]["chosen"] == chosen
    assert "errors first" in (folder_of(trainer) / "report.html").read_text()
    path = folder_of(trainer) / "checkpoints/chosen.ckpt"
    predicted = toy_trainer(tmp_path / "again").predict(method(), ToyData(validation=0), path)
    assert float((torch.cat(predicted).argmax(1) == y).double().mean()) == by_name[chosen]


def test_a_run_that_starts_linear_needs_no_other_labels_alone(tmp_path: Path) -> None:
    network, data = partial(MLP, hidden=()), ToyData(validation=0)
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=2, callbacks=[LabelsAlone()])
    trainer.fit(SelfTraining(network=network, init_head="labels"), data)
    result = json.loads((folder_of(trainer) / "result.json").read_text())
    names = [each["name"] for each in result["answer"]["candidates"]]
    assert names == ["largest class", "linear", "with clients", "trees"]
    assert result["metrics"]["bound/accuracy"] == result["metrics"]["simple/linear"]
    own = data.local_data(SERVER, 1)
    fitted = best_linear(own.plain(own.labeled).flatten(1), own.labels, data.num_classes)
    x, y = next(data.evaluation_batches("test"))
    logits = x.flatten(1).double() @ fitted.weight.T + fitted.bias
    accuracy = float((logits.argmax(1) == y).double().mean())
    assert result["metrics"]["simple/linear"] == pytest.approx(accuracy)


def test_a_linear_run_that_expects_a_gain_leaves_labels_out_with_the_clients(tmp_path: Path) -> None:
    callback = LabelsAlone(expected_gain=0.02)
    data = ToyData(validation=0)
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=2, callbacks=[callback])
    trainer.fit(SelfTraining(network=partial(MLP, hidden=()), init_head="labels"), data)
    assert callback.answer is not None
    ours = next(each for each in callback.answer.candidates if each.name == "with clients")
    own = data.local_data(SERVER, 1)
    assert ours.left_out is not None
    assert ours.left_out.shape == (1, len(own.labels))
    half = data.with_labels(torch.arange(5))
    assert len(half.local_data(SERVER, 1).labels) == 5
    assert len(data.local_data(SERVER, 1).labels) == len(own.labels)
    assert "labels left out" in callback.answer.reason


def test_a_task_without_accuracy_has_a_bound_and_no_choice(tmp_path: Path) -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, :2] > 0).float()
    data = FederatedDataModule.from_datasets(
        (x, y), (x, y), task=MultiLabel(), num_clients=2, num_labels=8, validation=0, weak="none", strong="none"
    )
    callback = LabelsAlone()
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=2, callbacks=[callback])
    trainer.fit(FixMatch(network=partial(MLP, hidden=()), optimizer=sgd, threshold=0.4, server_steps=1), data)
    bound = float(trainer.callback_metrics["bound/average_precision"])
    assert f"labels alone {bound:.4f}" in callback.line
    assert not list(tmp_path.rglob("chosen.ckpt"))


def test_the_module_of_a_configured_network_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser, file = ArgumentParser(), tmp_path / "chosen.ckpt"
    parser.add_argument("--network", type=NetworkFactory)
    factory = parser.instantiate_classes(parser.parse_args(["--network", "torch.nn.Identity"])).network
    trusted: list[str] = []
    monkeypatch.setattr(checkpoint_file, "load", lambda path: {"algorithm": "Supervised"})
    monkeypatch.setattr(Supervised, "load_from_checkpoint", lambda path, *, trust, **kwargs: trusted.extend(trust))
    file.touch()
    Supervised.in_place_of(FixMatch(network=factory), file)
    assert trusted == [torch.nn.Identity.__module__]
