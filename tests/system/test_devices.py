"""Simulated devices and links: times worked out by hand, and sums that survive a resume and other numbers of ranks."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl.callbacks import CommunicationLedger, SystemClock
from lightning_fedssl.system import Device, Duration, SystemModel, Usage
from tests.algorithms.helpers import toy_rgd, toy_semi_sfl
from tests.callbacks.test_communication_ledger import CNN_WEIGHTS, ledger_of
from tests.toy import ToyData, forked, labeled_clients, toy_fedavg, toy_semifl, toy_trainer
from tests.trainer.helpers import StopAfter, logged

MBIT = 125_000
"""Bytes."""


def even(**kwargs: Any) -> SystemModel:
    """Two seconds a step without spread; 16 Mbit/s down, 4 up."""
    given: dict[str, Any] = {"devices": [Device("a", 2.0)], "download_mbit_s": (16, 16), "upload_mbit_s": (4, 4)}
    return SystemModel(**given | kwargs)


def varied() -> SystemModel:
    return SystemModel([Device("a", 0.1, 0.02, share=3), Device("b", 0.4, 0.1)], server_step_s=0.05)


# The model.


def test_time_of_a_client_by_hand() -> None:
    """3 steps of 2 s; 32 Mbit at 16 Mbit/s and 2 Mbit at 4 Mbit/s."""
    duration = even().client_duration(0, 1, 0, Usage(down=32 * MBIT, up=2 * MBIT, work=3))
    assert duration == Duration(compute=6.0, transfer=2.5)
    assert duration.total == 8.5


def test_a_round_waits_for_the_client_with_the_largest_sum() -> None:
    """Client 7 computes longest, client 3 sends longest; client 5 has most in all. The server comes on top."""
    usages = {7: Usage(work=4), 3: Usage(up=30 * MBIT), 5: Usage(up=14 * MBIT, work=3)}
    assert even().round_duration(0, 1, usages) == Duration(6.0, 3.5)
    assert even(server_step_s=0.5).round_duration(0, 1, usages, server_steps=8) == Duration(6.0, 3.5, 4.0)
    assert even(server_step_s=0.5).round_duration(0, 1, {}, server_steps=3) == Duration(0.0, 0.0, 1.5)


def test_a_server_in_parallel_costs_what_it_takes_longer() -> None:
    """The client takes 2 * 2 s; a server of 3 s adds nothing, one of 9 s adds 5."""
    usages = {0: Usage(work=2)}
    for steps, extra in ((3, 0.0), (9, 5.0)):
        model = even(server_step_s=1.0)
        assert model.round_duration(0, 1, usages, steps, server_in_parallel=True) == Duration(4.0, 0.0, extra)


def test_a_client_keeps_its_device_and_shares_are_kept() -> None:
    model = varied()
    names = [model.device_of(0, client).name for client in range(400)]
    assert names == [varied().device_of(0, client).name for client in range(400)]
    assert 0.70 < names.count("a") / len(names) < 0.80


def test_steps_are_independent_normal_draws() -> None:
    """The sum of 100 has 100 times the mean and 10 times the deviation."""
    model = even(devices=[Device("a", 2.0, 0.5)])
    sums = [model.compute_seconds(0, t, k, 100) for t in range(1, 41) for k in range(50)]
    mean = sum(sums) / len(sums)
    std = math.sqrt(sum((x - mean) ** 2 for x in sums) / len(sums))
    assert mean == pytest.approx(200, abs=3 * 5 / math.sqrt(len(sums)))
    assert std == pytest.approx(5, rel=0.05)
    assert model.compute_seconds(0, 1, 0, 0) == 0
    wild = even(devices=[Device("a", 0.001, 1.0)])
    assert min(wild.compute_seconds(0, t, 0, 1) for t in range(50)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, "system.devices is empty"),
        ({"devices": [Device("slow", 0.0)]}, "system.devices: slow has seconds 0.0"),
        ({"devices": [Device("a", 1.0, -1.0)]}, "std 0 or more"),
        ({"upload_mbit_s": (8, 2)}, r"system.upload_mbit_s is \[8, 2\]"),
        ({"download_mbit_s": (0, 2)}, "system.download_mbit_s"),
        ({"server_step_s": -1}, "system.server_step_s is -1"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        even(**options)


# In a run.


def test_a_round_of_federated_averaging_by_hand(tmp_path: Path) -> None:
    """Every client receives and sends 6.4 kB of weights and makes ceil(27 / 5) steps of 2 s."""
    trainer = toy_trainer(tmp_path, max_rounds=2, logger=False, system=even())
    trainer.fit(toy_fedavg(), labeled_clients(validation=0.1))
    steps, metrics = math.ceil(108 / 4 / 5), trainer.callback_metrics
    transfer = CNN_WEIGHTS / (16 * MBIT) + CNN_WEIGHTS / (4 * MBIT)
    assert metrics["system/compute_s"] == 2.0 * steps
    assert metrics["system/transfer_s"].item() == pytest.approx(transfer)
    assert metrics["system/server_s"] == 0
    assert metrics["system/seconds"].item() == pytest.approx(2 * (2.0 * steps + transfer))
    for way in ("download", "upload"):
        assert metrics[f"system/{way}_bytes"] == 2 * 3 * CNN_WEIGHTS
        assert metrics[f"communication/{way}_bytes"] == 3 * CNN_WEIGHTS
    assert metrics["communication/total_bytes"] == 2 * 2 * 3 * CNN_WEIGHTS


def test_the_server_s_steps_take_time_after_the_clients_or_beside_them(tmp_path: Path) -> None:
    after = toy_trainer(tmp_path, max_rounds=1, logger=False, system=even(server_step_s=0.5))
    after.fit(toy_semifl(server_epochs=2), ToyData())
    assert after.callback_metrics["system/server_s"] == 0.5 * 2 * math.ceil(12 / 5)
    beside = toy_trainer(tmp_path, max_rounds=1, logger=False, system=even(server_step_s=0.5))
    beside.fit(toy_rgd(), ToyData())
    assert beside.callback_metrics["system/server_s"] == 0


def test_a_server_that_steps_with_the_clients_takes_time_for_these_steps_too(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, logger=False, system=even(server_step_s=0.5))
    trainer.fit(toy_semi_sfl(server_steps=4, client_steps=3), ToyData())
    assert trainer.callback_metrics["system/server_s"] == 0.5 * (4 + 3)
    work = float(trainer.callback_metrics["system/step_work"])
    assert 0 < work < 1  # the upper layers are the server's
    assert float(trainer.callback_metrics["system/compute_s"]) == pytest.approx(3 * 2.0 * work)


def test_a_system_changes_no_weight_and_resuming_changes_no_sum(tmp_path: Path) -> None:
    plain = toy_trainer(tmp_path / "plain", callbacks=[])
    plain.fit(toy_semifl(), ToyData())
    whole = toy_trainer(tmp_path / "whole", system=varied())
    whole.fit(toy_semifl(), ToyData())
    toy_trainer(tmp_path / "parts", system=varied(), callbacks=[StopAfter(1)]).fit(toy_semifl(), ToyData())
    resumed = toy_trainer(tmp_path / "parts", system=varied())
    resumed.fit(toy_semifl(), ToyData(), ckpt_path="last")
    expected, found = logged(whole), logged(resumed)
    assert {"system/seconds", "system/upload_bytes", "communication/total_bytes"} <= found[3].keys()
    assert all(found[t] == expected[t] for t in (2, 3))
    rounds = [float(expected[t]["system/round_s"]) for t in (1, 2, 3)]
    assert float(expected[3]["system/seconds"]) == pytest.approx(sum(rounds))
    assert len(set(rounds)) == 3
    for t, row in logged(plain).items():
        assert row.items() <= expected[t].items()


def test_a_resumed_run_says_that_earlier_rounds_were_not_timed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy_trainer(tmp_path, callbacks=[StopAfter(1)]).fit(toy_fedavg(), labeled_clients())
    resumed = toy_trainer(tmp_path, system=even())
    with caplog.at_level(logging.WARNING):
        resumed.fit(toy_fedavg(), labeled_clients(), ckpt_path="last")
    assert "system/* are sums from round 2 on" in caplog.text
    assert resumed.callback_metrics["system/upload_bytes"] == 2 * 3 * CNN_WEIGHTS
    assert resumed.callback_metrics["communication/total_bytes"] == 3 * 2 * 3 * CNN_WEIGHTS


def test_a_clock_without_a_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SystemClock needs the key trainer\.system"):
        toy_trainer(tmp_path, callbacks=SystemClock(), logger=False).fit(toy_semifl(), ToyData())


def test_ranks_give_the_times_and_the_ledger_of_one(tmp_path: Path) -> None:
    trainers = []
    for ranks in (1, 3):
        trainer = toy_trainer(
            tmp_path / str(ranks), max_rounds=2, system=varied(), callbacks=CommunicationLedger(), **forked(ranks)
        )
        trainer.fit(toy_fedavg(), labeled_clients())
        trainers.append(trainer)
    alone, together = (
        {n: float(v) for n, v in t.callback_metrics.items() if n.startswith(("system/", "communication/"))}
        for t in trainers
    )
    assert alone == together
    ledgers = [next((tmp_path / ranks).rglob("ledger.csv")).read_text() for ranks in ("1", "3")]
    assert ledgers[0] == ledgers[1]
    assert ledger_of(trainers[0])["up", "network.classifier.weight"]["times"] == "6"
