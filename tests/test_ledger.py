"""What crosses between server and clients, in bytes worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from lightning_fedssl import sampling
from tests.test_diversity import toy_rgd
from tests.test_fed_shvr import toy_shvr, uneven_clients
from tests.toy import ToyData, Transfers, toy_trainer

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
    seen, trainer = transfers(tmp_path, toy_rgd(), ToyData(), max_rounds=2, clients_per_round=4)
    for client in range(4):
        down = CNN_WEIGHTS + BATCH_NORM + COUNTERS
        up = CNN_WEIGHTS + BATCH_NORM + CNN_WEIGHTS
        assert seen.bytes(1, client, "down") == down
        assert seen.bytes(2, client, "down") == down + CNN_WEIGHTS
        assert seen.bytes(1, client, "up") == seen.bytes(2, client, "up") == up
    assert trainer.callback_metrics["communication/upload_bytes"] == 4 * up


def test_fedrgd_without_kept_momentum_sends_models_alone(tmp_path: Path) -> None:
    algorithm = toy_rgd(keep_client_optimizer=False)
    seen, _ = transfers(tmp_path, algorithm, ToyData(), max_rounds=2, clients_per_round=4)
    assert seen.bytes(2, 0, "down") == CNN_WEIGHTS + BATCH_NORM + COUNTERS
    assert seen.bytes(2, 0, "up") == CNN_WEIGHTS + BATCH_NORM


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


def test_fed_svr_without_control_variate_is_federated_averaging(tmp_path: Path) -> None:
    algorithm = toy_shvr(control_variate=False, averaging="plain")
    seen, _ = transfers(tmp_path, algorithm, uneven_clients(), max_rounds=1, clients_per_round=4)
    assert {seen.bytes(1, client, "up") for client in range(4)} == {CNN_WEIGHTS}
