"""Uploads and downloads, with bytes computed by hand."""

import csv
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl import sampling
from lightning_fedssl.callbacks import CommunicationLedger, StaticBatchNorm
from lightning_fedssl.callbacks.communication_ledger import kind_of
from lightning_fedssl.state import Direction
from tests.algorithms.helpers import toy_rgd, toy_semi_sfl, toy_shvr, uneven_clients
from tests.toy import ToyData, Transfers, toy_semifl, toy_trainer
from tests.trainer.helpers import StopAfter, logged

CNN_WEIGHTS = 4 * ((1 * 4 + 4 * 8 + 8 * 16) * 9 + 2 * (4 + 8 + 16) + 16 * 3 + 3)
"""Bytes of the weights of a CNN of width 4 on 1 x 8 x 8 images of 3 classes."""

BATCH_NORM = 2 * 4 * (4 + 8 + 16)
"""Bytes of its running means and variances."""

COUNTERS = 3 * 8
"""Bytes of batch norm's own counts of batches, which are never sent back."""


def transfers(tmp_path: Path, algorithm: Any, data: Any, **kwargs: Any) -> tuple[Transfers, Any]:
    seen = Transfers()
    trainer = toy_trainer(tmp_path, logger=False, callbacks=[seen], **kwargs)
    trainer.fit(algorithm, data)
    return seen, trainer


def test_fedrgd_slots_hand_their_momentum_on(tmp_path: Path) -> None:
    """Momentum has the size of the weights; in round 1 a slot has none to send down."""
    seen, trainer = transfers(tmp_path, toy_rgd(), ToyData(), max_rounds=2, clients_per_round=4)
    for client in range(4):
        down = CNN_WEIGHTS + BATCH_NORM + COUNTERS
        up = CNN_WEIGHTS + BATCH_NORM + CNN_WEIGHTS
        assert seen.bytes(1, client, "down") == down
        assert seen.bytes(2, client, "down") == down + CNN_WEIGHTS
        assert seen.bytes(1, client, "up") == seen.bytes(2, client, "up") == up
    assert trainer.callback_metrics["communication/upload_bytes"] == 4 * up


@pytest.mark.parametrize("control_variate", [True, False])
def test_fed_shvr_sends_numbers_of_steps_and_after_a_pause_an_earlier_model(
    tmp_path: Path, control_variate: bool
) -> None:
    rounds = 6
    seen, trainer = transfers(
        tmp_path, toy_shvr(control_variate=control_variate), uneven_clients(), max_rounds=rounds, clients_per_round=2
    )
    last: dict[int, int] = {}
    pauses = 0
    for round_index in range(1, rounds + 1):
        for client in sampling.cohort(trainer.seed, round_index, 4, 2):
            down, up = CNN_WEIGHTS, CNN_WEIGHTS + 8
            if control_variate and client in last:
                paused = last[client] < round_index - 1
                down += 8 + CNN_WEIGHTS * paused
                pauses += paused
            assert seen.bytes(round_index, client, "down") == down
            assert seen.bytes(round_index, client, "up") == up
            last[client] = round_index
    assert pauses > 0 or not control_variate


# The ledger.


def ledger_of(trainer: Any) -> dict[tuple[str, str], dict[str, str]]:
    with (Path(trainer.log_dir) / "ledger.csv").open() as file:
        return {(row["direction"], row["name"]): row for row in csv.DictReader(file)}


def test_ledger_of_semifl_by_hand(tmp_path: Path) -> None:
    """Static batch norm from the server's labels: models down, and the weights of those that trained up."""
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=CommunicationLedger())
    trainer.fit(toy_semifl(), ToyData())
    rows = ledger_of(trainer)
    counts = {"times": "6", "client_rounds": "6"}
    weight = {"direction": "up", "name": "network.classifier.weight", "kind": "weights", "largest": str(4 * 16 * 3)}
    assert rows["up", "network.classifier.weight"] == {**counts, **weight, "total": str(6 * 4 * 16 * 3)}
    statistics = rows["down", "network.norms.0.running_var"]
    assert (statistics["kind"], statistics["total"]) == ("batch-norm statistics", str(6 * 4 * 4))
    assert not any(kind["kind"] == "batch-norm statistics" for (way, _), kind in rows.items() if way == "up")
    totals = {way: sum(int(row["total"]) for (other, _), row in rows.items() if other == way) for way in ("up", "down")}
    assert totals == {"up": 6 * CNN_WEIGHTS, "down": 6 * (CNN_WEIGHTS + BATCH_NORM)}
    assert trainer.callback_metrics["communication/total_bytes"] == sum(totals.values())


def test_ledger_of_semi_sfl_has_features_by_the_step(tmp_path: Path) -> None:
    """3 clients, 2 steps: two kinds of features up, one gradient down; bottoms of student and teacher down first."""
    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=CommunicationLedger())
    trainer.fit(toy_semi_sfl(server_steps=2, client_steps=2), ToyData())
    rows = ledger_of(trainer)
    sizes = {rows[key]["largest"] for key in SEMI_SFL_STEP}
    assert len(sizes) == 1
    assert {(rows[key]["times"], rows[key]["client_rounds"]) for key in SEMI_SFL_STEP} == {("6", "3")}
    sent = {row["kind"] for (way, _), row in rows.items() if way == "up"}
    received = {row["kind"] for (way, _), row in rows.items() if way == "down"}
    assert sent == {"weights", "batch-norm statistics", "student features", "teacher features"}
    assert received >= {"weights", "weights (teacher)", "feature gradients"}
    assert not any(".top." in name or name.startswith("head") for _, name in rows)


SEMI_SFL_STEP = (("up", "student features"), ("up", "teacher features"), ("down", "feature gradients"))
"""What is sent at every step; all have the same size."""


def test_ledger_continues_after_a_resume(tmp_path: Path) -> None:
    whole = toy_trainer(tmp_path / "whole", callbacks=CommunicationLedger())
    whole.fit(toy_semifl(), ToyData())
    toy_trainer(tmp_path / "parts", callbacks=[CommunicationLedger(), StopAfter(2)]).fit(toy_semifl(), ToyData())
    resumed = toy_trainer(tmp_path / "parts", callbacks=CommunicationLedger())
    resumed.fit(toy_semifl(), ToyData(), ckpt_path="last")
    assert [*ledger_of(resumed).items()] == [*ledger_of(whole).items()]


def test_kinds_are_those_of_the_model_and_of_what_stands_before_its_names() -> None:
    model = {"network.a.weight", "network.norm.running_mean", "teacher.network.a.weight"}
    kinds = {
        "network.a.weight": "weights",
        "network.norm.running_mean": "batch-norm statistics",
        "teacher.network.a.weight": "weights (teacher)",
        "last_round.network.norm.running_mean": "batch-norm statistics (last_round)",
        "optimizer.0.momentum_buffer": "optimizer state",
        "moments.network.norm.mean": "batch-norm moments",
        "student features": "student features",
        "helper 1 network.a.weight": "weights (helper)",
        "for statistics network.a.weight": "weights (for statistics)",
        "network.a.weight.positions": "positions of weights",
        "helper 0 network.a.weight.positions": "positions of weights (helper)",
    }
    assert {name: kind_of(name, model) for name in kinds} == kinds


def test_moments_for_the_test_after_a_run_that_a_callback_has_stopped_are_counted(tmp_path: Path) -> None:
    """Round 1 has no evaluation; the statistics of the test are measured on the images of all 4 clients."""
    seen = Transfers()
    moments = StaticBatchNorm("moments", for_clients=False)
    callbacks = [CommunicationLedger(), moments, StopAfter(1), seen]
    trainer = toy_trainer(tmp_path, max_rounds=3, check_val_every_n_rounds=2, callbacks=callbacks)
    trainer.fit(toy_semifl(), ToyData())
    rows, row = ledger_of(trainer), logged(trainer)[1]
    sent = {way: sum(seen.bytes(1, client, way) for client in range(4)) for way in WAYS}
    assert {way: sum(int(row["total"]) for (other, _), row in rows.items() if other == way) for way in WAYS} == sent
    assert {row["client_rounds"] for (_, name), row in rows.items() if name.startswith("moments.")} == {"4"}
    assert trainer.callback_metrics["communication/total_bytes"] == trainer.total_bytes == sum(sent.values())
    assert float(row["communication/total_bytes"]) == sum(sent.values())
    assert (float(row["communication/upload_bytes"]), float(row["communication/download_bytes"])) == (
        sent["up"],
        sent["down"],
    )


WAYS: tuple[Direction, ...] = ("up", "down")
