import csv
import os
import signal
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_fedssl.algorithms import SCAFFOLD, FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import ClientEvaluation, CommunicationLedger, FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.comparison.execute import has_checkpoint
from lightning_fedssl.comparison.results import is_finished, rounds
from lightning_fedssl.functional.optimizers import half_momentum, plain_sgd
from lightning_fedssl.functional.schedules import Cosine, FractionalCosine, Schedule
from lightning_fedssl.models import CNN
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.system import Device, SystemModel
from lightning_fedssl.updates import CentralDP
from tests.algorithms.helpers import METHODS, STATELESS, toy_fixmatch, toy_supervised
from tests.toy import (
    Dies,
    ToyData,
    assert_same,
    dies,
    labeled_clients,
    sgd,
    toy,
    toy_fedavg,
    toy_semifl,
    toy_trainer,
    weights,
)
from tests.trainer.helpers import StopAfter, assert_equal, logged


@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_uninterrupted_bitwise(tmp_path: Path, method: str) -> None:
    """A run that was stopped after its first round, and again after its third."""
    make, data = METHODS[method]
    whole, second = make(), make()
    settings: dict[str, Any] = {"max_rounds": 5, "check_val_every_n_rounds": 2 if method == "semifl_paper" else 1}
    statistics = StaticBatchNorm("moments") if method.startswith("semifl") else StaticBatchNorm()
    reference = toy_trainer(tmp_path / "whole", **settings, callbacks=statistics)
    reference.fit(whole, data())
    for stop, ckpt_path in ((1, None), (3, "last")):
        stopping = [deepcopy(statistics), StopAfter(stop)]
        toy_trainer(tmp_path / "parts", **settings, callbacks=stopping).fit(make(), data(), ckpt_path=ckpt_path)
    resumed = toy_trainer(tmp_path / "parts", **settings, callbacks=deepcopy(statistics))
    resumed.fit(second, data(), ckpt_path="last")

    assert_same(weights(second), weights(whole))
    assert second.server.extra.keys() == whole.server.extra.keys()
    for name, state in whole.server.extra.items():
        assert_same(second.server.extra[name], state)
    assert (len(whole.clients) == 0) == (method in STATELESS)
    assert second.clients.state_dict().keys() == whole.clients.state_dict().keys()
    for client, state in whole.clients.state_dict().items():
        assert_same(second.clients.state_dict()[client], state)
    expected, found = logged(reference), logged(resumed)
    assert found == expected  # the rounds before the stop were copied
    a, b = (checkpoint_file.load(Path(str(t.log_dir)) / "checkpoints/last.ckpt") for t in (reference, resumed))
    assert_equal(a["callbacks"], b["callbacks"])
    assert_same(a["federation"]["server_optimizer"], b["federation"]["server_optimizer"])


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_a_run_that_is_killed_and_killed_again_resumes_as_compare_does(
    tmp_path: Path, place: str, private: bool
) -> None:
    """The second time before, inside or after the first round of the resumed run."""
    if private:
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

    def fit(name: str, algorithm: Any, *callbacks: Any) -> Any:
        root, privacy = tmp_path / name, CentralDP(delta=1e-3, noise_multiplier=0.1, clip=5) if private else None
        last = "last" if has_checkpoint(root) else None
        trainer = toy_trainer(root, max_rounds=4, updates=[privacy] if privacy else [], callbacks=list(callbacks))
        trainer.fit(algorithm, labeled_clients(), ckpt_path=last)
        return trainer

    whole, resumed = (toy_fedavg(client_weighting="uniform", keep_client_optimizer=not private) for _ in range(2))
    reference = fit("whole", whole)
    for killed in (Dies("inside", 2), Dies(place, 2)):
        dies(partial(fit, "parts", deepcopy(resumed), killed))
    trainer = fit("parts", resumed)
    assert_same(weights(resumed), weights(whole))
    assert logged(trainer) == logged(reference)
    assert is_finished(rounds(tmp_path / "parts"))
    best, expected = (
        checkpoint_file.load(checkpoint_file.find("best", tmp_path / name)) for name in ("parts", "whole")
    )
    assert_same(best["state_dict"], expected["state_dict"])
    assert_equal(best["callbacks"], expected["callbacks"])
    assert (tmp_path / "parts/lightning_logs/version_1/checkpoints/best.ckpt").exists() == (place == "after")


def test_a_run_that_is_killed_after_its_test_has_the_files_of_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed from a checkpoint that is named without a folder."""

    def fit(name: str, *callbacks: Any, ckpt_path: str | None = None) -> Path:
        trainer = toy_trainer(tmp_path / name, max_rounds=2, callbacks=[ClientEvaluation(), *callbacks])
        trainer.fit(toy_fedavg(personal="classifier"), labeled_clients(), ckpt_path=ckpt_path)
        return Path(str(trainer.log_dir))

    def steps(folder: Path) -> list[str]:
        lines = (folder / "metrics.csv").read_text().splitlines()
        return [row["step"] for row in csv.DictReader(lines)]

    whole = fit("whole")
    dies(partial(fit, "parts", Dies("tested", 2)))
    monkeypatch.chdir(tmp_path / "parts/lightning_logs/version_0/checkpoints")
    resumed = fit("parts", ckpt_path="last.ckpt")
    assert steps(resumed) == steps(whole)
    name = "client_evaluation.csv"
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def trained(tmp_path: Path) -> Path:
    trainer = toy_trainer(tmp_path, max_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    return Path(str(trainer.log_dir)) / "checkpoints/last.ckpt"


def test_a_checkpoint_holds_tensors_and_primitives_under_lightnings_names(tmp_path: Path) -> None:
    loaded = torch.load(trained(tmp_path), weights_only=True)
    assert {"state_dict", "callbacks", "round", "epoch", "global_step", "federation"} <= loaded.keys()
    assert (loaded["round"], loaded["epoch"]) == (2, 1)
    algorithm = toy_semifl()
    algorithm.configure_model()
    algorithm.load_state_dict(loaded["state_dict"])
    assert len(loaded["federation"]["clients"]) > 0


def test_a_method_may_change_what_is_saved_without_changing_the_run(tmp_path: Path) -> None:
    algorithm, trainer = toy_semifl(), toy_trainer(tmp_path, max_rounds=2, logger=False)
    vars(algorithm)["on_save_checkpoint"] = lambda saved: saved["federation"]["parameters"].clear()
    trainer.fit(algorithm, ToyData())
    assert algorithm.server.parameters


def test_a_finished_run_resumes_to_nothing_more_and_a_longer_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = trained(tmp_path)
    algorithm = toy_semifl()
    trainer = toy_trainer(tmp_path, max_rounds=2)
    trainer.fit(algorithm, ToyData(), ckpt_path=path)
    assert trainer.round_index == 2
    assert "nothing to train; the model is only tested" in caplog.text
    assert_same(weights(algorithm), checkpoint_file.load(path)["state_dict"])
    longer = toy_trainer(tmp_path, max_rounds=4)
    longer.fit(toy_semifl(), ToyData(), ckpt_path=path)
    assert longer.round_index == 4


@pytest.mark.parametrize(
    ("schedule", "jumps"), [(Cosine(), True), (FractionalCosine(), True), (Cosine(rounds=4), False)]
)
@pytest.mark.parametrize("stop", [1, 2])
def test_a_schedule_that_a_longer_run_stretches_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: Schedule, jumps: bool, stop: int
) -> None:
    toy_trainer(tmp_path, max_rounds=2, callbacks=[StopAfter(stop)]).fit(
        toy_fedavg(schedule=schedule), labeled_clients()
    )
    longer = toy_trainer(tmp_path, max_rounds=4)
    longer.fit(toy_fedavg(schedule=schedule), labeled_clients(), ckpt_path="last")
    assert ("follow trainer.max_rounds, which was 2 and is 4" in caplog.text) == jumps


class SignalIn(FederatedCallback):
    """Sends a signal to the run in a round."""

    def __init__(self, round_index: int, number: signal.Signals) -> None:
        self.round_index = round_index
        self.number = number

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.round_index == self.round_index:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("stop", "source"), [(SignalIn(2, signal.SIGTERM), "pooled"), (StopAfter(2), "moments")])
def test_statistics_measured_after_a_stop_leave_no_trace_in_the_rounds_that_follow(
    tmp_path: Path, stop: Any, source: Any
) -> None:
    """Round 2 has no evaluation, and clients have the weights of no later measurement in round 3."""

    def fit(name: str, *callbacks: Any, **kwargs: Any) -> tuple[Any, Any, CommunicationLedger]:
        algorithm = toy_fixmatch(network=partial(CNN, width=4, norm="static_batch"))
        ledger = CommunicationLedger()
        trainer = toy_trainer(
            tmp_path / name, max_rounds=4, check_val_every_n_rounds=4,
            callbacks=[*callbacks, ledger, StaticBatchNorm(source=source, for_clients=False)],
            system=SystemModel([Device("a", 0.001)], download_mbit_s=(0.1, 0.4), upload_mbit_s=(5, 5)),
        )  # fmt: skip
        trainer.fit(algorithm, ToyData(), **kwargs)
        return algorithm, trainer, ledger

    whole, trainer, ledger = fit("whole")
    fit("parts", stop)
    resumed, resumed_trainer, resumed_ledger = fit("parts", ckpt_path="last")
    assert_same(weights(whole), weights(resumed))
    if isinstance(stop, SignalIn):
        assert logged(resumed_trainer) == logged(trainer)
        assert resumed_ledger.entries == ledger.entries


def test_best_is_the_best_round(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=4, callbacks=FederatedCheckpoint(monitor="val/loss", mode="max"))
    trainer.fit(toy_semifl(), ToyData())
    values = {r: float(row["val/loss"]) for r, row in logged(trainer).items() if "val/loss" in row}
    best = checkpoint_file.load(checkpoint_file.find("best", tmp_path))
    assert best["round"] == max(values, key=values.__getitem__)
    assert checkpoint_file.load(checkpoint_file.find("last", tmp_path))["round"] == 4


@pytest.mark.parametrize(
    ("make", "data", "seed", "message"),
    [
        (toy_supervised, ToyData, 0, r"last\.ckpt was written by SemiFL, but model is Supervised"),
        (lambda: toy_semifl(network=toy_fedavg().network_factory), ToyData, 0, r"last\.ckpt holds another network"),
        (toy_semifl, lambda: ToyData(num_labels=9), 0, r"last\.ckpt was made on another partition"),
        (toy_semifl, ToyData, 5, r"seed_everything is 5, but .*last\.ckpt is of a run with 0"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, data: Any, seed: int, message: str
) -> None:
    path = trained(tmp_path)
    before = path.read_bytes()
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path, max_rounds=4).fit(make(), data(), ckpt_path=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_in_order_and_resuming_gives_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    stopped = 3
    trainer = toy_trainer(tmp_path, max_rounds=1000, callbacks=SignalIn(stopped, number))
    trainer.fit(toy_semifl(), ToyData())
    assert (trainer.round_index, trainer.state.status) == (stopped, TrainerStatus.INTERRUPTED)
    assert f"stopped after round {stopped}; resume with --ckpt_path last" in caplog.text
    path = checkpoint_file.find("last", tmp_path)
    assert checkpoint_file.load(path)["round"] == stopped
    resumed, reference = toy_semifl(), toy_semifl()
    for algorithm, ckpt_path in ((resumed, path), (reference, None)):
        trainer = toy_trainer(tmp_path / "later", max_rounds=1000, logger=False, callbacks=StopAfter(stopped + 1))
        trainer.fit(algorithm, ToyData(), ckpt_path=ckpt_path)
    assert_same(weights(resumed), weights(reference))


EDITS: list[Any] = ["deleted", torch.nan, torch.ones(2).to_sparse(), torch.zeros(2), torch.empty(2, device="meta"), "x"]


def entries(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:
    """The places of a checkpoint's entries; of mappings inside its parts, of the first entry only."""
    for name in list(value)[: 1 if len(place) > 1 else None] if isinstance(value, dict) else ():
        yield (*place, name)
        yield from entries(value[name], *place, name)


@pytest.mark.parametrize("method", [SCAFFOLD, partial(FedAvg, keep_client_optimizer=True)])
def test_an_edited_checkpoint_is_refused_in_one_line_or_does_no_harm(tmp_path: Path, method: Any) -> None:
    """States of server and clients are edited in each way; a fused kernel would read beyond a momentum's end."""

    def fit(rounds: int, path: Path | None = None) -> None:
        optimizer = plain_sgd if method is SCAFFOLD else sgd
        made = toy(method, optimizer=optimizer, aggregation_optimizer=half_momentum, personal="classifier")
        trainer = toy_trainer(tmp_path, max_rounds=rounds, clients_per_round=4, logger=False)
        trainer.fit(made, labeled_clients(), ckpt_path=path)

    fit(1)
    content, refused = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True), {}
    for (number, place), (kind, edit) in product(enumerate(entries(content)), enumerate(EDITS)):
        if len(place) > 3 or place[-1] == "network.classifier.bias" or (number + kind) % 23 == 0:
            part = changed = deepcopy(content)
            for name in place[:-1]:
                part = part[name]
            part[place[-1]] = part[place[-1]] * edit if kind == 1 and torch.is_tensor(part[place[-1]]) else edit
            if kind == 0:
                del part[place[-1]]
            torch.save(changed, tmp_path / "odd.ckpt")
            try:
                fit(2, tmp_path / "odd.ckpt")
            except ValueError as error:
                refused[place, kind] = str(error)
    assert {kind for (place, kind), text in refused.items() if len(place) > 3 and "\n" not in text} >= {1, 2, 3, 4, 5}
    assert (("state_dict", "network.classifier.bias"), 0) in refused
    too_short = {place[1] for place, kind in refused if kind == 3 and "momentum_buffer" in str(place[-1])}
    assert (too_short >= {"clients", "extra"}) == (method is not SCAFFOLD)
    assert any(place[:2] == ("federation", "extra") for place, kind in refused if kind == 0) == (method is SCAFFOLD)


def test_a_checkpoint_of_more_rounds_than_max_rounds_leaves_no_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is trained or tested: the model is that of another run than the one that was asked for."""
    toy_trainer(tmp_path, max_rounds=2).fit(toy_semifl(), ToyData())
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(toy_semifl(), ToyData(), ckpt_path="last")
    assert "has done 2 rounds and trainer.max_rounds is 1: nothing to train, raise trainer.max_rounds" in caplog.text
    assert [path.name for path in tmp_path.rglob("version_*")] == ["version_0"]
    assert (trainer.round_index, trainer.log_dir) == (2, None)
