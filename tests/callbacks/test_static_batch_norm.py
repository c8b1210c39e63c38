from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.models import CNN, StaticBatchNorm2d
from lightning_fedssl.storage import checkpoint_file
from tests.algorithms import helpers as h
from tests.toy import ToyData, Transfers, assert_same, toy_fedavg, toy_semifl, toy_trainer, weights

STATIC = partial(CNN, width=4, norm="static_batch")


class FirstLayer(nn.Module):
    """Statistics of its first layer have a closed form: they are those of the images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = StaticBatchNorm2d(1)
        self.classifier = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, 3)``."""
        logits: Tensor = self.classifier(self.norm(x).relu().mean((2, 3)))
        return logits


def statistics_after_training(tmp_path: Path, source: Any) -> tuple[Tensor, Tensor, Any]:
    algorithm = toy_semifl(network=FirstLayer)
    trainer = toy_trainer(tmp_path, logger=False, precision="64-true", callbacks=StaticBatchNorm(source, batch_size=8))
    trainer.fit(algorithm, ToyData())
    buffers = algorithm.server.buffers
    return buffers["network.norm.running_mean"], buffers["network.norm.running_var"], trainer


def images_by_source(trainer: Any, source: str) -> Tensor:
    """The images of a sweep in its order."""
    server = trainer.local_data(sampling.SERVER)
    if source == "server":
        return cast(Tensor, server.plain(server.labeled.sort().values))
    by_class = torch.cat([server.labeled[server.labels == k].sort().values for k in range(3)])
    held_out = set(trainer.datamodule._validation.tolist()) | set(by_class.tolist())
    others = [image for image in range(120) if image not in held_out]
    return cast(Tensor, server.plain(torch.cat([by_class, torch.tensor(others)])))


@pytest.mark.parametrize("source", ["server", "pooled"])
def test_batches_weigh_equally_as_in_the_authors_pass(tmp_path: Path, source: str) -> None:
    mean, variance, trainer = statistics_after_training(tmp_path, source)
    batches = images_by_source(trainer, source).split(8)
    torch.testing.assert_close(mean[0], torch.stack([b.mean() for b in batches]).mean())
    torch.testing.assert_close(variance[0], torch.stack([b.var() for b in batches]).mean())


def test_moments_are_those_of_all_images_together(tmp_path: Path) -> None:
    mean, variance, trainer = statistics_after_training(tmp_path, "moments")
    everything = images_by_source(trainer, "pooled")
    torch.testing.assert_close(mean[0], everything.mean())
    torch.testing.assert_close(variance[0], everything.var())


def test_statistics_of_another_source_are_measured_again(tmp_path: Path) -> None:
    statistics_after_training(tmp_path, "server")
    algorithm = toy_semifl(network=FirstLayer)
    trainer = toy_trainer(tmp_path, logger=False, precision="64-true", callbacks=StaticBatchNorm("moments"))
    trainer.validate(algorithm, ToyData(), ckpt_path="last")
    everything = images_by_source(trainer, "pooled")
    torch.testing.assert_close(algorithm.server.buffers["network.norm.running_mean"][0], everything.mean())


def counted_sweeps() -> Any:
    """Counts how often the statistics are computed."""
    return mock.patch.object(StaticBatchNorm, "_statistics", autospec=True, side_effect=StaticBatchNorm._statistics)


@pytest.mark.parametrize("every", [1, 4])
def test_statistics_are_computed_once_for_each_change_of_the_weights(tmp_path: Path, every: int) -> None:
    """Before the first broadcast, and after each of four rounds: evaluation and the next broadcast share a sweep."""
    trainer = toy_trainer(tmp_path, max_rounds=4, logger=False, check_val_every_n_rounds=every)
    with counted_sweeps() as sweeps:
        trainer.fit(toy_semifl(), ToyData())
    assert sweeps.call_count == 5


@pytest.mark.parametrize(("every", "validation", "sweeps"), [(1, 0.1, 4), (3, 0.1, 2), (3, 0, 1)])
def test_statistics_that_no_client_reads_are_computed_for_evaluations_alone(
    tmp_path: Path, every: int, validation: float, sweeps: int
) -> None:
    """In rounds 3 and 4 of 4, say; or once, for the test at the end. The weights are those of a run with all sweeps."""
    results = []
    for for_clients in (False, True):
        options: Any = {"max_rounds": 4, "logger": False, "check_val_every_n_rounds": every}
        trainer = toy_trainer(tmp_path, callbacks=StaticBatchNorm("moments", for_clients=for_clients), **options)
        algorithm = h.toy_fixmatch(network=STATIC)
        with counted_sweeps() as found:
            trainer.fit(algorithm, ToyData(validation=validation))
        results.append((algorithm, found.call_count, trainer.callback_metrics))
    (lean, found, metrics), (full, more, other) = results
    assert (found, more) == (sweeps, 5)
    assert_same(weights(lean), weights(full))
    assert metrics["test/accuracy"] == other["test/accuracy"]


@pytest.mark.parametrize("make", [toy_fedavg, h.toy_shvr, h.toy_pseudo_label])
def test_a_method_without_labels_at_the_server_is_evaluated_with_statistics_of_the_clients(
    tmp_path: Path, make: Any
) -> None:
    """Statistics of the first layer are those of all training images, which clients hold."""
    algorithm = make(network=FirstLayer)
    trainer = toy_trainer(tmp_path, logger=False, precision="64-true")
    trainer.fit(algorithm, h.uneven_clients())
    data = trainer.datamodule
    rows = torch.cat([torch.cat([own.labeled, own.unlabeled]) for own in data.split.clients])
    images = trainer.local_data(0).plain(rows)
    torch.testing.assert_close(algorithm.network.norm.running_mean[0], images.mean())
    torch.testing.assert_close(algorithm.network.norm.running_var[0], images.var(unbiased=True))


@pytest.mark.parametrize(("make", "measured"), [(toy_fedavg, 1), (h.toy_shvr, 4)])
def test_statistics_are_measured_before_a_round_only_where_clients_use_them(
    tmp_path: Path, make: Any, measured: int
) -> None:
    """Three rounds: before each of them and at the end, or at the end alone."""
    trainer = toy_trainer(tmp_path, logger=False, check_val_every_n_rounds=3)
    with counted_sweeps() as sweeps:
        trainer.fit(make(network=STATIC), h.uneven_clients())
    assert sweeps.call_count == measured


@pytest.mark.parametrize("make", [h.toy_rgd, h.toy_fedmatch, h.toy_semi_sfl, h.toy_fedswitch, h.toy_mean_teacher])
def test_a_method_that_evaluates_other_models_refuses_static_batch_norm(make: Any) -> None:
    with pytest.raises(ValueError, match=r"norm static_batch, but .*batch, group or none"):
        make(network=STATIC).configure_model()


def test_a_checkpoint_without_its_own_statistics_gets_them_before_its_test(tmp_path: Path) -> None:
    class Stopped(StaticBatchNorm):
        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            trainer.should_stop = trainer.round_index == 2

    def trained(for_clients: bool) -> dict[str, float]:
        root = tmp_path / str(for_clients)
        options: Any = {"max_rounds": 4, "check_val_every_n_rounds": 3, "logger": False}
        stopped = Stopped("moments", for_clients=for_clients)
        toy_trainer(root, callbacks=stopped, **options).fit(h.toy_fixmatch(network=STATIC), ToyData())
        callback = StaticBatchNorm("moments", for_clients=for_clients)
        trainer = toy_trainer(root, callbacks=callback, **options)
        return trainer.test(h.toy_fixmatch(network=STATIC), ToyData(), ckpt_path="last")[0]

    assert trained(False) == trained(True)


@pytest.mark.parametrize("end", ["callback", "signal"])
def test_what_is_saved_at_the_end_has_the_statistics_of_its_weights(tmp_path: Path, end: str) -> None:
    """A callback or a signal ends the run after a round without an evaluation, for which none were measured."""

    class Ends(FederatedCallback):
        def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            if trainer.round_index == 2 and end == "callback":
                trainer.should_stop = True
            elif trainer.round_index == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    options: Any = {"max_rounds": 4, "check_val_every_n_rounds": 3, "logger": False}
    callbacks = [StaticBatchNorm("moments", for_clients=False), Ends()]
    toy_trainer(tmp_path, callbacks=callbacks, **options).fit(h.toy_fixmatch(network=STATIC), ToyData())
    path = tmp_path / "checkpoints/last.ckpt"
    tested = h.toy_fixmatch(network=STATIC)
    toy_trainer(tmp_path, callbacks=StaticBatchNorm("moments"), **options).test(tested, ToyData(), ckpt_path=str(path))
    assert_same(checkpoint_file.load(path)["state_dict"], weights(tested))
    exported = load_file(tmp_path / "checkpoints/model.safetensors")
    assert_same(exported, {name.removeprefix("network."): t for name, t in weights(tested).items()})


def test_moments_are_counted_as_traffic_of_every_client(tmp_path: Path) -> None:
    """Two sweeps: all 4 clients receive the weights and send moments; 3, which have them, get statistics to train."""
    algorithm = toy_semifl(network=FirstLayer)
    trainer = toy_trainer(tmp_path, max_rounds=1, logger=False, callbacks=StaticBatchNorm("moments"))
    trainer.fit(algorithm, ToyData())
    weights_bytes, statistics_bytes, moments_bytes = 4 * (1 + 1 + 3 + 3), 4 * 2, 8 * 3
    metrics = trainer.callback_metrics
    assert metrics["communication/download_bytes"] == 2 * 4 * weights_bytes + 3 * statistics_bytes
    assert metrics["communication/upload_bytes"] == 2 * 4 * moments_bytes + 3 * weights_bytes


def test_pooled_statistics_need_the_images_of_every_client_once(tmp_path: Path) -> None:
    algorithm = toy_semifl(network=FirstLayer)
    seen = Transfers()
    callbacks = [StaticBatchNorm("pooled"), seen]
    toy_trainer(tmp_path, max_rounds=2, logger=False, callbacks=callbacks).fit(algorithm, ToyData())
    images = [(client, sizes) for _, client, _, sizes in seen.seen if "images" in sizes]
    unlabeled = (120 - 12 - 12) // 4
    assert images == [(client, {"images": unlabeled * 8 * 8}) for client in range(4)]
