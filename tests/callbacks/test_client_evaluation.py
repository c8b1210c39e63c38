"""Accuracy of every client: which images, which numbers, on any number of ranks."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.diagnostics.stop_at_equilibrium import StopAtEquilibrium
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_fedssl.callbacks import ClientEvaluation, client_evaluation
from lightning_fedssl.callbacks.client_evaluation import draw_like, summarize
from lightning_fedssl.data import ClassSkew
from tests.toy import ToyData, assert_same, evaluated, forked, toy_semifl, toy_trainer, weights
from tests.trainer.helpers import StopAfter


def rows_of(trainer: Any) -> list[dict[str, str]]:
    (path,) = Path(trainer.default_root_dir).rglob("client_evaluation.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def test_images_are_drawn_by_the_class_distribution() -> None:
    labels = torch.arange(60) % 3
    drawn = draw_like(torch.tensor([5, 0, 3]), labels, 8, seed=0, client=1)
    assert labels[drawn].bincount(minlength=3).tolist() == [5, 0, 3]
    assert len(drawn.unique()) == 8
    assert torch.equal(drawn, draw_like(torch.tensor([5, 0, 3]), labels, 8, seed=0, client=1))
    assert not torch.equal(drawn, draw_like(torch.tensor([5, 0, 3]), labels, 8, seed=0, client=2))
    thirds = draw_like(torch.tensor([1, 1, 1]), labels, 10, 0, 0)
    assert labels[thirds].bincount().tolist() == [4, 3, 3]
    assert len(draw_like(torch.tensor([9, 0, 0]), labels, 30, 0, 0)) == 30  # of 20 images
    assert len(draw_like(torch.tensor([0, 0, 0]), labels, 30, 0, 0)) == 0


def test_summary_by_hand() -> None:
    """Four accuracies with mean 0.5; deviations 0, 0.5, -0.25, -0.25: variance 0.375 / 4. NaN: no images."""
    accuracies = torch.tensor([0.5, 1.0, 0.25, float("nan"), 0.25], dtype=torch.float64)
    found = summarize(accuracies)
    assert found["client_test/accuracy_mean"] == 0.5
    assert found["client_test/accuracy_std"] == pytest.approx((0.375 / 4) ** 0.5)
    assert found["client_test/accuracy_worst_tenth"] == 0.25
    twenty = summarize(torch.linspace(0, 0.95, 20, dtype=torch.float64))
    assert twenty["client_test/accuracy_worst_tenth"] == pytest.approx(0.025)  # the mean of 0 and 0.05
    assert summarize(accuracies[3:4]) == {}


def test_one_class_per_client_gives_the_recalls_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every test image of a class drawn, the accuracy of a client with that class alone is the class's recall."""
    make_data = partial(ToyData, num_clients=3, partition=ClassSkew(r=1.0))
    plain, watched = toy_semifl(), toy_semifl()
    toy_trainer(tmp_path / "plain", max_rounds=2).fit(plain, make_data())
    monkeypatch.setattr(client_evaluation, "IMAGES", 20)
    callback = ClientEvaluation()
    trainer = toy_trainer(tmp_path / "watched", max_rounds=2, callbacks=[callback], metrics=["recall"])
    data = make_data()
    trainer.fit(watched, data)
    assert_same(weights(plain), weights(watched))
    recalls = [float(trainer.callback_metrics[f"test/recall/class_{k}"]) for k in range(3)]
    assert data.statistics.class_counts.gt(0).sum(dim=1).tolist() == [1, 1, 1]
    classes = data.statistics.class_counts.argmax(dim=1).tolist()
    assert callback.history[2].tolist() == pytest.approx([recalls[k] for k in classes])
    expected = sum(recalls[k] for k in classes) / 3
    assert float(trainer.callback_metrics["client_test/accuracy_mean"]) == pytest.approx(expected)
    rows = rows_of(trainer)
    assert [(row["round"], row["client"]) for row in rows] == [(str(r), str(c)) for r in (1, 2) for c in range(3)]
    trainer.test(watched, data)
    assert rows_of(trainer) == rows, "a round has one row for each client"


class OwnTestImages(ToyData):
    """Client c's own test images are 6 c .. 6 c + 5."""

    def client_test_indices(self, client: int) -> Tensor | None:
        return torch.arange(6 * client, 6 * client + 6)


def test_own_test_images_in_the_rounds_that_are_evaluated(tmp_path: Path) -> None:
    callback = ClientEvaluation()
    model = toy_semifl()
    trainer = toy_trainer(tmp_path, max_rounds=3, callbacks=[callback], check_val_every_n_rounds=2)
    data = OwnTestImages()
    trainer.fit(model, data)
    assert sorted(callback.history) == [2, 3]
    images, labels = evaluated(data, torch.arange(6, 12))
    logits = torch.func.functional_call(model.eval(), model.evaluated_model(), (images,))
    assert float(callback.history[3][1]) == float((logits.argmax(1) == labels).double().mean())


def test_the_last_round_is_evaluated_if_a_callback_ends_the_run(tmp_path: Path) -> None:
    callback = ClientEvaluation()
    ends = StopAtEquilibrium(threshold=100.0, window=3)
    trainer = toy_trainer(tmp_path, max_rounds=9, callbacks=[callback, ends], check_val_every_n_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    assert sorted(callback.history) == [2, 3]
    assert {row["round"] for row in rows_of(trainer)} == {"2", "3"}
    assert float(trainer.callback_metrics["client_test/accuracy_mean"]) == float(callback.history[3].mean())


def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        clients, saving = ClientEvaluation(), ModelCheckpoint(monitor="val/accuracy", mode="max")
        trainer = toy_trainer(
            tmp_path / str(ranks), max_rounds=2, precision="64-true", callbacks=[clients, saving], **forked(ranks)
        )
        trainer.fit(toy_semifl(), ToyData(eval_batch_size=7))
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if "client_test" in name}
        assert list(clients.history) == [1, 2]
        assert Path(saving.best_model_path).is_file()
        assert saving.best_model_score is not None
        found.append((rows_of(trainer), metrics))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == 3
    assert found[0][1] == pytest.approx(found[1][1])


def test_a_resumed_run_has_the_accuracies_of_all_rounds(tmp_path: Path) -> None:
    def fitted(folder: str, last: int, ckpt_path: str | None = None) -> dict[int, Tensor]:
        callback = ClientEvaluation()
        trainer = toy_trainer(tmp_path / folder, max_rounds=4, callbacks=[callback, StopAfter(last)])
        trainer.fit(toy_semifl(), ToyData(), ckpt_path=ckpt_path)
        history: dict[int, Tensor] = callback.history
        return history

    whole = fitted("whole", 4)
    assert list(fitted("parts", 2)) == [1, 2]
    resumed = fitted("parts", 4, "last")
    assert list(resumed) == list(whole) == [1, 2, 3, 4]
    assert all(torch.equal(resumed[r], whole[r]) for r in whole)
    _, second = sorted(tmp_path.glob("parts/**/client_evaluation.csv"))
    assert second.read_bytes() == next(tmp_path.glob("whole/**/client_evaluation.csv")).read_bytes()


def test_clients_without_test_images_are_no_error(tmp_path: Path) -> None:
    """The test images of data with identifiers may belong to clients that do not train."""

    class OthersTest(ToyData):
        def client_test_indices(self, client: int) -> Tensor:
            return torch.zeros(0, dtype=torch.int64)

    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[ClientEvaluation()], logger=TensorBoardLogger(tmp_path))
    trainer.fit(toy_semifl(), OthersTest())
    assert "client_test/accuracy_mean" not in trainer.callback_metrics
    rows = (Path(str(trainer.log_dir)) / "client_evaluation.csv").read_text().splitlines()
    assert rows[1:] == [f"1,{client}," for client in range(4)]


def test_without_validation_images_the_last_round_alone_is_evaluated(tmp_path: Path) -> None:
    """By the test."""
    trainer = toy_trainer(tmp_path, max_rounds=3, callbacks=[ClientEvaluation()])
    trainer.fit(toy_semifl(), ToyData(validation=0))
    rows = rows_of(trainer)
    assert [(row["round"], row["client"]) for row in rows] == [("3", str(c)) for c in range(4)]
    assert all(row["accuracy"] for row in rows)
