"""``report.html`` of runs of every kind."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import ClientEvaluation, LabelsAlone, PseudoLabelQuality, RunReport
from lightning_fedssl.report.page import __file__ as page_file
from lightning_fedssl.report.page import ticks
from lightning_fedssl.system import Faults, RandomDropout
from tests.algorithms.helpers import METHODS
from tests.callbacks.helpers import events_of
from tests.report.html import EVIL, Page
from tests.toy import SPEC, ToyData, forked, toy_semifl, toy_trainer


class Named(ToyData):
    """A data set and classes whose names are HTML."""

    def _load(self) -> Any:
        _, *parts = super()._load()
        return (replace(SPEC, name=EVIL, class_names=(EVIL, "b & c", '"d"')), *parts)


class Warns(FederatedCallback):
    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        logging.getLogger("lightning_fedssl.x").warning("%s", EVIL)


def test_the_page_of_a_run_shows_its_parts_and_escapes_what_others_have_named(tmp_path: Path) -> None:
    callbacks = [LabelsAlone(), ClientEvaluation(), Warns()]
    trainer = toy_trainer(tmp_path, callbacks=callbacks, metrics=["recall", "confusion_matrix"])
    trainer.fit(toy_semifl(), Named())
    template = Path(page_file).with_name("run.html").read_text(encoding="utf-8")
    for name in re.findall(r"\bdata\.(\w+)", template):
        assert hasattr(trainer.datamodule, name), "in a branch that no test may reach"
    page = Page(trainer.log_dir)
    assert "script" not in page.tags
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert page.text.count(EVIL) > 5
    accuracy = 100 * float(trainer.callback_metrics["test/accuracy"])
    assert f"with clients {accuracy:.1f}" in page.text
    assert "chosen: " in page.text
    assert "senttest accuracy\n" in page.text, "the table of clients"
    for part in ("Data", "Partition", "Curves", "Clients", "Pseudo-labels", "Time", "Warnings"):
        assert f"{part}\n" in page.text, part
    assert not page.live


def test_pseudo_labels_are_left_out_where_none_can_be_judged(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(toy_semifl(threshold=1.0), ToyData())
    assert "Pseudo-labels\n" not in Page(trainer.log_dir).text


class Late(FederatedCallback):
    """Works after the last round, as the training of the labels alone does."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        time.sleep(0.5)


def test_the_work_after_the_last_round_is_time(tmp_path: Path) -> None:
    report = RunReport()
    toy_trainer(tmp_path, max_rounds=1, callbacks=[Late(), report]).fit(toy_semifl(), ToyData())
    assert report.seconds["other"] >= 0.5


def test_clients_and_pseudo_labels_are_counted_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        report = RunReport()
        options: dict[str, Any] = {"faults": Faults(RandomDropout(0.4)), **forked(ranks)}
        trainer = toy_trainer(tmp_path / str(ranks), callbacks=report, **options)
        trainer.fit(toy_semifl(), ToyData())
        found.append(report)
    one, two = found
    assert {k: row.tolist() for k, row in one.clients.items()} == {k: row.tolist() for k, row in two.clients.items()}
    assert {k: table.tolist() for k, table in one.tables.items()} == {k: t.tolist() for k, t in two.tables.items()}
    drawn, used, steps, down, up = torch.stack([*one.clients.values()]).sum(dim=0).tolist()
    assert drawn == 3 * 3 > used > 0
    assert down + up == trainer.total_bytes
    assert steps > 0
    assert min(one.seconds[phase] for phase in ("server", "clients", "evaluation", "other")) > 0


@pytest.mark.parametrize("method", ["semifl", "fl2_labels", "semifl_masks"])
def test_a_table_of_labels_counts_confident_ones_by_true_class(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    several = method == "fl2_labels"  # for which class 3 says that a class is absent
    quality, expected = PseudoLabelQuality(), torch.zeros(5, 4, dtype=torch.float64)

    class Counts(FederatedCallback):
        def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
            truth, (labels, _, mask) = trainer.datamodule.true_labels(data.unlabeled), work.pseudo_labels
            for place in zip(*mask.nonzero().T.tolist(), strict=True):
                true, label = int(truth[place]), int(labels[place])
                known = ((place[-1] if true else 3), (place[-1] if label else 3)) if several else (true, label)
                expected[known] += 1

    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[quality, Counts()])
    trainer.fit(make(), data())
    assert quality.table is not None
    count = quality.table.shape[1]
    assert torch.equal(quality.table[:count], expected[:count, :count])
    assert quality.table.sum() == expected.sum() > 0
    present = expected.sum(0)[:3]
    share = float(trainer.callback_metrics["pseudo_label/largest_class_share"])
    assert share == pytest.approx(float(present.max() / present.sum()))
    scores, samples, labels, truths = map(list, zip(*quality.wrong, strict=True))
    assert scores == sorted(scores, reverse=True)
    for score, sample, label, truth in zip(scores, samples, labels, truths, strict=True):
        known = trainer.datamodule.true_labels(sample)
        assert torch.equal(known, truth) or (several and known[min(label, truth)] == (truth < 3))
        assert (label != truth).any()
        assert method != "semifl_masks" or score == ((label != truth) & (label >= 0)).double().mean()


class Looks(FederatedCallback):
    """Reads the page as soon as a round begins; ends the run in the second one, if it is asked to."""

    def __init__(self, ends: str = "") -> None:
        self.ends = ends
        self.pages: list[Page] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.pages.append(Page(trainer.log_dir))
        if trainer.round_index == 2 and self.ends == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.round_index == 2 and self.ends == "error":
            raise OSError(EVIL)


@pytest.mark.parametrize(("ends", "said"), [("signal", "Stopped after round 2 of 3"), ("error", "Failed after round")])
def test_the_page_is_there_from_the_start_and_says_how_the_run_ended(tmp_path: Path, ends: str, said: str) -> None:
    look = Looks(ends)
    trainer = toy_trainer(tmp_path, callbacks=look, logger=CSVLogger(tmp_path))
    try:
        trainer.fit(toy_semifl(), ToyData())
    except OSError:
        assert ends == "error"
    assert look.pages[0].live
    assert "Running: round 0 of 3" in look.pages[0].text
    page = Page(trainer.log_dir)
    assert said in page.text
    assert (EVIL in page.text) == (ends == "error")
    assert not page.live


def test_a_resumed_run_has_the_page_of_one(tmp_path: Path) -> None:
    """But for times, which are measured."""
    pages = []
    for name, attempts in (("whole", [""]), ("parts", ["signal", ""])):
        for ends in attempts:
            resumes = "last" if len(attempts) > 1 and not ends else None
            trainer = toy_trainer(tmp_path / name, callbacks=Looks(ends))
            trainer.fit(toy_semifl(), ToyData(), ckpt_path=resumes)
        text = Path(str(trainer.log_dir), "report.html").read_text(encoding="utf-8")
        pages.append(text[text.index("<h2>Curves") : text.index("<h2>Time")])
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("method", "monitor", "said"),
    [
        ("fl2_labels", "average_precision", "labelled without"),
        ("semifl_masks", "iou", "% wrong"),
        ("mean_teacher_numbers", "mae", "Largest errors"),
    ],
)
def test_a_run_of_another_task_has_a_page(tmp_path: Path, method: str, monitor: str, said: str) -> None:
    make, data = METHODS[method]
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(make(), data())
    page = Page(trainer.log_dir)
    assert f"After 1 rounds the test {monitor} is" in page.text
    assert said in page.text
    assert '"matrices": {}' in Path(str(trainer.log_dir), "result.json").read_text(), "no sample's true label"


def test_scalars_of_single_classes_are_in_the_csv_file_alone(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, metrics=["recall"])
    trainer.fit(toy_semifl(), ToyData())
    folder = Path(str(trainer.log_dir))
    assert "val/recall/class_1" in (folder / "metrics.csv").read_text()
    assert not [tag for tag in events_of(trainer).Tags()["scalars"] if "class_1" in tag]


@pytest.mark.parametrize(("low", "high", "found"), [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (1, 800, [0, 200, 400, 600, 800])])
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == found
