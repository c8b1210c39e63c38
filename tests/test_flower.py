"""The transport: Flower's records and grid, without processes; and whole federations of processes on this machine."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.error import Error
from flwr.clientapp.mod import LocalDpMod
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.deployment.channel import Channel, Failure, Unreadable
from lightning_fedssl.deployment.federation import DeployedFederation
from lightning_fedssl.deployment.flower.channel import FlowerChannel
from lightning_fedssl.deployment.flower.client import NodeError, make_client_app
from lightning_fedssl.deployment.flower.records import from_records, to_records
from lightning_fedssl.deployment.flower.server import fit_on_grid, unfinished
from lightning_fedssl.deployment.messages import Content, MessageError, Order
from lightning_fedssl.trainer import FederatedTrainer, setup

from .fake_channel import deploy, make_node
from .test_deployment import METHODS, fit, simulated
from .toy import assert_same, toy_trainer, weights


@pytest.fixture(autouse=True)
def task() -> None:
    """Flower's processes know which task they are; a message is made of that."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def through_bytes(message: Message) -> Message:
    """A message as it arrives: Flower's own serialisation and back."""
    from flwr.common.serde import message_from_proto, message_to_proto

    return message_from_proto(message_to_proto(message))


def test_a_content_survives_flower_s_bytes() -> None:
    tensors = {
        "w": torch.randn(3, 2), "d": torch.randn(4, dtype=torch.float64), "n": torch.tensor(7), "e": torch.zeros(0, 3)
    }  # fmt: skip
    content = Content(tensors, Order("r", 1, 0, 2, 3, 4, result=["w"]).values(), {"client/loss": (1.5, 2.0)})
    sent = Message(to_records(content), dst_node_id=1, message_type="train.client")
    found = from_records(through_bytes(sent).content)
    assert_same(found.tensors, tensors)
    assert Order.read(found.values) == Order.read(content.values)
    assert found.metrics == {"client/loss": (1.5, 2.0)}


def records(**changes: Any) -> RecordDict:
    parts = {"tensors": ArrayRecord({"w": Array(torch.ones(2).numpy())}), "values": ConfigRecord({"client": 1})}
    return RecordDict({name: part for name, part in {**parts, **changes}.items() if part is not None})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (records(tensors=None), "no record"),
        (records(tensors=ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"garbage")})), "cannot be read"),
        (records(tensors=ArrayRecord({"w": Array("float32", (2,), "torch.pickle", b"garbage")})), "cannot be read"),
        (records(metrics=MetricRecord({"client/loss": [1.0]})), "not a sum and a weight"),
        (records(metrics=MetricRecord({"client/loss": [float("nan"), 1.0]})), "not a sum and a weight"),
        (records(metrics=MetricRecord({"client/loss": [1.0, 0.0]})), "not a sum and a weight"),
    ],
)
def test_records_that_are_no_content_are_refused(wrong: RecordDict, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        from_records(wrong)


class FakeGrid:
    """Flower's grid with ClientApps in this process; every message passes through bytes.

    Attributes:
        apps: The ClientApp and the node configuration of each node that is connected.
        broken: Nodes whose ClientApp raises an error.
        silent: Nodes that never answer.
        slow: By node, how often the grid is asked in vain before an answer is there.
        lose: By node, what becomes of the next messages but the questions which clients it has: each message or its
            answer is lost.
    """

    def __init__(self, apps: dict[int, tuple[Any, dict[str, str]]]) -> None:
        self.apps = apps
        self.broken: set[int] = set()
        self.silent: set[int] = set()
        self.slow: dict[int, int] = {}
        self.lose: dict[int, list[str]] = {}
        self._looks: Counter[str] = Counter()
        self.sent: list[Message] = []
        self._answers: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = name = f"message {len(self.sent)}"
        self.sent.append(message)
        node = message.metadata.dst_node_id
        lost = self.lose[node].pop(0) if self.lose.get(node) and "describe" not in message.metadata.message_type else ""
        if lost == "message":
            return name
        if node in self.broken:
            self._answers[name] = Message(Error(code=0, reason="an error"), reply_to=message)
        elif node not in self.silent:
            app, node_config = self.apps[node]
            context = Context(1, node, node_config, RecordDict(), {})
            self._answers[name] = through_bytes(app(through_bytes(message), context))
        if lost == "answer":
            error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "Reply message objects are unavailable.")
            self._answers[name] = Message(error, reply_to=message)
        return name

    def types_of(self, node: int) -> list[str]:
        """The types of the messages to a node."""
        return [m.metadata.message_type for m in self.sent if m.metadata.dst_node_id == node]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [name for name in message_ids if name in self._answers]
        self._looks.update(found)
        nodes = {name: self._answers[name].metadata.src_node_id for name in found}
        return [self._answers.pop(name) for name in found if self._looks[name] > self.slow.get(nodes[name], 0)]


def grid_of(tmp_path: Path, name: str, shares: tuple[str, ...] = ("0,3", "1", "2")) -> FakeGrid:
    make, make_data = METHODS[name]

    def make_one(node_config: Any, run_config: Any) -> Any:
        own = str(node_config["clients"])
        return make_node(tmp_path / f"node {own}", make(), make_data(), [int(client) for client in own.split(",")])

    return FakeGrid({100 + i: (make_client_app(make_one), {"clients": share}) for i, share in enumerate(shares)})


@pytest.mark.parametrize("name", ["FedAvg", "SemiFL", "FedSHVR", "FedRGD", "FedSwitch"])
def test_a_federation_over_flower_s_messages_equals_the_simulation(tmp_path: Path, name: str) -> None:
    make, make_data = METHODS[name]
    expected, _ = simulated(tmp_path, name)
    algorithm, grid = make(), grid_of(tmp_path, name)
    fit_on_grid(grid, {"wait-for-clients": 4}, (toy_trainer(tmp_path / "server"), algorithm, make_data()))
    assert_same(weights(algorithm), weights(expected))
    folder = next((tmp_path / "server").rglob("result.json")).parent
    names = {path.name.partition(".tfevents")[0] for path in folder.iterdir()}
    assert {"metrics.csv", "hparams.yaml", "partition.json", "result.json", "events.out"} <= names
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"last.ckpt", "best.ckpt", "model.safetensors"}


def with_noise(tmp_path: Path, name: str) -> Channel:
    make, make_data = METHODS[name]
    mods = [LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=50.0, delta=1e-5)]

    def make_one(node_config: Any, run_config: Any) -> Any:
        return make_node(tmp_path, make(), make_data(), [0])

    return channel_of(FakeGrid({100: (make_client_app(make_one, mods), {})}))


@pytest.mark.parametrize(("name", "works"), [("FedProx", True), ("SemiFL", False), ("FedRGD", False)])
def test_flower_s_local_privacy_fits_where_upload_and_download_have_the_same_tensors(
    tmp_path: Path, name: str, works: bool
) -> None:
    make, make_data = METHODS[name]
    algorithm, channel = make(), with_noise(tmp_path, name)
    data = make_data()
    data.setup()
    trainer = toy_trainer(tmp_path / "server", logger=False)
    algorithm.num_classes, algorithm.in_shape = 3, (1, 8, 8)
    setup.prepare_model(trainer, algorithm, data)
    assert channel.connected() == {0}
    model = {n: t for n, t in algorithm.server.model().items() if t.is_floating_point()}
    channel.send(0, "train", Content(model, order(0).values))
    ((_, answer),) = channel.receive()
    assert works == isinstance(answer, Content)
    if isinstance(answer, Content):
        assert not torch.equal(answer.tensors["network.classifier.bias"], model["network.classifier.bias"])


class Clock:
    """Seconds that pass only while the channel sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def channel_of(grid: FakeGrid, **settings: Any) -> FlowerChannel:
    clock = Clock()
    return FlowerChannel(grid, **{"timeout": 10, "clock": clock, "sleep": clock.sleep} | settings)  # type: ignore[arg-type]


def order(client: int) -> Content:
    return Content(values=Order("r", client, 0, 1, 1, 4).values())


def test_a_node_that_raises_leaves_or_is_silent_gives_a_failure(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg")
    channel = channel_of(grid)
    assert channel.connected() == {0, 1, 2, 3}
    data = METHODS["FedAvg"][1]()
    data.setup()
    sizes = {k: (len(part.labeled), len(part.unlabeled)) for k, part in enumerate(data.split.clients)}
    assert channel.client_sizes() == sizes
    grid.broken, grid.silent = {100}, {101, 102}
    for client in range(3):
        channel.send(client, "train", order(client))
    del grid.apps[102]
    reasons = {client: answer.reason for client, answer in channel.receive() if isinstance(answer, Failure)}
    assert reasons == {0: "failed: an error", 1: "did not answer in 10 s", 2: "has lost its node"}
    assert channel.connected() == {0, 1, 3}


def test_a_slow_network_delays_answers_and_changes_nothing_else(tmp_path: Path) -> None:
    """The answers arrive in another order than they were asked for; the channel waits a second between two looks."""
    make, make_data = METHODS["FedAvg"]
    expected, _ = simulated(tmp_path, "FedAvg")
    grid, clock = grid_of(tmp_path, "FedAvg"), Clock()
    grid.slow = {100: 7, 102: 3}
    channel = FlowerChannel(grid, timeout=60, clock=clock, sleep=clock.sleep)
    trainer = toy_trainer(tmp_path / "server", logger=False)
    trainer.make_federation = partial(DeployedFederation, channel=channel, wait_for=4)
    assert_same(weights(fit(trainer, make(), make_data())), weights(expected))
    assert clock.now > 3 * 7


@pytest.mark.parametrize("name", ["SemiFL", "FedSHVR"])
def test_a_lost_message_or_answer_is_sent_again_and_the_result_is_the_same(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost message is noticed when its node answers a question; the SuperLink reports a lost answer."""
    make, make_data = METHODS[name]
    expected, _ = simulated(tmp_path, name)
    grid, clock = grid_of(tmp_path, name), Clock()
    grid.lose = {100: ["message", "", "message", "message"], 101: ["answer"], 102: ["", "answer", "answer"]}
    trainer = toy_trainer(tmp_path / "server", logger=False)
    channel = FlowerChannel(grid, clock=clock, sleep=clock.sleep)
    trainer.make_federation = partial(DeployedFederation, channel=channel, wait_for=4)
    with caplog.at_level(logging.INFO, logger="lightning_fedssl"):
        algorithm = fit(trainer, make(), make_data())
    assert_same(weights(algorithm), weights(expected))
    assert grid.lose == {100: [], 101: [], 102: []}
    assert sum(" made " in line for line in caplog.messages) == 3 * trainer.max_rounds
    assert sum("its answer again" in line for line in caplog.messages) == 3
    assert sum("the message is sent again" in line for line in caplog.messages) == 6
    assert 180 <= clock.now < 200


def test_a_node_that_trains_for_long_is_asked_rarely_and_sent_nothing_twice(tmp_path: Path) -> None:
    grid, clock = grid_of(tmp_path, "FedAvg"), Clock()
    channel = FlowerChannel(grid, timeout=1000, clock=clock, sleep=clock.sleep)
    channel.connected()
    grid.silent = {101}
    channel.send(1, "train", order(1))
    assert [type(answer) for _, answer in channel.receive()] == [Failure]
    assert grid.types_of(101) == ["query.describe", "train.client", *["query.describe"] * 5]  # 60, 120, ..., 960 s


def test_a_message_that_is_lost_until_its_time_is_over_gives_a_failure(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg")
    channel = channel_of(grid)
    channel.connected()
    grid.lose = {101: ["answer"] * 99}
    channel.send(1, "train", order(1))
    ((client, answer),) = channel.receive()
    assert client == 1
    assert answer == Failure("failed: Reply message objects are unavailable")


def test_a_message_that_cannot_be_read_is_distinguished_from_a_failure(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg")
    channel = channel_of(grid)
    channel.connected()
    broken = records(tensors=ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"garbage")}))
    grid.apps[101] = (lambda message, context: Message(broken, reply_to=message), {})
    channel.send(1, "train", order(1))
    assert [type(answer) for _, answer in channel.receive()] == [Unreadable]


def test_a_node_that_restarts_takes_its_clients_over_from_the_one_that_flower_still_lists(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg")
    channel = channel_of(grid)
    channel.connected()
    grid.silent, grid.apps[200] = {101}, grid.apps[101]
    assert channel.connected() == {0, 1, 2, 3}
    channel.send(1, "train", Content(values={}))
    assert [client for client, answer in channel.receive() if isinstance(answer, Content)] == [1]
    assert grid.sent[-1].metadata.dst_node_id == 200


def test_a_node_that_fails_to_name_its_clients_is_asked_again_after_a_minute(tmp_path: Path) -> None:
    grid, clock = grid_of(tmp_path, "FedAvg"), Clock()
    channel = FlowerChannel(grid, clock=clock, sleep=clock.sleep)
    grid.broken = {101}
    assert channel.connected() == channel.connected() == {0, 2, 3}
    grid.broken = set()
    clock.sleep(59)
    assert channel.connected() == {0, 2, 3}
    clock.sleep(1)
    assert channel.connected() == {0, 1, 2, 3}
    assert len(grid.sent) == 4


def test_a_node_that_joins_in_a_round_is_known_before_the_next(tmp_path: Path) -> None:
    grid, clock = grid_of(tmp_path, "FedAvg"), Clock()
    late = grid.apps.pop(102)
    channel = FlowerChannel(grid, clock=clock, sleep=clock.sleep)
    assert channel.connected() == {0, 1, 3}
    grid.slow, grid.apps[102] = {100: 5}, late
    channel.send(0, "train", order(0))
    list(channel.receive())
    grid.slow = {102: 99}  # whoever asks only now gets no answer
    assert channel.connected() == {0, 1, 2, 3}


def wait_for_any(channel: FlowerChannel) -> None:
    while not channel.connected():
        channel.wait()


def test_waiting_for_clients_ends_with_a_remedy(tmp_path: Path) -> None:
    channel = channel_of(FakeGrid({}), connect_timeout=5)
    with pytest.raises(TimeoutError, match=r"in 5 s \(connected: \[\]\): start their SuperNodes"):
        wait_for_any(channel)


def test_a_run_that_has_finished_is_not_resumed_and_one_with_rounds_left_is(tmp_path: Path) -> None:
    make, make_data = METHODS["FedAvg"]
    server = tmp_path / "server"
    assert unfinished(toy_trainer(server), make()) is None
    trainer, _ = deploy(tmp_path, make, make_data, max_rounds=2)
    fit(trainer, make(), make_data())
    assert unfinished(toy_trainer(server, max_rounds=2), make()) is None
    found = unfinished(toy_trainer(server, max_rounds=3), make())
    assert found is not None
    assert found.name == "last.ckpt"


@pytest.mark.parametrize("kind", ["simulation", "other method"])
def test_only_a_deployment_of_the_same_method_is_resumed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, make_data = METHODS["FedAvg"]
    trainer, _ = deploy(tmp_path, make, make_data, max_rounds=1)
    if kind == "simulation":
        trainer = toy_trainer(tmp_path / "server", max_rounds=1)
    fit(trainer, make(), make_data())
    now = make() if kind == "simulation" else METHODS["SemiFL"][0]()
    with caplog.at_level(logging.INFO, logger="lightning_fedssl"):
        assert unfinished(toy_trainer(tmp_path / "server"), now) is None
    reason = "is a simulation" if kind == "simulation" else "is of the method FedAvg, and the app's is SemiFL"
    assert re.fullmatch(f"a new run begins, because the run of .*last.ckpt {reason}", caplog.messages[-1])


class InRound(FederatedCallback):
    """Calls a function at the start of a round."""

    def __init__(self, round_index: int, function: Callable[[], object]) -> None:
        self.round_index, self.function = round_index, function

    def on_round_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        if trainer.round_index == self.round_index:
            self.function()


def test_a_run_that_is_training_cannot_be_resumed_by_a_second_server(tmp_path: Path) -> None:
    """Not in its first folder, and not in the folder that it writes to after it was resumed."""
    make, make_data = METHODS["FedSHVR"]
    expected, _ = simulated(tmp_path, "FedSHVR", max_rounds=5)
    grid, refused = grid_of(tmp_path, "FedSHVR"), []

    def serve(algorithm: FederatedAlgorithm, *callbacks: Any) -> None:
        trainer = toy_trainer(tmp_path / "server", max_rounds=5, callbacks=list(callbacks))
        fit_on_grid(grid, {"wait-for-clients": 4}, (trainer, algorithm, make_data()))

    def second() -> None:
        with pytest.raises(ValueError, match=r"is training now: wait for its end, or end it with flwr stop; resume=f"):
            serve(make())
        refused.append(1)

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(make(), InRound(2, second), InRound(3, killed))
    algorithm = make()
    serve(algorithm, InRound(3, second), InRound(5, second))
    assert len(refused) == 3
    assert_same(weights(algorithm), weights(expected))


def test_a_server_that_is_asked_to_stop_ends_without_an_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, make_data = METHODS["FedAvg"]
    stop = InRound(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trainer = toy_trainer(tmp_path / "server", max_rounds=2, callbacks=[stop])
    fit_on_grid(grid_of(tmp_path, "FedAvg"), {}, (trainer, make(), make_data()))
    assert trainer.round_index == 1
    assert "test/accuracy" not in capsys.readouterr().out


def test_an_error_of_a_node_names_no_file_and_no_class_to_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make_one(node_config: Any, run_config: Any) -> Any:
        raise FileNotFoundError(f"{tmp_path}/labeled/rare disease/Jane_Doe.png cannot be read")

    app = make_client_app(make_one)
    message = Message(to_records(Content()), dst_node_id=7, message_type="query.describe")
    with pytest.raises(NodeError, match=r"^FileNotFoundError: see the log of node 7$") as raised:
        app(message, Context(1, 7, {}, RecordDict(), {}))
    assert raised.value.__cause__ is None
    assert "rare disease/Jane_Doe.png" in caplog.text


def test_an_error_without_a_reason_is_a_failure(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "FedAvg")
    channel = channel_of(grid)
    channel.connected()
    grid.apps[101] = (lambda message, context: Message(Error(code=2), reply_to=message), {})
    channel.send(1, "train", order(1))
    assert list(channel.receive()) == [(1, Failure("failed: error 2 without a reason"))]
