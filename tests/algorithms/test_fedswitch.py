"""FedSwitch-style training: the switch, the two kinds of teacher, the traffic."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fedssl.algorithms import FedSwitch
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.averaging import sizes_of
from lightning_fedssl.functional.schedules import Constant
from lightning_fedssl.models import CNN
from tests.algorithms.helpers import ByNumber, fitted, ready, toy_fedswitch, toy_fixmatch
from tests.toy import ToyData, assert_same, toy_trainer
from tests.trainer.helpers import StopAfter

# The switch.


class Certain(FedSwitch):
    """Every image is of class 0: the mean prediction's divergence from uniform is log 3."""

    sureness = 200.0

    def forward(self, x: Tensor) -> Tensor:
        return self.sureness * torch.tensor([[1.0, 0.0, 0.0]]).expand(len(x), 3)


class Uniform(Certain):
    sureness = 0.0


def test_beta_itself_is_the_student() -> None:
    data = ToyData()
    for beta, teacher in ((math.log(3), False), (math.log(3) - 1e-6, True), (math.inf, False), (0.0, True)):
        algorithm, _ = ready(toy_fedswitch(Certain, beta=beta), data)
        assert algorithm.prefers_teacher(data.local_data(0, 1)) is teacher
    uniform, _ = ready(toy_fedswitch(Uniform, beta=1e-9), data)
    assert not uniform.prefers_teacher(data.local_data(0, 1))


def test_only_clients_that_take_the_teacher_ask_for_it_and_batches_say_who_labels() -> None:
    data = ToyData()
    algorithm, _ = ready(toy_fedswitch(ByNumber), data)
    even, odd = (algorithm.on_client_start(data.local_data(k, 1)) for k in (0, 1))
    assert (set(even.extra_download), set(even.batch(0))) == (set(), {"x_weak", "x_strong"})
    assert (set(odd.extra_download), set(odd.batch(0))) == (set(algorithm.global_teacher()), {"x_teacher", "x_strong"})
    assert not any(name.startswith("teacher.") for name in algorithm.broadcast(1))


# Teachers.


@pytest.mark.parametrize("decay", [0.9, None])
def test_local_teacher_follows_after_each_step_or_stays(decay: float | None) -> None:
    algorithm, data = ready(toy_fedswitch(beta=0, client_teacher_decay=decay), ToyData())
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(0)
    name = "classifier.weight"
    student, teacher = algorithm.get_parameter(f"network.{name}"), algorithm.get_parameter(f"teacher.network.{name}")
    expected = teacher.clone()
    with torch.no_grad():
        student.add_(0.1)  # two different models: the first step leaves the teacher as it was received
    for step in range(3):
        algorithm.training_step(batch, step)
        if step and decay is not None:
            expected = decay * expected + (1 - decay) * student.detach()
        torch.testing.assert_close(teacher, expected)
        with torch.no_grad():
            student.add_(0.1)


class Watch(FederatedCallback):
    """The global teacher around the clients' phase, and after every step of the server."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Tensor]] = {}

    def on_server_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        self.states[f"student {step}"] = {n: p.detach().clone() for n, p in algorithm.network.named_parameters()}

    def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
        self.states["before"] = {n: t.clone() for n, t in algorithm.global_teacher().items()}

    def on_global_model(self, trainer: Any, algorithm: Any) -> None:
        self.states["after"] = {n: t.clone() for n, t in algorithm.global_teacher().items()}


def test_global_teacher_is_the_average_of_the_server_s_steps_and_clients_leave_it(tmp_path: Path) -> None:
    watch, algorithm = Watch(), toy_fedswitch(beta=0)
    initial = toy_fedswitch()
    initial.configure_model()
    toy_trainer(tmp_path, callbacks=watch, max_rounds=1).fit(algorithm, ToyData())
    assert_same(watch.states["before"], watch.states["after"])
    students = [watch.states[f"student {step}"] for step in range(3)]
    for name, start in initial.network.named_parameters():
        mean = (start.detach() + sum(student[name] for student in students)) / 4
        torch.testing.assert_close(watch.states["after"][f"teacher.network.{name}"], mean)
    evaluated = algorithm.evaluated_model()
    assert set(evaluated) == {
        f"network.{n}" for n, _ in (*initial.network.named_parameters(), *initial.network.named_buffers())
    }
    assert torch.equal(evaluated["network.classifier.bias"], watch.states["after"]["teacher.network.classifier.bias"])
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert_same(saved["state_dict"], evaluated)


# Traffic, and what it reduces to.


class Ledger(FederatedCallback):
    def __init__(self) -> None:
        self.down: dict[str, int] = {"student": 0, "teacher": 0}
        self.up = 0

    def on_transfer(self, trainer: Any, algorithm: Any, client: int, direction: Any, sizes: Any) -> None:
        if direction == "up":
            assert not any(name.startswith("teacher.") for name in sizes)
            self.up += sum(sizes.values())
            return
        for name, size in sizes.items():
            self.down["teacher" if name.startswith("teacher.") else "student"] += size


def test_teacher_is_sent_to_those_that_use_it_and_never_back(tmp_path: Path) -> None:
    ledgers = {}
    for beta in (math.inf, 0.0):
        ledgers[beta] = Ledger()
        algorithm = toy_fedswitch(beta=beta)
        toy_trainer(tmp_path, callbacks=ledgers[beta]).fit(algorithm, ToyData())
    model = sum(sizes_of(algorithm.broadcast(0)).values())
    assert ledgers[math.inf].down == {"student": 9 * model, "teacher": 0}
    assert ledgers[0.0].down == {"student": 9 * model, "teacher": 9 * model}
    assert ledgers[math.inf].up == ledgers[0.0].up > 0


def test_with_the_student_alone_it_is_fixmatch_with_the_server_s_phase_before(tmp_path: Path) -> None:
    switch = toy_fedswitch(beta=math.inf, schedule=Constant())
    ours = fitted(tmp_path, switch, ToyData(), max_rounds=2)
    settings: dict[str, Any] = {"network": partial(CNN, width=4, norm="batch"), "client_steps": 4, "server_steps": 3}
    settings |= {"label_mode": "eval", "client_weighting": "uniform", "server_phase": "before"}
    # FixMatch's server would train once more after its last round.
    plain = fitted(tmp_path, toy_fixmatch(**settings), ToyData(), max_rounds=3, callbacks=StopAfter(2))
    assert_same({name: t for name, t in ours.items() if not name.startswith("teacher.")}, plain)


def test_without_steps_of_clients_it_is_the_server_alone(tmp_path: Path) -> None:
    """The server trains before the clients, with FixMatch once more after the last round, so for one round more."""
    settings: dict[str, Any] = {"network": partial(CNN, width=4, norm="batch"), "client_steps": 0, "server_steps": 3}
    switch = fitted(tmp_path, toy_fedswitch(**settings, schedule=Constant()), ToyData(), max_rounds=3)
    few = fitted(tmp_path, toy_fedswitch(**settings, schedule=Constant()), ToyData(), max_rounds=3, clients_per_round=1)
    assert_same(switch, few)
    fixmatch = fitted(tmp_path, toy_fixmatch(**settings, server_phase="before"), ToyData(), max_rounds=2)
    assert_same({name: t for name, t in switch.items() if not name.startswith("teacher.")}, fixmatch)


def test_logs_the_decisions(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(toy_fedswitch(beta=0.0), ToyData())
    assert trainer.callback_metrics["client/from_teacher"] == 1
    assert trainer.callback_metrics["client/divergence"] > 0
    assert 0 <= trainer.callback_metrics["client/mask_rate"] <= 1
