"""Fed-MT: federated averaging with a Mean Teacher at every client."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lightning_fedssl.models import CNN
from tests.algorithms.helpers import fitted, ready, toy_mean_teacher, toy_shvr, uneven_clients
from tests.toy import toy_trainer


def test_teacher_starts_from_the_received_model_and_follows_by_hand() -> None:
    algorithm, data = ready(toy_mean_teacher(network=partial(CNN, width=4, norm="group")), uneven_clients())
    work = algorithm.on_client_start(data.local_data(0, 1))
    name = "classifier.weight"
    student = algorithm.get_parameter(f"network.{name}")
    teacher = student.detach().clone()
    assert dict(algorithm.teacher["network"].named_parameters())[name].data_ptr() != student.data_ptr()
    batch = work.batch(0)
    for step, decay in enumerate((0.0, 0.5, 2 / 3, 0.75)):
        with torch.no_grad():
            student.add_(torch.full_like(student, 0.1 * (step + 1)))
        teacher = decay * teacher + (1 - decay) * student.detach()
        algorithm.training_step(batch, step)
        torch.testing.assert_close(dict(algorithm.teacher["network"].named_parameters())[name], teacher)
    algorithm.training_step(batch, 1000)
    torch.testing.assert_close(
        dict(algorithm.teacher["network"].named_parameters())[name], 0.99 * teacher + 0.01 * student.detach()
    )


def test_consistency_pulls_the_student_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, data = ready(toy_mean_teacher(network=partial(CNN, width=4, norm="group")), uneven_clients())
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(0)
    with torch.no_grad():
        algorithm.get_parameter("network.classifier.weight").mul_(-3)
    monkeypatch.setattr(algorithm.teacher, "follow", lambda students, decay: None)
    loss = algorithm.training_step(batch, 1)
    assert loss is not None
    target = algorithm.teach(batch["u"]).softmax(1)
    distance = (algorithm(batch["u"]).softmax(dim=1) - target).square().mean(dim=1).mean()
    assert distance > 0.01
    torch.testing.assert_close(loss, F.cross_entropy(algorithm(batch["x"]), batch["y"]) + 5 * distance)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in algorithm.network.parameters())
    assert all(t.grad is None and not t.requires_grad for t in algorithm.teacher.parameters())


def test_teacher_is_neither_sent_nor_averaged_nor_saved_as_the_result(tmp_path: Path) -> None:
    algorithm, data = toy_mean_teacher(), uneven_clients()
    trainer = toy_trainer(tmp_path, clients_per_round=4)
    trainer.fit(algorithm, data)
    names = set(algorithm.broadcast(0)) | set(algorithm.evaluated_model()) | set(algorithm.uploaded_buffers())
    assert not any("teacher" in name for name in names)
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert set(saved["state_dict"]) == set(algorithm.broadcast(0))
    assert not any("teacher" in name for name in algorithm.server.model())


def test_teacher_s_pass_leaves_the_student_s_statistics_alone() -> None:
    algorithm, data = ready(toy_mean_teacher(), uneven_clients())
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(0)
    algorithm.train()
    before = {name: b.clone() for name, b in algorithm.network.named_buffers()}
    algorithm.teach(batch["u"])
    assert all(torch.equal(b, before[name]) for name, b in algorithm.network.named_buffers())


def test_without_weight_it_is_federated_averaging_on_the_same_labelled_batches(tmp_path: Path) -> None:
    network = partial(CNN, width=4, norm="group")
    teacher = fitted(tmp_path, toy_mean_teacher(alpha0=0.0, network=network), uneven_clients())
    plain = {"alpha0": 0.0, "alpha2": 0.0, "control_variate": False, "averaging": "plain"}
    for name, value in fitted(tmp_path, toy_shvr(**plain), uneven_clients()).items():
        torch.testing.assert_close(teacher[name], value, rtol=0, atol=1e-10)


# Networks with layers that draw.
