"""Fed-MT: federated averaging with a Mean Teacher at every client."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl.algorithms import MeanTeacher
from lightning_fedssl.local_training import sequential, vectorized
from lightning_fedssl.models import CNN, CNN13
from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import WithDropout, mixed_clients, plain_sgd, toy_mean_teacher, toy_shvr, uneven_clients
from tests.test_fed_shvr import Given, Silent, fitted
from tests.test_semifl import Scrambled
from tests.toy import ToyData, assert_same, toy_trainer, weights


def ready(**kwargs: Any) -> tuple[MeanTeacher, ToyData]:
    algorithm, data = toy_mean_teacher(**kwargs), uneven_clients()
    data.setup()
    algorithm.configure_model()
    algorithm.server = ServerState.of(algorithm)
    return algorithm, data


def test_teacher_starts_from_the_received_model_and_follows_by_hand() -> None:
    algorithm, data = ready(network=partial(CNN, width=4, norm="group"))
    work = algorithm.on_client_start(data.local_data(0, 1))
    name = "classifier.weight"
    student = algorithm.get_parameter(f"network.{name}")
    teacher = student.detach().clone()
    assert algorithm.teacher.weights("network")[name].data_ptr() != student.data_ptr()
    batch = work.batch(0)
    for step, decay in enumerate((0.0, 0.5, 2 / 3, 0.75)):
        with torch.no_grad():
            student.add_(torch.full_like(student, 0.1 * (step + 1)))
        teacher = decay * teacher + (1 - decay) * student.detach()
        algorithm.training_step(batch, step)
        torch.testing.assert_close(algorithm.teacher.weights("network")[name], teacher)
    algorithm.training_step(batch, 1000)
    torch.testing.assert_close(algorithm.teacher.weights("network")[name], 0.99 * teacher + 0.01 * student.detach())


def test_consistency_pulls_the_student_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, data = ready(network=partial(CNN, width=4, norm="group"))
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(0)
    with torch.no_grad():
        algorithm.get_parameter("network.classifier.weight").mul_(-3)
    monkeypatch.setattr(algorithm.teacher, "follow", lambda students, decay: None)
    loss = algorithm.training_step(batch, 1)
    assert loss is not None
    target = algorithm.teach(batch["u"])
    distance = (algorithm(batch["u"]).softmax(dim=1) - target).square().mean(dim=1).mean()
    assert distance > 0.01
    torch.testing.assert_close(loss, F.cross_entropy(algorithm(batch["x"]), batch["y"]) + 5 * distance)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in algorithm.network.parameters())
    assert all(t.grad is None and not t.requires_grad for t in algorithm.teacher.weights("network").values())


def test_teacher_is_neither_sent_nor_averaged_nor_saved_as_the_result(tmp_path: Path) -> None:
    algorithm, data = toy_mean_teacher(), uneven_clients()
    trainer = toy_trainer(tmp_path, clients_per_round=4)
    trainer.fit(algorithm, data)
    names = set(algorithm.broadcast(0)) | set(algorithm.evaluated_model()) | set(algorithm.uploaded_buffers())
    assert not any("teacher" in name for name in names)
    saved = torch.load(next(tmp_path.rglob("last.ckpt")), weights_only=True)
    assert set(saved["state_dict"]) == set(algorithm.broadcast(0))
    assert not any("teacher" in name for name in algorithm.server.model())


def test_a_checkpoint_of_the_first_version_resumes_although_it_holds_the_teacher(tmp_path: Path) -> None:
    """That version saved the initial weights of the teacher among the buffers; no round reads them."""
    full = fitted(tmp_path / "full", toy_mean_teacher(), uneven_clients(), max_rounds=2)
    fitted(tmp_path / "half", toy_mean_teacher(), uneven_clients(), max_rounds=1, logger=True)
    path = next((tmp_path / "half").rglob("last.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    weights_of_then = enumerate(checkpoint["federation"]["parameters"].values())
    checkpoint["federation"]["buffers"] |= {f"teacher.weight_{i}": torch.rand_like(w) for i, w in weights_of_then}
    torch.save(checkpoint, path)
    resumed, data = toy_mean_teacher(), uneven_clients()
    trainer = toy_trainer(tmp_path, clients_per_round=data.num_clients, max_rounds=2, precision="64-true")
    trainer.fit(resumed, data, ckpt_path=path)
    assert_same(weights(resumed), full)


def test_teacher_s_pass_leaves_the_student_s_statistics_alone() -> None:
    algorithm, data = ready()
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


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_together_equals_one_by_one(norm: Any) -> None:
    results: list[dict[int, dict[str, Tensor]]] = []
    for together in (False, True):
        algorithm, data = ready(network=partial(CNN, width=4, norm=norm))
        algorithm.double()
        algorithm.server = ServerState.of(algorithm)
        clients = [data.local_data(k, 1, torch.float64) for k in range(4)]
        arguments = (algorithm, clients, plain_sgd(algorithm.network.parameters()), Fabric(accelerator="cpu"), Silent())
        updates = (
            vectorized.train_clients(*arguments, clients_at_once=3)
            if together
            else sequential.train_clients(*arguments)
        )
        results.append({u.client: {n: t.clone() for n, t in {**u.parameters, **u.buffers}.items()} for u in updates})
    for client, alone in results[0].items():
        for name, value in alone.items():
            torch.testing.assert_close(results[1][client][name], value, rtol=0, atol=1e-12)


def test_true_labels_of_clients_change_no_weight(tmp_path: Path) -> None:
    data = (mixed_clients(), Scrambled(label_location="clients", num_labels=24))
    assert_same(*(fitted(tmp_path, toy_mean_teacher(), images) for images in data))


def test_clients_of_every_kind_are_trained(tmp_path: Path) -> None:
    result = fitted(tmp_path, toy_mean_teacher(), ToyData(label_location="clients", partition=Given()))
    assert all(torch.isfinite(t).all() for t in result.values() if t.is_floating_point())


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.decay is 1"):
        toy_mean_teacher(decay=1)
    with pytest.raises(ValueError, match="MeanTeacher trains clients on labels of their own"):
        fitted(tmp_path, toy_mean_teacher(), ToyData())


# Networks with layers that draw.


def test_dropout_draws_a_party_s_own_numbers(tmp_path: Path) -> None:
    """Neither torch's global state nor the clients trained before change what a client draws."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        algorithm = toy_shvr(network=WithDropout)
        results.append(fitted(tmp_path, algorithm, uneven_clients()))
        assert torch.initial_seed() == seed
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    clear = fitted(tmp_path, toy_shvr(network=partial(Blunt)), uneven_clients())
    assert not torch.equal(clear["network.classifier.bias"], results[0]["network.classifier.bias"])
    assert weights(algorithm).keys() == results[0].keys()


class Blunt(WithDropout):
    """The same without forgetting."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def test_cnn13_has_the_published_size_and_nine_convolutions() -> None:
    with torch.device("meta"):
        network = CNN13()
    assert sum(p.numel() for p in network.parameters()) == 3_121_802
    assert [conv.get_parameter("weight").shape[:1] for conv in network.convs] == [
        (128,), (128,), (128,), (256,), (256,), (256,), (512,), (256,), (128,)
    ]  # fmt: skip
    small = CNN13(num_classes=4, in_shape=(1, 12, 12), width=2)
    small.eval()
    assert small(torch.rand(3, 1, 12, 12)).shape == (3, 4)


def test_cnn13_shrinks_maps_as_mean_teacher_s_does() -> None:
    network, sizes = CNN13(width=2).eval(), []
    for conv in network.convs:
        conv.register_forward_hook(lambda module, args, output: sizes.append(output.shape[-1]))
    network(torch.rand(1, 3, 32, 32))
    assert sizes == [32, 32, 32, 16, 16, 16, 6, 6, 6]


def test_cnn13_drops_values_in_training_only() -> None:
    network, x = CNN13(width=8, norm="group"), torch.rand(2, 3, 32, 32)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
