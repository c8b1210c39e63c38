from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.local_training.ops import network_options
from lightning_fedssl.models import CNN, MLP, Network
from tests.toy import ToyData, sgd, toy_semifl, toy_trainer, weights


def trained(tmp_path: Path, **kwargs: Any) -> dict[str, Tensor]:
    """SemiFL's model after two rounds, batch norm and short batches included."""
    algorithm = toy_semifl()
    toy_trainer(tmp_path, **{"max_rounds": 2, "logger": False, "precision": "64-true"} | kwargs).fit(
        algorithm, ToyData()
    )
    return weights(algorithm)


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < tolerance


def test_channels_last_is_the_same_run_up_to_rounding(tmp_path: Path) -> None:
    assert_near(trained(tmp_path), trained(tmp_path, channels_last=True), 1e-10)


def test_channels_last_reaches_the_live_weights_and_the_global_ones(tmp_path: Path) -> None:
    algorithm = toy_semifl()
    toy_trainer(tmp_path, max_rounds=1, logger=False, channels_last=True).fit(algorithm, ToyData())
    kernels = [t for t in (*algorithm.parameters(), *algorithm.server.parameters.values()) if t.dim() == 4]
    inner = [t for t in kernels if min(t.shape) > 1]  # with one channel the two layouts are one
    assert len(inner) == 4
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in inner)


def test_a_run_in_another_layout_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    first = toy_trainer(tmp_path, max_rounds=1, precision="64-true", logger=None)
    first.fit(toy_semifl(), ToyData())
    resumed = toy_semifl()
    second = toy_trainer(tmp_path, max_rounds=2, precision="64-true", logger=False, channels_last=True)
    second.fit(resumed, ToyData(), ckpt_path="last")
    assert_near(trained(tmp_path), weights(resumed), 1e-10)


def gradient(precision: Any, channels_last: bool) -> Tensor:
    """Of one batch, as one vector."""
    x, y = torch.rand(10, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    algorithm = FedAvg(network=partial(CNN, width=32, norm="group"), num_classes=3, in_shape=(3, 16, 16))
    algorithm.configure_model()
    if channels_last:
        network_options.lay_out_channels_last(algorithm)
    with Fabric(accelerator="cpu", precision=precision).autocast():
        loss = algorithm.training_step({"x": x, "y": y}, 0)
    assert loss is not None
    loss.backward()
    return torch.cat([p.grad.flatten() for p in algorithm.parameters() if p.grad is not None])


def test_a_step_s_gradient_in_the_fast_kernels_is_that_of_float32() -> None:
    """To rounding with the channels last; bfloat16 has 8 bits."""
    reference = gradient("32-true", channels_last=False)
    for precision, tolerance in (("32-true", 1e-5), ("bf16-mixed", 0.1)):
        distance = float((gradient(precision, channels_last=True) - reference).norm() / reference.norm())
        assert 0 < distance < tolerance


def test_bfloat16_in_channels_last_learns(tmp_path: Path) -> None:
    algorithm = FedAvg(network=partial(CNN, width=4, norm="group"), optimizer=sgd, client_epochs=4)
    trainer = toy_trainer(tmp_path, max_rounds=12, logger=False, precision="bf16-mixed", channels_last=True)
    trainer.fit(algorithm, ToyData(num_labels="all", label_location="clients"))
    assert trainer.callback_metrics["test/accuracy"] > 0.9


def compiled_as(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_options.compile_network, "__defaults__", (backend,))


def test_a_compiled_run_is_the_same_run_up_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and run by torch itself; generating code is tried on a small network below."""
    compiled_as("aot_eager", monkeypatch)
    torch.compiler.reset()
    assert_near(trained(tmp_path), trained(tmp_path, compile=True), 1e-10)


def test_clients_that_train_together_do_without_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled_as("eager", monkeypatch)
    with caplog.at_level(logging.WARNING, "lightning_fedssl"):
        together = trained(tmp_path, compile=True, clients_at_once=3)
    assert not [r for r in caplog.records if "one after another" in r.getMessage()]
    assert_near(trained(tmp_path), together, 1e-10)


class Reads(Network):
    """Asks for a number in its forward pass."""

    def __init__(self, num_classes: int, in_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.inner = MLP(num_classes=num_classes, in_shape=in_shape)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits * 2 if logits.sum().item() > 0 else logits


def test_a_network_that_cannot_be_compiled_runs_as_it_is_after_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled_as("eager", monkeypatch)

    def run(compile: bool) -> dict[str, Tensor]:
        algorithm = FedAvg(network=Reads, optimizer=sgd, num_classes=3, in_shape=(1, 8, 8))
        data = ToyData(num_labels="all", label_location="clients")
        toy_trainer(tmp_path, max_rounds=1, logger=False, compile=compile).fit(algorithm, data)
        return weights(algorithm)

    plain = run(False)
    with caplog.at_level(logging.WARNING, "lightning_fedssl"):
        asked = run(True)
    (warning,) = [r.getMessage() for r in caplog.records if "trainer.compile" in r.getMessage()]
    assert "Reads cannot be compiled and runs uncompiled" in warning
    assert "item" in warning
    assert all(torch.equal(plain[name], asked[name]) for name in plain)


@pytest.mark.skipif(not shutil.which("g++"), reason="the compiler's backend needs g++")
def test_generated_code_gives_the_gradients_of_the_network() -> None:
    fabric = Fabric(accelerator="cpu", precision="64-true")
    algorithm = FedAvg(network=partial(CNN, width=2, norm="group"), num_classes=3, in_shape=(1, 8, 8)).double()
    algorithm.configure_model()
    algorithm.double()
    x, y = torch.rand(5, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])

    def gradients() -> list[Tensor]:
        algorithm.zero_grad()
        loss = algorithm.training_step({"x": x, "y": y}, 0)
        assert loss is not None
        loss.backward()
        return [p.grad.clone() for p in algorithm.parameters() if p.grad is not None]

    plain = gradients()
    network_options.compile_network(algorithm, fabric)
    assert algorithm.network._compiled_call_impl is not None
    assert next(iter(algorithm.state_dict())).startswith("network.convs")
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(plain, gradients(), strict=True))
