"""Federations of real processes on this machine: Flower's SuperLink and SuperNodes, with TLS.

All tests share one SuperLink and three nodes, which have one client each. The nodes are connected through a relay that
reads what they send, and can delay and cut their connections. Run them where Flower is installed:
``python -m pytest tests/test_flower_processes.py``.
"""

from __future__ import annotations

import csv
import math
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")

from lightning_fedssl.cli import FederatedCLI
from lightning_fedssl.cli.deploy import write_app
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.deployment.flower.local import LocalFederation, free_port
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.storage import checkpoint_file

from .relay import Relay
from .test_deployment import save_images

PATIENCE = 1500
"""Seconds until a test gives up: this machine may be busy."""

SMALL = ("--trainer.max_rounds=2", "--data.max_train_images=240", "--trainer.callbacks=[]")
CONFIGS: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "semifl": ("--model.server_epochs=5", "--model.client_epochs=1", "--model.threshold=0.2"),
    "fixmatch": ("--model.threshold=0.5",),
    "fedrgd": ("--model.threshold=0.2", "--model.server_only_rounds=0"),
    "fedshvr": ("--data.num_labels=30",),
}


class Federation(LocalFederation):
    """A SuperLink, and nodes with the clients 0, 1 and 2 and with data of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.relayed = free_port()
        self.relay = Relay(self.folder, self.relayed, self.port)
        self.own_data = write_own_data(self.folder / "own")
        self.shown_again: set[str] = set()

    def start_client(self, client: int) -> None:
        """Start the node of a client, behind the relay."""
        config = {"clients": str(client), "data": str(self.own_data[client])}
        self.start_node(f"node-{client}", config, port=self.relayed)

    def finish(self, app: Path, name: str, **run_config: str | int) -> str:
        """Run an app to its end; the log of the run."""
        self.submit(app, {key.replace("_", "-"): value for key, value in run_config.items()}, name)
        self.wait_for(name, "test/accuracy")
        return self.log(name).read_text()

    def stop_run(self, name: str) -> None:
        """Stop a run with Flower's command, and wait until ``flwr run`` has ended."""
        (run_id,) = re.findall(r"started run (\d+)", self.log(name).read_text())
        subprocess.run(["flwr", "stop", run_id, "local"], env=self.environment, check=True, capture_output=True)
        self.processes.pop(name).wait()

    def wait_for(self, name: str, text: str, of: str = "", more_than: int = 0) -> None:
        """Wait until the log of a process has a text more than a number of times, while it or another process runs."""
        end, path, of = time.monotonic() + PATIENCE, self.log(name), of or name
        while path.read_text(errors="replace").count(text) <= more_than:
            ended = self.processes[of].poll() is not None
            assert time.monotonic() < end, f"{text!r} is not in {path}"
            if ended and path.read_text(errors="replace").count(text) <= more_than:
                self.show_log_again(of)
            time.sleep(0.5)

    def show_log_again(self, name: str) -> None:
        """Show the log of a run once more: on a busy machine ``flwr run`` can end before the run does."""
        path = self.log(name)
        text = path.read_text(errors="replace")
        runs = re.findall(r"started run (\d+)", text)
        assert runs, text[-3000:]
        assert name not in self.shown_again, text[-3000:]
        self.shown_again.add(name)
        path.write_text(f"started run {runs[0]}\n")
        self._start(name, "flwr", "log", runs[0], "local", "--stream")


def write_own_data(folder: Path) -> list[Path]:
    """A folder of images, a table and arrays, one for each node; and images with labels for the server."""
    save_images(folder / "server" / "train", [0, 1, 2] * 6, 0)
    save_images(folder / "server" / "test", [0, 1, 2] * 4, 1)
    save_images(folder / "0" / "unlabeled", [0, 1, 2] * 5, 2)
    save_images(folder / "1" / "unlabeled", [0, 1, 2] * 5, 3)
    files = sorted((folder / "1" / "unlabeled").iterdir())
    (folder / "1.csv").write_text("file,label\n" + "".join(f"1/unlabeled/{file.name},\n" for file in files))
    save_images(folder / "2" / "unlabeled", [0, 1, 2] * 5, 4)
    images = [np.asarray(Image.open(file).convert("RGB")) for file in sorted((folder / "2" / "unlabeled").iterdir())]
    np.savez(folder / "2.npz", unlabeled=np.stack(images).transpose(0, 3, 1, 2))
    return [folder / "0", folder / "1.csv", folder / "2.npz"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("flower"))
    with federation:
        for client in range(3):
            federation.start_client(client)
        federation.start_server(preload=True)
        yield federation
    federation.relay.close()


def options_of(tmp_path: Path, config: str, *more: str) -> list[str]:
    """Options for three clients in 64 bits, and of few steps."""
    return [
        f"--config={config}_digits.yaml", "--data.num_clients=3", "--trainer.clients_per_round=3",
        "--trainer.precision=64-true", f"--trainer.default_root_dir={tmp_path / 'server'}", *SMALL,
        *CONFIGS.get(config, ()), *more,
    ]  # fmt: skip


def simulate(tmp_path: Path, options: list[str]) -> FederatedCLI:
    root = f"--trainer.default_root_dir={tmp_path / 'simulation'}"
    return FederatedCLI(args=["fit", *options, root, "--trainer.enable_progress_bar=false"])


def app_of(tmp_path: Path, options: list[str], own_data: bool = False) -> Path:
    write_app(tmp_path / "app", options, own_data)
    return tmp_path / "app"


def last(folder: Path) -> checkpoint_file.Checkpoint:
    return checkpoint_file.load(checkpoint_file.find("last", folder))


def assert_same_result(tmp_path: Path) -> None:
    """The server's weights and buffers are those of the simulation."""
    deployed, simulated = last(tmp_path / "server"), last(tmp_path / "simulation")
    assert deployed["round"] == simulated["round"]
    for part in ("parameters", "buffers"):
        assert deployed["federation"][part].keys() == simulated["federation"][part].keys()
        for name, tensor in simulated["federation"][part].items():
            torch.testing.assert_close(deployed["federation"][part][name], tensor, rtol=0, atol=1e-10)


def scalars(tmp_path: Path, name: str) -> list[float]:
    """The values of a scalar in the server's table, one of each round that has one."""
    with next((tmp_path / "server").rglob("metrics.csv")).open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def secrets_of(data: LocalData) -> Iterator[bytes]:
    """The bytes of some images of a client, in the forms in which a program could send them, and of its labels."""
    for position in range(3):
        image = data.images[position]
        rows = [image[0, 2:6], image[0, 2:6].double() / 255, data.plain(torch.tensor([position]))[0, 0, 2:6]]
        for form in (*rows, *(row.float() for row in rows)):
            yield form.numpy().tobytes()
    if len(data.labels.unique()) > 2:
        for kind in (torch.int64, torch.int32, torch.uint8, torch.float32):
            yield data.labels[:20].to(kind).numpy().tobytes()


def assert_private(relay: Relay, parts: list[LocalData], downloaded: list[bytes]) -> None:
    """No image and no label of a client was sent; what was sent could be read, as known downloads are in it."""
    assert any(tensor in stream for tensor in downloaded for stream in relay.down)
    assert any(b"network." in stream for stream in relay.up)
    for secret in (secret for part in parts for secret in secrets_of(part)):
        assert not any(secret in stream for stream in (*relay.up, *relay.down))


def downloads(federation: Federation) -> list[bytes]:
    """Tensors that a client has received in the last round of the last run; a frame of HTTP/2 may split one of them."""
    import safetensors.torch

    newest = max(
        federation.folder.glob("fedssl-state/*/client-0/*.received.safetensors"), key=lambda f: f.stat().st_mtime
    )
    tensors = safetensors.torch.load(newest.read_bytes())
    return [t.numpy().tobytes() for name, t in tensors.items() if name.startswith("network.") and t.any()]


@pytest.mark.parametrize("config", CONFIGS)
def test_real_processes_equal_the_simulation_and_send_no_image_and_no_label(
    federation: Federation, tmp_path: Path, config: str
) -> None:
    options = options_of(tmp_path, config)
    cli = simulate(tmp_path, options)
    federation.relay.clear()
    log = federation.finish(app_of(tmp_path, options), config)
    assert_same_result(tmp_path)
    assert scalars(tmp_path, "client/trained")[-1] >= 2
    assert_private(federation.relay, [cli.datamodule.local_data(k, 1) for k in range(3)], downloads(federation))
    assert re.search(r"round 2/2: client 0 made \d+ steps", federation.log("node-0").read_text())
    folder = next((tmp_path / "server").rglob("result.json")).parent
    assert {"metrics.csv", "hparams.yaml"} <= {path.name for path in folder.iterdir()}
    assert list(folder.glob("events.out*"))
    assert "WARNING" not in log


def test_a_slow_network_whose_connections_break_loses_no_update(federation: Federation, tmp_path: Path) -> None:
    """Each 16 KiB take 50 ms. A message is lost in the first round: the connection breaks while its node fetches it.

    All connections break when clients have trained in the second round, so that updates can be lost, too.
    """
    options = options_of(tmp_path, "fedshvr")
    simulate(tmp_path, options)
    relay = federation.relay
    before = trainings(federation)
    relay.delay, relay.piece, relay.lose = 0.05, 1 << 14, [(b"/pull-messages", b"train.client")]
    try:
        federation.submit(app_of(tmp_path, options), {"repeat-after": 15}, "slow")
        for client in range(3):
            federation.wait_for(f"node-{client}", "round 2/2: client", of="slow", more_than=before[client, 2])
        assert relay.cut()
        federation.wait_for("slow", "test/accuracy")
    finally:
        relay.delay, relay.piece = 0.0, 1 << 16
    assert not relay.lose
    assert "or its answer was lost; the message is sent again" in federation.log("slow").read_text()
    assert_same_result(tmp_path)
    assert scalars(tmp_path, "client/trained") == [3.0, 3.0]
    assert trainings(federation) == {key: count + 1 for key, count in before.items()}


def trainings(federation: Federation) -> dict[tuple[int, int], int]:
    """How often each client has trained in the first and in the second of two rounds, by client and round."""
    logs = {client: federation.log(f"node-{client}").read_text() for client in range(3)}
    return {(k, t): log.count(f"round {t}/2: client {k} made") for k, log in logs.items() for t in (1, 2)}


_HOSTILE = """
import numpy as np
from flwr.app import Array, ArrayRecord


def hostile(message, context, call_next):
    answer = call_next(message, context)
    arrays = answer.content.array_records["tensors"]
    if context.node_config["clients"] == "1":
        arrays = ArrayRecord({name: Array(np.full_like(array.numpy(), np.nan)) for name, array in arrays.items()})
    elif context.node_config["clients"] == "2":
        arrays = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"garbage")})
    answer.content["tensors"] = arrays
    return answer


app = client_app(Path(__file__).with_name("config.yaml"), mods=[hostile])
"""


def test_nodes_that_send_garbage_and_nan_are_rejected_and_the_run_continues(
    federation: Federation, tmp_path: Path
) -> None:
    """The result is that of the simulation in which the updates of the same clients are not finite."""
    options = options_of(tmp_path, "fedavg")
    root = f"--trainer.default_root_dir={tmp_path / 'simulation'}"
    simulation = FederatedCLI(args=[*options, root, "--trainer.enable_progress_bar=false"], run=False)
    original = simulation.model.on_client_end

    def poisoned(update: ClientUpdate) -> ClientUpdate:
        update = original(update)
        nan = {name: torch.full_like(p, math.nan) for name, p in update.parameters.items()}
        return update if update.client == 0 else replace(update, parameters=nan)

    vars(simulation.model)["on_client_end"] = poisoned
    simulation.trainer.fit(simulation.model, simulation.datamodule)
    app = app_of(tmp_path, options)
    with (app / "fedssl_app" / "client_app.py").open("a") as file:
        file.write(_HOSTILE)
    lines = federation.finish(app, "hostile").splitlines()
    assert_same_result(tmp_path)
    assert scalars(tmp_path, "client/refused") == [2.0, 2.0]
    for client, reason in ((1, "returned weights that are not finite"), (2, "its array 'w' cannot be read")):
        rejected = [line for line in lines if f"client {client} " in line]
        assert len(rejected) == 2
        assert all(reason in line and "left out of the average" in line for line in rejected)


def test_a_node_joins_late_and_is_killed_in_a_round(federation: Federation, tmp_path: Path) -> None:
    """It is a SuperNode as Flower's documentation starts it: it imports PyTorch for every message."""
    options = options_of(tmp_path, "fedavg", "--data.num_clients=4", "--trainer.clients_per_round=4")
    app = app_of(tmp_path, [*options, "--trainer.max_rounds=200"])
    federation.submit(app, {"wait-for-clients": 3, "answer-timeout": 600}, "late")
    federation.wait_for("late", "round 1/200")
    federation.start_node("node-3", {"clients": "3"}, preload=False)
    federation.wait_for("node-3", "client 3 made", of="late")
    known = federation.log("node-3").read_text().count("Receiving: train.client")
    while federation.log("node-3").read_text().count("Receiving: train.client") == known:
        time.sleep(0.2)
    federation.stop("node-3")
    federation.wait_for("late", "the round goes on without it")
    assert re.search(r"round \d+: client 3 (failed|has lost its node)", federation.log("late").read_text())
    absent, rounds = scalars(tmp_path, "client/absent"), len(scalars(tmp_path, "client/trained"))
    while len(scalars(tmp_path, "client/trained")) < rounds + 2:
        time.sleep(0.5)
    federation.stop_run("late")
    trained = scalars(tmp_path, "client/trained")
    assert (trained[0], max(trained), trained[-1]) == (3.0, 4.0, 3.0)
    assert absent[0] == 1.0


def test_nodes_with_data_of_their_own(federation: Federation, tmp_path: Path) -> None:
    """A folder of images, a table of image files, and arrays; the server has labelled images alone."""
    options = [
        "--config=fixmatch_digits.yaml", "--data.dataset=image_folder", "--data.image_size=8", "--data.num_labels=all",
        f"--data.root={federation.folder / 'own' / 'server'}", "--data.num_clients=3", "--trainer.clients_per_round=3",
        f"--trainer.default_root_dir={tmp_path / 'server'}", "--model.threshold=0.3", "--trainer.max_rounds=2",
        "--trainer.callbacks=[]",
    ]  # fmt: skip
    federation.relay.clear()
    log = federation.finish(app_of(tmp_path, options, own_data=True), "own")
    assert "3 clients: 15 images each" in log
    assert scalars(tmp_path, "client/trained")[-1] == 3.0
    images = [np.load(federation.own_data[2])["unlabeled"][0, 0]]
    for client in range(2):
        images.append(np.asarray(Image.open(federation.folder / f"own/{client}/unlabeled/000.png")))
    assert any(b"network." in stream for stream in federation.relay.up)
    for image in images:
        assert not any(image[2:6].tobytes() in stream for stream in federation.relay.up)


def test_a_federation_whose_server_and_node_are_killed_equals_the_simulation(
    federation: Federation, tmp_path: Path
) -> None:
    """Fed-SHVR: a client's control variate is at its node, and the server resumes its checkpoint."""
    options = options_of(tmp_path, "fedshvr", "--trainer.max_rounds=3")
    simulate(tmp_path, options)
    app = app_of(tmp_path, options)
    federation.submit(app, {}, "killed")
    federation.wait_for("killed", "round 1/3")
    for name in ("server", "killed", "node-2"):
        federation.stop(name)
    assert last(tmp_path / "server")["round"] in (1, 2)
    federation.start_server(preload=True)
    federation.start_client(2)
    assert "resuming" in federation.finish(app, "resumed")
    assert_same_result(tmp_path)
    kept = last(tmp_path / "server")["federation"]["clients"]
    assert not any("control" in key for state in kept.values() for key in state)
