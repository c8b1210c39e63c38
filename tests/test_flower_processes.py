"""Federations of real processes on this machine: Flower's SuperLink and SuperNodes, with TLS."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")

from lightning_fedssl.cli import FederatedCLI
from lightning_fedssl.cli.deploy import write_app
from lightning_fedssl.deployment.flower.local import LocalFederation
from lightning_fedssl.storage import checkpoint_file

PATIENCE = 1500
"""Seconds until a test gives up: every message costs the start of a process, which imports PyTorch."""


def wait_until(federation: LocalFederation, done: Callable[[], bool], name: str = "run") -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        ended = name in federation.processes and federation.processes[name].poll() is not None
        assert done() or (time.monotonic() < end and not ended), federation.log(name).read_text()[-3000:]
        time.sleep(0.5)


def has(path: Path, text: str) -> Callable[[], bool]:
    return lambda: path.is_file() and text in path.read_text(errors="replace")


def app_of(tmp_path: Path, config: str, *more: str) -> tuple[Path, list[str]]:
    """An app of a configuration with three clients, and its options."""
    options = [
        f"--config={config}", "--data.num_clients=3", "--trainer.clients_per_round=3", "--trainer.max_rounds=3",
        "--trainer.precision=64-true", f"--trainer.default_root_dir={tmp_path / 'server'}", *more,
    ]  # fmt: skip
    write_app(tmp_path / "app", options)
    return tmp_path / "app", options


def last(folder: Path) -> checkpoint_file.Checkpoint:
    return checkpoint_file.load(checkpoint_file.find("last", folder))


def test_a_federation_whose_server_and_node_are_killed_equals_the_simulation(tmp_path: Path) -> None:
    """Fed-SHVR in 64 bits: a client's control variate is at its node, and the server resumes its checkpoint."""
    app, options = app_of(tmp_path, "fedshvr_digits.yaml")
    FederatedCLI(args=["fit", *options, f"--trainer.default_root_dir={tmp_path / 'simulation'}"])
    with LocalFederation(tmp_path / "flower") as federation:
        federation.start_server()
        for client in range(3):
            federation.start_node(f"node-{client}", {"clients": str(client)})
        federation.submit(app, {})
        wait_until(federation, has(federation.log("run"), "round 1/3"))
        for name in ("server", "run", "node-2"):
            federation.stop(name)
        assert last(tmp_path / "server")["round"] in (1, 2)
        federation.start_server()
        federation.start_node("node-2", {"clients": "2"})
        federation.submit(app, {})
        wait_until(federation, has(federation.log("run"), "test/accuracy"))
    deployed, simulated = last(tmp_path / "server"), last(tmp_path / "simulation")
    assert deployed["round"] == simulated["round"] == 3
    for name, tensor in simulated["federation"]["parameters"].items():
        torch.testing.assert_close(deployed["federation"]["parameters"][name], tensor, rtol=0, atol=1e-10)
    assert not any("control" in key for state in deployed["federation"]["clients"].values() for key in state)
    assert "resuming" in federation.log("run").read_text()


def test_a_node_that_is_killed_in_a_round_misses_it_and_the_run_continues(tmp_path: Path) -> None:
    app, _ = app_of(tmp_path, "fedavg_digits.yaml", "--trainer.max_rounds=2")
    with LocalFederation(tmp_path / "flower") as federation:
        federation.start_server()
        for client in range(3):
            federation.start_node(f"node-{client}", {"clients": str(client)})
        federation.submit(app, {"answer-timeout": 120})
        wait_until(federation, has(federation.log("node-1"), "train.client"))
        federation.stop("node-1")
        wait_until(federation, has(federation.log("run"), "test/accuracy"))
    with next((tmp_path / "server").rglob("metrics.csv")).open() as file:
        absent = [row["client/absent"] for row in csv.DictReader(file) if row.get("client/absent")]
    assert absent[0] == "1.0"
    assert last(tmp_path / "server")["round"] == 2
