"""``replay`` trains the client of a past round again, bitwise, and names the first number that is not finite."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_fedssl import MLP, FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.cli.entry import main
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer.number_watch import NumberWatch, ReplayReport
from tests.test_faults import poison
from tests.test_resume import METHODS
from tests.test_semi_sfl import toy_semi_sfl
from tests.test_trainer import labeled_clients, toy_fedavg
from tests.toy import ToyData, assert_same, toy_semifl, toy_trainer

ROUND = 3


class Updates(FederatedCallback):
    """Copies of what clients send, by round and client."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], dict[str, Tensor]] = {}

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        tensors = {**update.parameters, **update.buffers, **update.payload}
        self.seen[trainer.round_index, update.client] = {name: t.clone() for name, t in tensors.items()}


def fitted(folder: Path, make: Any, data: Any, factor: float, **kwargs: Any) -> Updates:
    """The updates of a run in which client 1's images are multiplied by a number in round 3."""
    updates = Updates()
    trainer = toy_trainer(folder, clients_per_round=4, max_rounds=ROUND, logger=False, callbacks=updates, **kwargs)
    trainer.fit(poison(make(), 1, factor, ROUND), data())
    return updates


def replayed(folder: Path, make: Any, data: Any, factor: float, client: int, **kwargs: Any) -> tuple[Any, Updates]:
    """The report on a client of round 3, and its update."""
    updates = Updates()
    trainer = toy_trainer(folder, clients_per_round=4, max_rounds=ROUND, logger=False, callbacks=updates)
    report = trainer.replay(poison(make(), 1, factor, ROUND), data(), round=ROUND, client=client, **kwargs)
    return report, updates


@pytest.mark.parametrize("method", [name for name in METHODS if name != "supervised"])
def test_a_replayed_client_sends_what_it_sent(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    before = fitted(tmp_path, make, data, math.nan)
    path = tmp_path / "checkpoints/before_rejection.ckpt"
    assert checkpoint_file.load(path)["round"] == ROUND - 1
    files = sorted(tmp_path.rglob("*"))
    healthy = max(client for round_index, client in before.seen if round_index == ROUND and client != 1)
    report, after = replayed(tmp_path, make, data, math.nan, healthy, ckpt_path=path)
    assert_same(after.seen[ROUND, healthy], before.seen[ROUND, healthy])
    assert report.first is None
    assert "the update is finite; it moved the weights by" in report.outcome
    broken, _ = replayed(tmp_path, make, data, math.nan, 1, ckpt_path=path)
    assert broken.first is not None
    assert broken.first.startswith("step 0, the batch: ")
    assert "not finite" in broken.outcome
    assert sorted(tmp_path.rglob("*")) == files, "nothing is written"


@pytest.mark.parametrize("settings", [{"clients_at_once": 4}, {"clients_at_once": 4, "cuda_graphs": True}])
@pytest.mark.parametrize("make", [toy_semifl, toy_semi_sfl])
def test_a_client_of_a_stack_is_replayed_alone(tmp_path: Path, make: Any, settings: Any) -> None:
    before = fitted(tmp_path, make, ToyData, math.nan, **settings)
    report, after = replayed(tmp_path, make, ToyData, math.nan, 1)  # without a checkpoint: from round 1 on
    assert report.first.startswith("step 0, the batch: ")
    healthy, after = replayed(tmp_path, make, ToyData, math.nan, 2)
    assert healthy.first is None
    for name, t in before.seen[ROUND, 2].items():
        torch.testing.assert_close(after.seen[ROUND, 2][name], t, rtol=1e-3, atol=1e-3)


class Grows(nn.Module):
    """A layer whose result is infinite for large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0.01).exp()


class Overflows(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), Grows(), nn.Linear(8, 3))


def test_the_operation_and_the_layer_of_an_overflow_are_named(tmp_path: Path) -> None:
    make = partial(toy_fedavg, network=Overflows)
    fitted(tmp_path, make, labeled_clients, 1e6)
    report, _ = replayed(tmp_path, make, labeled_clients, 1e6, 1)
    assert report.first.startswith("step 0, torch.Tensor.exp in the layer network.2 (test_replay.py:")


def test_the_gradient_of_an_infinite_slope_is_named(tmp_path: Path) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).abs().sqrt() + x

    make = partial(toy_fedavg, network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), Root()))
    report, _ = replayed(tmp_path, make, labeled_clients, 1.0, 1)
    assert report.first.startswith("step 0, the gradient of network.1.")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ([[1.0], [math.nan], [3.0]], r"1 of 3 samples \(by their numbers in the training data\): 11"),
        ([1.0, math.inf, math.nan], r"2 of 3 samples \(by their numbers in the training data\): 11, 12"),
        ([[1.0], [2.0], [3.0], [math.nan]], "1 of 4 rows: 3"),
        (math.nan, "1 of 1 rows: 0"),
    ],
    ids=["images", "one number for each image", "more rows than images", "one number for the batch"],
)
def test_bad_numbers_are_found_in_tensors_of_every_shape(values: Any, where: str) -> None:
    report = ReplayReport(1, 0)
    watch = NumberWatch(report)
    watch._begin_step({"t": torch.tensor(values), "index": torch.tensor([10, 11, 12])}, 0)
    watch._end_step()
    assert re.fullmatch(f"step 0, the batch: t holds numbers that are not finite, in {where}", report.first or "")


def test_an_update_that_explodes_without_a_bad_number_is_described(tmp_path: Path) -> None:
    make = partial(toy_fedavg, network=partial(MLP, hidden=(8,)))
    fitted(tmp_path, make, labeled_clients, 1e6)
    report, _ = replayed(tmp_path, make, labeled_clients, 1e6, 1)
    assert report.first is None
    assert "the server rejects it if this is more than 10 times the median of the round" in report.outcome
    movements = [step.movement for step in report.steps]
    assert max(movements) > 1e3
    assert "e+0" in report.steps[0].batch  # the range of the images
    assert str(report).splitlines()[1].split()[:3] == ["step", "loss", "gradient"]


class Poisoned(FedAvg):
    """Client 3's images are not numbers in round 2."""

    def on_client_start(self, data: Any) -> Any:
        return poisoned_work(super().on_client_start(data), data)


def poisoned_work(work: Any, data: Any) -> Any:
    from dataclasses import replace

    if (data.party, data.round) != (3, 2):
        return work
    return replace(
        work, batch=lambda step: {n: t * math.nan if t.dim() == 4 else t for n, t in work.batch(step).items()}
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run in which client 3 is rejected in round 2."""
    monkeypatch.chdir(tmp_path)
    config = {
        "seed_everything": 3,
        "trainer": {"max_rounds": 3, "clients_per_round": 5, "accelerator": "cpu"},
        "model": {
            "class_path": "tests.test_replay.Poisoned",
            "init_args": {"network": {"class_path": "MLP", "init_args": {"hidden": [8]}}},
        },
        "data": {
            "num_clients": 5, "num_labels": "all", "label_location": "clients", "max_train_images": 200,
            "max_test_images": 50,
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_the_log_gives_the_command_and_the_command_finds_the_cause(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        assert main(["fit", "--config", "run.yaml"]) == 0
    (line,) = [record.getMessage() for record in caplog.records if "is left out of the average" in record.getMessage()]
    assert line.startswith("round 2: client 3 returned weights that are not finite; it is left out of the average; to")
    program, *arguments = shlex.split(line.partition("went wrong: ")[2])
    assert program == "lightning-fedssl"
    assert "--ckpt_path" in arguments
    runs = sorted(folder.rglob("version_*"))
    capsys.readouterr()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "client 3 in round 2, trained again: " in printed
    assert "first number that is not finite: step 0, the batch: x holds numbers that are not finite, in " in printed
    assert "result: the client returned weights that are not finite, so the server rejects its update" in printed
    assert main([*arguments, "--json", "true"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["client"] == 3
    assert sorted(folder.rglob("version_*")) == runs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--round", "9", "--client", "3"], "--round is 9: give a round from 1 to trainer.max_rounds 3"),
        (["--round", "1", "--client", "77"], "client 77 did not take part in round 1; give one of 0, 1, 2, 3, 4"),
        (["--round", "1", "--client", "3", "--ckpt_path", "last"], "is of round 3, but round 1 needs a checkpoint"),
        (["--round", "1"], "client: missing; give the number from the run's log"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    if "last" in options:
        assert main(["fit", "--config", "run.yaml"]) == 0
    try:
        code = main(["replay", "--config", "run.yaml", *options])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_a_round_without_clients_is_refused(tmp_path: Path) -> None:
    make, data = METHODS["supervised"]
    with pytest.raises(ValueError, match="no client trains in round 3 of Supervised"):
        replayed(tmp_path, make, data, 1.0, 1)
