"""On a CUDA device a run computes what it computes on the CPU: ``make gpu`` runs these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import SemiFL
from tests.algorithms.helpers import METHODS
from tests.toy import ToyData, assert_same, toy, toy_trainer, weights
from tests.trainer.helpers import StopAfter, logged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(
    folder: Path, method: str, ckpt_path: str | None = None, **settings: Any
) -> tuple[dict[str, torch.Tensor], Any]:
    """The global model on the CPU, and what was logged."""
    make, data = METHODS[method]
    algorithm, trainer = make(), toy_trainer(folder, devices=1, **settings)
    trainer.fit(algorithm, data(), ckpt_path=ckpt_path)
    return {name: t.cpu() for name, t in weights(algorithm).items()}, logged(trainer)


def numbers(rows: dict[int, dict[str, str]]) -> dict[int, dict[str, float]]:
    """Logged scalars as numbers."""
    return {step: {key: float(value) for key, value in row.items()} for step, row in rows.items()}


@pytest.mark.parametrize("at_once", ["auto", 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_computes_what_it_does_on_the_cpu(method: str, at_once: Any, tmp_path: Path) -> None:
    if method == "fed_shvr_dropout":
        pytest.skip("a GPU draws other random numbers for dropout")
    expected, told = run(tmp_path / "cpu", method, precision="64-true")
    settings = {"accelerator": "cuda", "clients_at_once": at_once, "precision": "64-true"}
    found, logs = run(tmp_path / "gpu", method, **settings)
    far = {name: float((t.double() - found[name].double()).abs().max()) for name, t in expected.items()}
    assert max(far.values()) < 1e-9, far
    assert logs.keys() == told.keys()
    for step, row in numbers(told).items():
        assert numbers(logs)[step] == pytest.approx(row, rel=1e-6, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accelerator": "cuda", "deterministic": True, "max_rounds": 4}
    whole, told = run(tmp_path / "whole", method, **settings)
    run(tmp_path / "parts", method, callbacks=StopAfter(2), **settings)
    resumed, logs = run(tmp_path / "parts", method, ckpt_path="last", **settings)
    assert_same(resumed, whole)
    assert logs == told


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_every_precision_learns(precision: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accelerator": "cuda", "precision": precision, "max_rounds": 10}
    _, logs = run(tmp_path, "semifl", **settings)
    assert float(logs[max(logs)]["test/accuracy"]) > 0.6


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("norm", ["batch", "static_batch", "group", "none"])
def test_clients_are_stacked_in_mixed_precision(norm: Any, channels_last: bool, tmp_path: Path) -> None:
    algorithm = toy(SemiFL, norm, threshold=0.4, client_epochs=1, server_epochs=1)
    settings: dict[str, Any] = {"accelerator": "cuda", "precision": "bf16-mixed", "channels_last": channels_last}
    trainer = toy_trainer(tmp_path, devices=1, **settings)
    trainer.fit(algorithm, ToyData())
    assert not trainer.run.local_training.refusal
    assert all(t.isfinite().all() for t in algorithm.server.model().values() if t.is_floating_point())
