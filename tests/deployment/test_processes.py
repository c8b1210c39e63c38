"""Federations of real processes on this machine: Flower's SuperLink and SuperNodes, with TLS.

All tests share one SuperLink and three nodes. The nodes are connected through a relay that reads what they send.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")

from lightning_fedssl.cli import FederatedCLI
from lightning_fedssl.cli.deploy import main, write_app
from lightning_fedssl.deployment.demo import LocalFederation, free_port
from lightning_fedssl.storage import checkpoint_file

from .relay import Relay

pytestmark = pytest.mark.slow  # test_server.py shows the same in one process

PATIENCE = 900
"""Seconds until a test gives up: this machine may be busy."""


class Federation(LocalFederation):
    """A SuperLink, and nodes of the clients 0, 1 and 2."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.relayed = free_port()
        self.relay = Relay(self.folder, self.relayed, self.port)

    def start_client(self, client: int) -> None:
        """Start the node of a client, behind the relay."""
        with mock.patch.object(self, "port", self.relayed):
            self.start_node(f"node-{client}", f"client={client}")

    def kill(self, name: str) -> None:
        """Kill a process and those that it started."""
        process = self.processes.pop(name)
        for child in (*descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()

    def submit(self, tmp_path: Path, options: list[str], name: str) -> None:
        """Start the run of an app."""
        if not (tmp_path / "app").exists():
            write_app(tmp_path / "app", options)
        self.start(name, "flwr", "run", str(tmp_path / "app"), "local", "--stream")

    def wait_for(self, name: str, text: str) -> str:
        """Wait until the log of a process has a text; the log."""
        end = time.monotonic() + PATIENCE
        while text not in (log := self.log(name).read_text(errors="replace")):
            assert time.monotonic() < end, log[-3000:]
            assert self.processes[name].poll() is None or text in self.log(name).read_text(errors="replace"), log[
                -3000:
            ]
            time.sleep(0.5)
        return log


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()
    return [found for child in map(int, children) for found in (*descendants(child), child)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("flower"))
    with federation:
        federation.start_server()
        for client in range(3):
            federation.start_client(client)
        yield federation
    federation.relay.close()


def options_of(tmp_path: Path, config: str, *more: str) -> list[str]:
    """Options for three clients in 64 bits, and of few steps."""
    return [
        f"--config={config}_digits.yaml", "--data.num_clients=3", "--trainer.clients_per_round=3",
        "--trainer.precision=64-true", f"--trainer.default_root_dir={tmp_path / 'server'}", "--trainer.max_rounds=2",
        "--data.max_train_images=240", "--trainer.callbacks=[]", *more,
    ]  # fmt: skip


def assert_equals_the_simulation(tmp_path: Path, options: list[str]) -> FederatedCLI:
    """The server's weights and buffers are those of the simulation, which runs here."""
    root = f"--trainer.default_root_dir={tmp_path / 'simulation'}"
    cli = FederatedCLI(args=["fit", *options, root, "--trainer.enable_progress_bar=false"])
    deployed, simulated = (
        checkpoint_file.load(checkpoint_file.find("last", tmp_path / name)) for name in ("server", "simulation")
    )
    assert deployed["round"] == simulated["round"]
    for part in ("parameters", "buffers"):
        assert deployed["federation"][part].keys() == simulated["federation"][part].keys()
        for name, tensor in simulated["federation"][part].items():
            torch.testing.assert_close(deployed["federation"][part][name], tensor, rtol=0, atol=1e-10)
    return cli


def test_real_processes_equal_the_simulation_and_send_no_image(federation: Federation, tmp_path: Path) -> None:
    """What nodes and server sent can be read at the relay, as names of tensors are in it."""
    options = options_of(tmp_path, "semifl", "--model.server_epochs=5", "--model.client_epochs=1")
    options += ["--model.threshold=0.2"]
    federation.relay.clear()
    federation.submit(tmp_path, options, "semifl")
    federation.wait_for("semifl", "test/accuracy")
    cli = assert_equals_the_simulation(tmp_path, options)
    with next((tmp_path / "server").rglob("metrics.csv")).open() as file:
        assert [row["client/trained"] for row in csv.DictReader(file) if row["client/trained"]][-1] == "3.0"
    relay = federation.relay
    assert any(b"network." in stream for stream in relay.up)
    for client in range(3):
        data = cli.datamodule.local_data(client, 1)
        for row in (image[0, 2:6] for image in data.images[data.unlabeled[:3]]):
            forms = [row, row.double() / 255, row.float() / 255]
            secrets = [form.numpy().tobytes() for form in forms]
            assert not any(secret in stream for secret in secrets for stream in (*relay.up, *relay.down))


def test_a_federation_whose_server_and_node_are_killed_equals_the_simulation(
    federation: Federation, tmp_path: Path
) -> None:
    """Fed-SHVR: a client's control variate is at its node, and the server resumes its checkpoint."""
    options = options_of(tmp_path, "fedshvr", "--trainer.max_rounds=3", "--data.num_labels=30")
    federation.submit(tmp_path, options, "killed")
    federation.wait_for("killed", "round 1/3")
    for name in ("server", "killed", "node-2"):
        federation.kill(name)
    federation.start_server()
    federation.start_client(2)
    federation.submit(tmp_path, options, "resumed")
    assert "resuming" in federation.wait_for("resumed", "test/accuracy")
    assert_equals_the_simulation(tmp_path, options)


def test_the_demonstration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(tmp_path / "demo")]) == 0
    assert re.search(r"^test/accuracy 0\.[89]", capsys.readouterr().out, re.MULTILINE)
