"""Steps over fixed memory: what the reference computes, with the bits of one round to the next, and no host reads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.data.augment.randaugment import RandAugment
from lightning_fedssl.data.augment.views import make_views
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_training import LocalTraining, cuda_graphs, vectorized
from lightning_fedssl.local_training.cuda_graphs import FixedMemory, FixedStack, Recorder
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.metrics import MetricCollector
from lightning_fedssl.schedules import Cosine
from lightning_fedssl.state import Batch, ServerState
from tests.test_keyed_dropout import built
from tests.test_vectorized import (
    NETWORKS,
    Counting,
    Federation,
    Result,
    TwoHeads,
    assert_agree,
    clients_of,
    distance,
    make,
)
from tests.toy import SPEC, ToyData, toy_semifl, toy_trainer, weights

FUSED = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)


class Fixed(Federation):
    """Trains with fixed memory; two rounds share it."""

    def __init__(self, algorithm: FederatedAlgorithm, clients: int = 5, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(algorithm, dtype)
        self.memory = FixedMemory(clients)

    def train(self, clients: Any, at_once: int = 5, max_steps: int | None = None) -> Result:
        result, log = Result(), MetricCollector()
        self.algorithm.collector = log.update
        for update in vectorized.train_clients(
            self.algorithm, clients, self.optimizer, self.fabric, result, max_steps,
            clients_at_once=at_once, trainer=self.memory,
        ):  # fmt: skip
            tensors = {**update.parameters, **update.buffers, **update.payload}
            result.updates[update.client] = {name: t.clone() for name, t in tensors.items()}
            result.work.append((update.client, update.num_samples, update.num_steps))
            self.algorithm.clients.commit(update.client)
        result.kept = self.algorithm.clients.state_dict()
        result.logs = log.compute(lambda own: [own])
        return result


def two_rounds(build: Callable[[], FederatedAlgorithm], at_once: int = 5, clients: int = 5) -> Fixed:
    """A round with all clients and one with some, against the reference."""
    reference, fixed = Federation(build()), Fixed(build(), clients)
    for round_, chosen in ((1, slice(None)), (2, slice(1, 5, 2))):
        data = clients_of(round_=round_)[chosen]
        assert_agree(reference.train(data), fixed.train(data, at_once))
    return fixed


@pytest.mark.parametrize("method", [FedAvg, SemiFL])
@pytest.mark.parametrize("network", NETWORKS)
def test_steps_are_the_reference_s(network: str, method: type[FederatedAlgorithm]) -> None:
    """16, 10, 6, 2 and no steps, short last batches at different times, momenta that are kept."""
    fixed = two_rounds(lambda: make(method, network, keep_client_optimizer=True, optimizer=FUSED, client_epochs=2))
    assert fixed.memory.stack is not None
    assert not fixed.memory.refused


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.05, fused=True),
        partial(torch.optim.Adam, lr=0.01, fused=True),
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True, fused=True),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_optimizers(optimizer: Any) -> None:
    assert two_rounds(lambda: make(optimizer=optimizer)).memory.stack is not None


@pytest.mark.parametrize(("at_once", "clients"), [(2, 2), (3, 3), (3, 5)])
def test_stacks_of_other_sizes(at_once: int, clients: int) -> None:
    assert two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED), at_once, clients).memory.stack is not None


def test_widths_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """With widths 2 and 5 rows without a client compute along and change nothing."""
    monkeypatch.setattr(cuda_graphs, "WIDTHS", (2, 5))
    fixed = two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED, keep_client_optimizer=True))
    assert fixed.memory.stack is not None
    assert {width for width, _, _ in fixed.memory.stack._steps} == {2, 5}


def test_adam_s_different_step_counts_go_the_ordinary_way(caplog: pytest.LogCaptureFixture) -> None:
    adam = partial(torch.optim.AdamW, lr=0.01, fused=True)
    fixed = two_rounds(lambda: make(optimizer=adam, keep_client_optimizer=True))
    assert fixed.memory.stack is not None
    assert not caplog.records


class Scaled(FedAvg):
    """A weight without dimensions."""

    def configure_model(self) -> None:
        super().configure_model()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self.scale * self(batch["x"]), batch["y"])


def test_a_weight_without_dimensions_keeps_its_momentum() -> None:
    assert two_rounds(lambda: make(Scaled, optimizer=FUSED, keep_client_optimizer=True)).memory.stack is not None


@pytest.mark.parametrize("optimizer", [FUSED, partial(torch.optim.AdamW, lr=0.01, fused=True)], ids=["sgd", "adamw"])
def test_weights_that_some_steps_do_not_reach(optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """SGD leaves them as they are; AdamW counts fewer steps for them than the buffer does."""
    fixed = two_rounds(lambda: make(TwoHeads, optimizer=optimizer))
    assert fixed.memory.refused == (optimizer is not FUSED)
    assert all("so that step counts differ" in message for message in caplog.messages)


class Corrected(FedAvg):
    """Clients 1 and 3 correct their gradients, in the first round only."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        weights = {name: 0.1 * p.detach().sign() for name, p in self.named_parameters() if "classifier" in name}
        return replace(
            super().on_client_start(data), control_variate=weights if data.party % 2 and data.round == 1 else {}
        )


class Moving(FedAvg):
    """A learning rate that moves at every step."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        self.step_factors = [1 / (1 + step) for step in range(100)]
        return super().on_client_start(data)


@pytest.mark.parametrize("method", [Corrected, Moving, Counting])
def test_corrections_rates_and_buffers(method: type[FederatedAlgorithm]) -> None:
    assert two_rounds(lambda: make(method, optimizer=FUSED)).memory.stack is not None


class Numbered(FedAvg):
    """A loss that depends on the step's number."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else loss * (1 + batch_idx)


def test_the_number_of_a_step_is_read_at_every_step() -> None:
    assert two_rounds(lambda: make(Numbered, optimizer=FUSED)).memory.stack is not None


def test_dropout_draws_by_the_step_s_number_in_memory() -> None:
    fixed = two_rounds(lambda: built("every kind", optimizer=FUSED))
    assert fixed.memory.stack is not None


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda: make(optimizer=partial(FUSED, fused=False)),
            "are supported, and the optimizer is SGD",
        ),
        (lambda: make(optimizer=partial(torch.optim.RMSprop, lr=0.01)), "the optimizer is RMSprop"),
        (lambda: make(optimizer=partial(FUSED, nesterov=False, dampening=0.1)), "SGD with dampening"),
    ],
    ids=["not fused", "rmsprop", "dampening"],
)
def test_what_cannot_be_fixed_is_made_as_before_with_one_warning(
    build: Callable[[], FederatedAlgorithm], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        fixed = two_rounds(build)
    (record,) = caplog.records
    assert reason in record.message
    assert fixed.memory.refused


def test_every_input_is_written_before_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisoned batches and step numbers between the steps change nothing; poisoned weights do."""
    real = FixedStack._step
    poisoned: list[str] = []

    def poison(self: FixedStack, *arguments: Any) -> None:
        for memory in self._batches.values():
            for room in memory.values():
                room.fill_(math.nan if room.is_floating_point() else 2)
        self.step_number.fill_(99)
        for name in poisoned:
            self.tensors[name].detach()[0].fill_(math.nan)
        real(self, *arguments)

    monkeypatch.setattr(FixedStack, "_step", poison)
    two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED, keep_client_optimizer=True))
    poisoned.append("network.classifier.bias")
    with pytest.raises(AssertionError):
        two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED))


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for a device: numbers, conditions and sizes that depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    FORBIDDEN: tuple[str, ...] = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "_unique2",
        "unique_dim",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


class Watched(Result):
    """Listens from the second step of a client's training on: what is prepared has been prepared."""

    mode: NoHostReads | None = None

    def client_batch_ended(self, step: int) -> None:
        super().client_batch_ended(step)
        if self.mode is None:
            self.mode = NoHostReads()
            self.mode.__enter__()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("fixed", [False, True], ids=["new memory", "fixed memory"])
@pytest.mark.parametrize("method", [FedAvg, SemiFL])
def test_nothing_in_a_local_epoch_waits_for_the_device(method: Any, fixed: bool) -> None:
    """Clients of the same size, in the second round: nothing is tried or recorded any more."""
    federation = Fixed(make(method, "wrn sbn", optimizer=FUSED))
    views = make_views(SPEC, weak="flip_crop", strong="digits")
    augment = next(stage for stage in views.strong.stages if isinstance(stage, RandAugment))  # type: ignore[attr-defined]
    augment.static = True  # as on a device
    first, second = ([replace(data, views=views) for data in clients_of((20, 20, 20), round_=n)] for n in (1, 2))
    federation.train(first)
    ready = list(vectorized.prepared(federation.algorithm, second, Result(), None))
    observer = Watched()
    federation.algorithm.collector = MetricCollector().update
    train: Any = federation.memory if fixed else vectorized.train_in_new_memory
    try:
        train(federation.algorithm, ready, [{}, {}, {}], federation.optimizer, federation.fabric, observer)
    finally:
        assert observer.mode is not None
        observer.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    assert len(observer.steps) == 3 * 12


class NoConstants(NoHostReads):
    """Refuses what a graph cannot record: besides host reads, tensors that come from the host."""

    FORBIDDEN = (*NoHostReads.FORBIDDEN, "lift_fresh")


@pytest.mark.parametrize(
    "build",
    [
        lambda: make(SemiFL, "wrn sbn", optimizer=FUSED),
        lambda: make(FedAvg, "cnn bn", optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True)),
        lambda: make(Corrected, "resnet9 gn", optimizer=FUSED, prox_mu=0.1),
        lambda: built("every kind", SemiFL, optimizer=FUSED),
    ],
    ids=["semifl", "adamw", "corrected", "dropout"],
)
def test_what_is_recorded_is_the_device_s_alone(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[], FederatedAlgorithm]
) -> None:
    real, watched = FixedStack._body, []

    def body(self: FixedStack, *arguments: Any) -> None:
        with NoConstants():
            real(self, *arguments)
        watched.append(1)

    monkeypatch.setattr(FixedStack, "_body", body)
    fixed = Fixed(build())
    fixed.train(clients_of())
    assert fixed.memory.stack is not None
    assert len(watched) > 16


def test_the_watch_sees_host_reads_and_constants() -> None:
    with NoHostReads(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(3).sum().item()
    with NoConstants(), pytest.raises(AssertionError, match="waits for the device"):
        torch.tensor([1.0, 2.0])


def test_a_run_with_fixed_memory_is_the_run_without(tmp_path: Path) -> None:
    results, metrics = [], []
    for graphs in (False, True):
        algorithm = toy_semifl(network=NETWORKS["cnn bn"], optimizer=FUSED, schedule=Cosine())
        trainer = toy_trainer(tmp_path / str(graphs), clients_at_once=3, precision="64-true", cuda_graphs=graphs)
        trainer.fit(algorithm, ToyData())
        assert (trainer.local_training._trainer is not None) == graphs
        results.append(weights(algorithm))
        metrics.append({k: float(v) for k, v in trainer.callback_metrics.items() if not k.startswith("time/")})
    assert distance({0: results[0]}, {0: results[1]}) < 1e-10
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-8)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a device that records."""
    original = Recorder.__init__

    def works(self: Recorder, device: torch.device) -> None:
        original(self, device)
        self.works = True

    monkeypatch.setattr(Recorder, "__init__", works)
    monkeypatch.setattr(Recorder, "broken", False)
    return monkeypatch


def test_a_recorded_step_is_replayed(recording: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The warm-up and the recording leave no trace."""
    replayed: list[int] = []

    def record(self: Recorder, step: Callable[[], None]) -> Callable[[], object]:
        for _ in range(4):
            step()

        def replay() -> None:
            step()
            replayed.append(1)

        return replay

    recording.setattr(Recorder, "record", record)
    two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED, keep_client_optimizer=True))
    assert len(replayed) > 24
    assert not caplog.records


def test_a_step_that_cannot_be_recorded_is_made(
    recording: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Recorder, step: Callable[[], None]) -> Callable[[], object]:
        step()
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors")

    recording.setattr(Recorder, "record", refuse)
    two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED))
    assert Recorder.broken
    assert [record.message for record in caplog.records] == [
        "trainer.cuda_graphs: steps are not replayed as a graph: operation not permitted when stream is capturing"
    ]


def test_a_replay_that_differs_is_not_used(recording: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    recording.setattr(Recorder, "record", lambda self, step: lambda: None)
    two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED))
    (record,) = caplog.records
    assert "replayed steps differ from executed steps" in record.message


class InPlace(FedAvg):
    """A loss that changes its batch in place."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        batch["x"].mul_(0.5)
        return super().training_step(batch, batch_idx)


def test_a_batch_that_a_step_changes_in_place_is_whole_after_the_recording(
    recording: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(self: Recorder, step: Callable[[], None]) -> Callable[[], object]:
        for _ in range(4):
            step()
        return step

    recording.setattr(Recorder, "record", record)
    two_rounds(lambda: make(InPlace, optimizer=FUSED))
    assert not caplog.records


class Moved(FedAvg):
    """A step that reads a number of the host's, which another round has changed."""

    factor = 1.0

    def on_client_start(self, data: LocalData) -> LocalWork:
        self.factor = float(data.round)
        return super().on_client_start(data)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else self.factor * loss


def with_the_factor_of(algorithm: Moved, factor: float, step: Callable[[], None]) -> None:
    now, algorithm.factor = algorithm.factor, factor
    step()
    algorithm.factor = now


def test_a_number_that_another_round_has_changed_is_found_out(
    recording: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph would go on with the number it was recorded with."""
    built: list[Any] = []

    def build() -> FederatedAlgorithm:
        built.append(make(Moved, optimizer=FUSED))
        return cast(FederatedAlgorithm, built[-1])

    def record(self: Recorder, step: Callable[[], None]) -> Callable[[], object]:
        return partial(with_the_factor_of, built[-1], built[-1].factor, step)

    recording.setattr(Recorder, "record", record)
    fixed = two_rounds(build)
    (message,) = (record.message for record in caplog.records)
    assert "another result in a later round than the one recorded" in message
    assert fixed.memory.refused


def test_corrections_keep_their_place_over_rounds_without_any() -> None:
    """A graph adds what lies where they were when it was recorded."""
    fixed = Fixed(make(Corrected, optimizer=FUSED))
    places = []
    for number in (1, 2, 1):
        fixed.train(clients_of(round_=number))
        stack = fixed.memory.stack
        assert stack is not None
        assert bool(stack.control_variates) == (number == 1)
        places.append([t.data_ptr() for t in stack.room_for_control_variates().values()])
    assert places[0] == places[1] == places[2]


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients fit into the device's memory."""

    def full(self: FixedStack, clients: Any, observer: Any) -> None:
        if self.clients > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        train(self, clients, observer)

    train = FixedStack.train_all
    monkeypatch.setattr(FixedStack, "train_all", full)


@pytest.mark.usefixtures("small_memory")
def test_a_stack_that_does_not_fit_is_halved_and_keeps_its_graphs(caplog: pytest.LogCaptureFixture) -> None:
    fixed = two_rounds(lambda: make(SemiFL, "cnn bn", optimizer=FUSED, keep_client_optimizer=True))
    assert fixed.memory.stack is not None
    assert fixed.memory.clients == 2
    assert not fixed.memory.refused
    assert not caplog.records


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize("count", [3, 4])
def test_later_rounds_train_in_the_smaller_stack(count: int, caplog: pytest.LogCaptureFixture) -> None:
    training, federation = LocalTraining(count, cuda_graphs=True), Federation(make(optimizer=FUSED))
    for _ in range(2):
        updates = training.train_clients(
            federation.algorithm, [clients_of((20,) * count)], federation.optimizer, federation.fabric, Result()
        )
        assert sum(1 for _ in updates) == count
    assert training._chosen == 2
    (record,) = caplog.records
    assert "out of memory on cpu; stacks have at most 2 clients from now on" in record.message


# On a GPU


def on_cuda(federation: Any) -> Any:
    federation.fabric = Fabric(accelerator="cuda", devices=1, precision="64-true")
    federation.algorithm.cuda()
    federation.algorithm.server = ServerState.of(federation.algorithm)
    parameters = [p for p in federation.algorithm.parameters() if p.requires_grad]
    federation.optimizer = federation.algorithm.optimizer_factory(parameters)
    return federation


def on_device(clients: list[LocalData]) -> list[LocalData]:
    names = ("images", "labeled", "labels", "unlabeled")
    return [replace(data, **{name: getattr(data, name).cuda() for name in names}) for data in clients]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", [FedAvg, SemiFL])
@pytest.mark.parametrize("network", NETWORKS)
def test_replayed_steps_are_the_reference_s(network: str, method: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate that 32 bits hold exactly: the device reads it so."""
    fused = partial(FUSED, lr=0.0625)
    reference = on_cuda(Federation(make(method, network, keep_client_optimizer=True, optimizer=fused)))
    fixed = on_cuda(Fixed(make(method, network, keep_client_optimizer=True, optimizer=fused)))
    for round_ in (1, 2):
        data = on_device(clients_of(round_=round_))
        alone, together = reference.train(data), fixed.train(data)
        assert distance(alone.updates, together.updates) < 1e-9
    assert fixed.memory.stack.recorder.works, caplog.text
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replaying_waits_for_nothing() -> None:
    fixed = on_cuda(Fixed(make(SemiFL, "wrn sbn", optimizer=FUSED)))
    sizes = (20, 20, 20)
    for round_ in (1, 2):  # the second compares each recorded step once more
        fixed.train(on_device(clients_of(sizes, round_=round_)))
    ready = list(vectorized.prepared(fixed.algorithm, on_device(clients_of(sizes, round_=3)), Result(), None))
    fixed.memory.stack.load(ready, [{}, {}, {}])
    assert fixed.memory.stack.recorder.works
    assert not fixed.memory.stack._unconfirmed
    torch.cuda.set_sync_debug_mode("error")  # what waits raises
    try:
        fixed.memory.stack.train_all(ready, Result())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_engine_hands_the_memory_on() -> None:
    training = LocalTraining(3, cuda_graphs=True)
    federation = Federation(make(optimizer=FUSED))
    for update in training.train_clients(
        federation.algorithm, [clients_of()], federation.optimizer, federation.fabric, Result()
    ):
        assert update.num_steps > 0
    assert training._trainer is not None
    assert training._trainer.stack is not None


def test_a_larger_share_of_the_clients_gets_more_memory() -> None:
    """With several ranks a rank's share of a cohort differs from round to round."""
    training = LocalTraining(4, cuda_graphs=True)
    federation = Federation(make(optimizer=FUSED))
    for count in (2, 3):
        trained = list(
            training.train_clients(
                federation.algorithm, [clients_of((20,) * count)], federation.optimizer, federation.fabric, Result()
            )
        )
        assert len(trained) == count
