"""Server and nodes in one process: equal to the simulation, and what a node that fails or lies can do."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")

from flwr.app import Message
from flwr.app.error import Error
from flwr.clientapp.mod import LocalDpMod
from flwr.common.serde import message_to_proto

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import CBAFed, FedDB, FedMatch, FedRGD, RSCFed, SemiSFL, Supervised
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.deployment.obstacles import refuse_undeployable
from lightning_fedssl.deployment.server import fit_on_grid, unfinished
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates import CentralDP
from tests.toy import Dies, Transfers, assert_same, dies, toy_trainer, weights

from .helpers import METHODS, FakeGrid, Fault, app_of, changed, grid_of, network, nodes_of, records, server_of

Counted = dict[tuple[int, int, str], dict[str, int]]


def fit(trainer: Any, name: str, **options: Any) -> FederatedAlgorithm:
    make, make_data = METHODS[name]
    algorithm = make()
    trainer.fit(algorithm, make_data(), **options)
    return algorithm


def simulated(tmp_path: Path, name: str, **keys: Any) -> FederatedAlgorithm:
    return fit(toy_trainer(tmp_path / "simulation", **{"logger": False} | keys), name)


def merged(seen: Transfers) -> Counted:
    """Bytes by round, client and direction."""
    found: Counted = {}
    for round_index, client, direction, sizes in seen.seen:
        found.setdefault((round_index, client, direction), {}).update(sizes)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_deployment_equals_the_simulation(tmp_path: Path, name: str) -> None:
    """Weights, buffers and the counted transfers, and the tensors of the messages are those that are counted."""
    expected, seen = Transfers(), Transfers()
    reference = simulated(tmp_path, name, callbacks=[expected])
    grid = grid_of(tmp_path, name)
    algorithm = fit(server_of(tmp_path, grid, callbacks=[seen]), name)
    assert_same(weights(algorithm), weights(reference))
    if name != "FedSwitch":  # whose clients get the teacher at once, instead of asking for it
        assert merged(seen) == merged(expected)
    numbers = {"tau", "class shares"}  # a number of 8 bytes is a value of the message; shares are in the configuration
    counted = {key: {n: s for n, s in sizes.items() if n not in numbers} for key, sizes in merged(seen).items()}
    assert in_messages(grid) == {key: sizes for key, sizes in counted.items() if sizes}


def test_the_server_writes_a_page_of_the_run(tmp_path: Path) -> None:
    trainer = server_of(tmp_path, grid_of(tmp_path, "SemiFL"), logger=CSVLogger(tmp_path))
    fit(trainer, "SemiFL")
    page = Path(str(trainer.log_dir), "report.html").read_text(encoding="utf-8")
    assert "4 of 4 clients were drawn so far" in page
    assert "test images are classified correctly" in page


def in_messages(grid: FakeGrid) -> Counted:
    """Bytes of the tensors in the messages, by round, client and direction."""
    found: Counted = {}
    for message in grid.sent:
        arrays = message.content.array_records["tensors"]
        down = message.metadata.dst_node_id >= 100
        client = (message.metadata.dst_node_id if down else message.metadata.src_node_id) - 100
        key = (int(message.content.config_records["values"].get("round", 0)), client, "down" if down else "up")
        if arrays:
            found.setdefault(key, {}).update({name: array.numpy().nbytes for name, array in arrays.items()})
    return found


@pytest.mark.parametrize("name", ["FedAvg", "SemiFL", "FixMatch"])
def test_no_image_and_no_label_is_in_a_message(tmp_path: Path, name: str) -> None:
    grid = grid_of(tmp_path, name, max_rounds=1)
    fit(server_of(tmp_path, grid, max_rounds=1), name)
    data = METHODS[name][1]()
    data.setup()
    secrets = []
    for client in range(4):
        part = data.local_data(client, 1)
        row = (part.unlabeled if len(part.unlabeled) else part.labeled)[:1]
        secrets += [part.images[row], part.plain(row), part.images[row].float()]
        secrets += [part.labels] if len(part.labels) else []
    sent = [message_to_proto(message).SerializeToString() for message in grid.sent]
    assert any(b"network." in data for data in sent)
    assert not any(secret.numpy().tobytes() in data for secret in secrets for data in sent)


OBSTACLES = [
    (lambda: FedMatch(network=network("none")), "FedMatch sends clients the models of other clients"),
    (lambda: SemiSFL(network=network("batch")), "SemiSFL exchanges features and gradients"),
    (lambda: FedDB(network=network("none")), "FedDB needs the mean prediction of every client"),
    (lambda: CBAFed(network=network("none")), "CBAFed needs the numbers of labels of every client"),
    (lambda: RSCFed(network=network("none")), "RSCFed needs to know which clients have labels"),
    (lambda: Supervised(network=network("none")), "Supervised trains at the server alone"),
    (lambda: FedRGD(network=network("none")), "FedRGD keeps the momentum of its clients at the server"),
]


@pytest.mark.parametrize(("make", "reason"), OBSTACLES)
def test_a_method_that_cannot_be_deployed_is_refused_by_name(
    make: Callable[[], FederatedAlgorithm], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*simulate it"):
        refuse_undeployable(make())


@pytest.mark.parametrize(
    ("callback", "reason"),
    [
        (StaticBatchNorm(source="pooled"), "data do not leave a node"),
        (FederatedCheckpoint(every_n_rounds=2), r"every_n_rounds is 2, .*: set it to 1 in a deployment"),
    ],
)
def test_callbacks_that_cannot_be_deployed_are_refused(tmp_path: Path, callback: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fit(server_of(tmp_path, FakeGrid({}), callbacks=[callback]), "SemiFL")


# Faults.


def client_of_round(round_index: int) -> int:
    """The first client that is asked to train in a round."""
    return sampling.cohort(0, round_index, 4, 3)[0]


def with_fault(
    tmp_path: Path, name: str, fault: Fault, kind: str = "train", **keys: Any
) -> tuple[FederatedAlgorithm, int]:
    """A run in which the answer of the first client of round 2 has a fault, and that client."""
    grid, client = grid_of(tmp_path, name, **keys), client_of_round(2)
    grid.faults[100 + client, kind, 2] = fault
    return fit(server_of(tmp_path, grid, **keys), name), client


def without_client(tmp_path: Path, name: str, client: int, **keys: Any) -> FederatedAlgorithm:
    """The simulation in which a client's update of round 2 is rejected because it is not finite."""
    make, make_data = METHODS[name]
    algorithm = make()
    original = algorithm.on_client_end

    def poisoned(update: ClientUpdate) -> ClientUpdate:
        update = original(update)
        if (update.client, algorithm.current_round.index) != (client, 2):
            return update
        return replace(update, parameters={n: torch.full_like(p, math.nan) for n, p in update.parameters.items()})

    vars(algorithm)["on_client_end"] = poisoned
    toy_trainer(tmp_path / "reference", **{"logger": False} | keys).fit(algorithm, make_data())
    return algorithm


def spoilt(value: float, part: str = "") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The same tensors with one value in all those whose name has a part."""
    return lambda tensors: {n: np.full_like(t, value) if part in n else t for n, t in tensors.items()}


def without(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(prefix)}


def extra(name: str, tensor: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {**tensors, name: tensor}


def failed(answer: Message) -> Message:
    return Message(Error(code=1, reason="line\nbreak \x1b[31m" + "x" * 999), reply_to=answer)


LIES: dict[str, tuple[str, Fault, str]] = {
    "nan": ("FedAvg", changed(spoilt(math.nan)), "returned weights that are not finite"),
    "running_var": ("FedAvg", changed(spoilt(-5, "running_var")), "returned a negative variance"),
    "samples": ("FedAvg", changed(values={"num_samples": 2**50}), "counts 1125899906842624 samples"),
    "huge samples": ("FedAvg", changed(values={"num_samples": 2**62}), "'num_samples' is 4611686018427387904"),
    "steps": ("FedSHVR", changed(values={"num_steps": 2**50}), "counts .* and 1125899906842624 steps"),
    "steps of a method": ("FedSwitch", changed(values={"num_steps": 4}), "4 steps, but at most .* 3 .* are possible"),
    "no steps": ("FedAvg", changed(values={"num_steps": 0}), "tensors after 0 steps"),
    "other client": ("FedSHVR", changed(values={"client": 99}), "it is of client 99"),
    "other round": ("FedAvg", changed(values={"round": 1}), "it is of client . in round 1"),
    "text": ("FedAvg", changed(values={"num_steps": "\x1b[31m\n" + "x" * 999}), r"is \\x1b\[31m\\nx{1,200}$"),
    "no number": ("FedAvg", changed(values={"num_samples": 1.5}), "its value 'num_samples' is 1.5"),
    "scalar": ("FedAvg", changed(scalars={"client/loss": [math.nan, 1.0]}), "its scalar 'client/loss' is"),
    "shape": ("FedAvg", changed(lambda t: {n: a[..., None] for n, a in t.items()}), "instead of float32"),
    "names": ("FedAvg", changed(extra("x\ny", np.zeros(2))), r"'x\\\\ny' of its tensors is unknown"),
    "payload": ("FedAvg", changed(extra("payload.x", np.zeros(2))), "'payload.x' of its tensors is unknown"),
    "missing": ("FedSHVR", changed(without("network.classifier.bias")), "classifier.bias' of its tensors is .*missing"),
    "state of the client": ("FedAvg", changed(extra("optimizer.0.momentum_buffer", np.zeros(1))), "is unknown"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_no_update_is_rejected_and_the_client_s_state_with_it(
    tmp_path: Path, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is that of the simulation with the same client rejected: its state is that of the round before."""
    name, fault, reason = LIES[lie]
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        algorithm, client = with_fault(tmp_path, name, fault)
    (line,) = [line for line in caplog.messages if f"client {client} " in line]
    start = line.partition("; it is left out")[0]
    assert re.search(f"round 2: client {client} .*{reason}", start)
    assert_same(weights(algorithm), weights(without_client(tmp_path, name, client)))


def test_what_a_node_says_about_the_server_is_ignored(tmp_path: Path) -> None:
    """Scalars that the method does not log at clients: the server's own counts, foreign columns."""
    names = ["client/refused", "client/absent", "client/trained", "epoch", "val/accuracy", "", "x,y\n=1+1", "client/x"]
    grid = grid_of(tmp_path, "FedAvg", max_rounds=2)
    grid.faults[100 + client_of_round(2), "train", 2] = changed(scalars={name: [99.0, 1.0] for name in names})
    trainer = server_of(tmp_path, grid, max_rounds=2)
    fit(trainer, "FedAvg")
    assert float(trainer.callback_metrics["client/trained"]) == 3
    assert "client/refused" not in trainer.callback_metrics
    assert not {"", "x,y\n=1+1", "client/x", "epoch"} & trainer.callback_metrics.keys()
    assert all(float(value) != 99 for value in trainer.callback_metrics.values())


def test_counts_of_a_rejected_update_are_not_added(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg", max_rounds=1)
    grid.faults[100 + client_of_round(1), "train", 1] = changed(values={"num_samples": 2**50})
    trainer = server_of(tmp_path, grid, max_rounds=1)
    fit(trainer, "FedAvg")
    found = {name: float(trainer.callback_metrics[f"client/{name}"]) for name in ("trained", "images", "refused")}
    data = METHODS["FedAvg"][1]()
    data.setup()
    images = sum(len(data.split.clients[client].labeled) for client in sampling.cohort(0, 1, 4, 3)[1:])
    assert found == {"trained": 2, "images": images, "refused": 1}


@pytest.mark.parametrize("fault", [lambda answer: None, failed])
@pytest.mark.parametrize("name", ["SemiFL", "FedSHVR"])
def test_a_client_without_an_answer_misses_the_round_and_its_state_is_that_of_the_round_before(
    tmp_path: Path, name: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        algorithm, client = with_fault(tmp_path, name, fault)
    (line,) = [line for line in caplog.messages if "goes on" in line]
    assert line.startswith(f"round 2 goes on without client {client}: ")
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 250
    assert_same(weights(algorithm), weights(without_client(tmp_path, name, client)))


def test_with_fewer_answers_than_min_clients_nobody_takes_part(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg", max_rounds=1)
    grid.faults[100 + client_of_round(1), "train", 1] = lambda answer: None
    trainer = server_of(tmp_path, grid, max_rounds=1, min_clients=3)
    fit(trainer, "FedAvg")
    assert float(trainer.callback_metrics["client/absent"]) == 3
    assert float(trainer.callback_metrics["client/trained"]) == 0


@pytest.mark.parametrize(
    "fault",
    [
        changed(spoilt(math.nan, "mean")),
        changed(spoilt(-1, "variance")),
        changed(spoilt(1, "count")),
        changed(lambda tensors: {}),
        changed(without("moments.network.norms.1.mean")),
        changed(values={"client": 77}),
    ],
)
def test_moments_that_cannot_be_combined_are_left_out_and_named(
    tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with_fault(tmp_path, "FixMatch", fault, "moments")
    lines = [line for line in caplog.messages if "statistics without it" in line]
    assert lines
    assert all(line.startswith(f"round 2: client {client_of_round(2)}: ") for line in lines)


# Nodes that come and go.


def test_a_node_that_joins_late_takes_part_from_then_on(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg")
    late = grid.apps.pop(102)

    class Joins(FederatedCallback):
        def on_round_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:
            if trainer.round_index == 3:
                grid.apps[102] = late

    fit(server_of(tmp_path, grid, clients_per_round=4, callbacks=[Joins()]), "FedAvg")
    rounds = [m.content.config_records["values"].get("round") for m in grid.sent if m.metadata.dst_node_id == 102]
    assert rounds == [None, 3]


def described(client: int, images: int = 10) -> Any:
    """The ClientApp of a node that only says which client it has."""
    values = {"client": client, "round": 0, "labeled": 0, "unlabeled": images}
    return lambda message, context: Message(records({}, values), reply_to=message)


@pytest.mark.parametrize("bind", [False, True])
def test_a_client_belongs_to_the_first_node_that_names_it(bind: bool, caplog: pytest.LogCaptureFixture) -> None:
    grid = FakeGrid({100: described(0), 101: described(1)})
    nodes = nodes_of(grid, bind=bind)
    assert nodes.connected() == nodes.connected() == {0: 100, 1: 101}
    grid.apps[102] = described(1, images=99)
    assert nodes.connected() == {0: 100, 1: 101}
    assert nodes.sizes[1] == (0, 10)
    assert "client 1, which belongs to another node" in caplog.text
    del grid.apps[101], grid.apps[102]
    assert nodes.connected() == {0: 100}
    grid.apps[103] = described(1)
    assert nodes.connected() == ({0: 100} if bind else {0: 100, 1: 103})


def test_a_node_is_asked_again_after_an_error_and_has_the_time_to_connect() -> None:
    grid = FakeGrid({100: lambda *args: 1 / 0, 101: described(1), 102: described(1)})
    nodes, patient = (nodes_of(grid, connect_timeout=30) for _ in range(2))
    nodes.ask_again = 0
    assert nodes.connected() == patient.connected() == {1: 101}
    assert {message.metadata.ttl for message in grid.sent[::2]} == {30}
    grid.apps[100] = described(0)
    del grid.apps[101]
    assert nodes.connected() == {0: 100, 1: 102}
    assert patient.connected() == {}


@pytest.mark.parametrize("app", [described(4), described(0, 2**50), described(-1), lambda *args: 1 / 0])
def test_a_node_without_a_client_of_this_run_is_left_out(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    nodes = nodes_of(FakeGrid({100: app, 101: described(1)}))
    assert nodes.connected() == {1: 101}
    assert "a node does not name its client" in caplog.text
    with pytest.raises(TimeoutError, match=r"in 0 s \(connected: \[1\]\): start their SuperNodes"):
        nodes.wait_for(2)


def test_a_node_that_has_lost_its_state_begins_again_and_its_files_are_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid, client = grid_of(tmp_path, "FedSHVR", max_rounds=4), client_of_round(1)
    files: list[Path] = []

    def lose(answer: Message) -> Message:
        files.extend(path for path in (tmp_path / f"node {client}").rglob("*-*") if path.is_file())
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
        (next(path for path in files if path.name == "1-state")).write_bytes(b"half")
        return answer

    grid.faults[100 + client, "train", 1] = lose
    fit(server_of(tmp_path, grid, max_rounds=4), "FedSHVR")
    assert files
    assert caplog.messages.count(f"round 2: client {client} begins again without its state, which is lost") <= 1
    assert "begins again without its state, which is lost" in caplog.text


@pytest.mark.parametrize("name", ["FedAvg", "SemiFL", "FedSHVR"])
def test_a_server_that_is_killed_resumes_as_if_it_had_not_been(tmp_path: Path, name: str) -> None:
    """It ends in round 3, after clients have trained; the nodes have states of a round that the server has not."""
    make, make_data = METHODS[name]
    expected = simulated(tmp_path, name, max_rounds=4)
    grid = grid_of(tmp_path, name, max_rounds=4)

    def killed(answer: Message) -> Message:
        raise KeyboardInterrupt

    def serve(algorithm: FederatedAlgorithm) -> None:
        fit_on_grid(grid, {}, (toy_trainer(tmp_path / "server", max_rounds=4), algorithm, make_data()))

    grid.faults[100 + sampling.cohort(0, 3, 4, 3)[-1], "train", 3] = killed
    with pytest.raises(KeyboardInterrupt):
        serve(make())
    grid.faults.clear()
    algorithm = make()
    serve(algorithm)
    assert_same(weights(algorithm), weights(expected))
    folder = next((tmp_path / "server").rglob("result.json")).parent
    assert {"metrics.csv", "partition.json", "result.json"} <= {path.name for path in folder.iterdir()}
    assert unfinished(toy_trainer(tmp_path / "server", max_rounds=4), make()) is None
    assert len(list((tmp_path / "node 0" / "client-0").iterdir())) == 1


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_a_server_that_is_killed_and_killed_again_resumes_its_run(
    tmp_path: Path, place: str, private: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The second time before, inside or after the first round of the resumed run; privacy draws other noise."""
    if private:
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

    def serve(name: str, *callbacks: Any) -> Any:
        rules = [CentralDP(delta=1e-3, noise_multiplier=0.1, clip=5)] if private else []
        keys: dict[str, Any] = {"max_rounds": 4, "updates": rules}
        trainer = toy_trainer(tmp_path / name, callbacks=list(callbacks), **keys)
        make, make_data = METHODS["SemiFL"]
        fit_on_grid(grid_of(tmp_path / name, "SemiFL", **keys), {}, (trainer, make(), make_data()))
        return trainer

    for killed in (Dies("inside", 2), Dies(place, 2)):
        dies(partial(serve, "parts", killed))
    caplog.set_level(logging.INFO)
    resumed, whole = serve("parts"), serve("whole")
    assert f"last.ckpt after round {2 if place == 'after' else 1} of 4" in caplog.text
    assert "a new run begins: there is none below" in caplog.text
    if private:
        assert resumed.describe_privacy() == whole.describe_privacy()
    else:
        assert_same(weights(resumed.algorithm), weights(whole.algorithm))
    version = Path(resumed.log_dir)
    for content in ("", '{"interr', "{}", "[]"):  # cut by a full disk
        (version / "result.json").write_text(content)
        assert unfinished(resumed, resumed.algorithm) == version / "checkpoints/last.ckpt"
    (version / "result.json").unlink()  # as if killed in the test: the rounds are done
    assert unfinished(resumed, resumed.algorithm) == version / "checkpoints/last.ckpt"


def test_a_new_run_never_takes_the_place_of_one_that_cannot_be_resumed(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1)
    fit(trainer, "FedAvg")
    for algorithm, named in ((trainer.algorithm, "a simulation of FedAvg"), (METHODS["SemiFL"][0](), "SemiFL")):
        with pytest.raises(ValueError, match=rf"{named}.*resume=false to begin a new run"):
            unfinished(trainer, algorithm)
    Path(str(trainer.log_dir), "checkpoints/last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"version_0 has trained and has no last\.ckpt.*resume=false"):
        unfinished(trainer, trainer.algorithm)


def test_a_run_that_is_training_cannot_be_resumed_by_a_second_server(tmp_path: Path) -> None:
    make, make_data = METHODS["FedAvg"]
    grid, refused = grid_of(tmp_path, "FedAvg", max_rounds=1), []

    def serve(*callbacks: Any) -> None:
        trainer = toy_trainer(tmp_path / "server", max_rounds=1, callbacks=list(callbacks))
        fit_on_grid(grid, {}, (trainer, make(), make_data()))

    class Second(FederatedCallback):
        def on_round_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:
            with pytest.raises(ValueError, match=r"a server is training in .* now"):
                serve()
            refused.append(1)

    serve(Second())
    assert refused == [1]


def test_a_server_that_is_asked_to_stop_ends_without_an_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stop(FederatedCallback):
        def on_round_start(self, trainer: Any, algorithm: FederatedAlgorithm) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    make, make_data = METHODS["FedAvg"]
    trainer = toy_trainer(tmp_path / "server", max_rounds=2, callbacks=[Stop()])
    fit_on_grid(grid_of(tmp_path, "FedAvg"), {}, (trainer, make(), make_data()))
    assert trainer.round_index == 1
    assert "test/accuracy" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "works"), [("FedProx", True), ("SemiFL", False)])
def test_flower_s_local_privacy_fits_where_upload_and_download_have_the_same_tensors(
    tmp_path: Path, name: str, works: bool
) -> None:
    mods = [LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=50.0, delta=1e-5)]
    grid = FakeGrid({100 + k: app_of(tmp_path, name, k, mods, max_rounds=1) for k in range(4)})
    trainer = server_of(tmp_path, grid, max_rounds=1)
    fit(trainer, name)
    assert float(trainer.callback_metrics["client/trained"]) == (3 if works else 0)
