"""Heat maps of the clients and the gallery of wrong pseudo-labels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import (
    ClientHeatMaps,
    PseudoLabelGallery,
    PseudoLabelQuality,
    StopAtEquilibrium,
    client_pictures,
)
from lightning_fedssl.callbacks.client_pictures import TITLES
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from tests.algorithms.helpers import toy_easgd, toy_rgd
from tests.callbacks.helpers import events_of
from tests.toy import ToyData, labeled_clients, toy_semifl, toy_trainer


class Received(FederatedCallback):
    """Computes the length of every update from the weights that the client's module has before and after training."""

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}
        self.lengths: dict[int, dict[int, float]] = {}

    def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
        self.start = {name: p.detach().clone() for name, p in algorithm.named_parameters()}

    def on_client_end(self, trainer: Any, algorithm: Any, update: Any) -> None:
        moved = torch.cat([(t - self.start[name]).flatten() for name, t in update.parameters.items()])
        self.lengths.setdefault(trainer.round_index, {})[update.client] = float(moved.norm())


@pytest.mark.parametrize(("make", "data"), [(toy_rgd, ToyData), (toy_easgd, labeled_clients)])
def test_an_update_begins_at_the_weights_that_the_client_received(tmp_path: Path, make: Any, data: Any) -> None:
    """Those of its group or slot, not the mean of all."""
    maps, received = ClientHeatMaps(), Received()
    trainer = toy_trainer(tmp_path, logger=False, clients_per_round=4, callbacks=[maps, received])
    trainer.fit(make(), data())
    assert len(received.lengths) == 3
    for number, lengths in received.lengths.items():
        assert maps.history["update_norm"][number] == pytest.approx(lengths, rel=1e-5)


def test_the_gallery_shows_the_most_confident_wrong_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = PseudoLabelGallery(every_n_rounds=2, images=4)
    shown: list[Any] = []
    draw = gallery._draw

    def drawn(trainer: Any, wrong: Any) -> Any:
        shown.append(wrong)
        return draw(trainer, wrong)

    monkeypatch.setattr(gallery, "_draw", drawn)
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=[gallery])
    trainer.fit(toy_semifl(), ToyData())
    tags = events_of(trainer).Tags()
    assert "pseudo_label/most_confident_wrong" in tags["images"]
    assert "pseudo_label/confidence" in tags["histograms"]
    (wrong,) = shown
    assert [entry[0] for entry in wrong] == sorted((entry[0] for entry in wrong), reverse=True)
    for _, index, label, truth, _ in wrong:
        assert int(trainer.datamodule.true_labels(torch.tensor([index]))) == truth != label


def test_the_gallery_collects_by_hand(tmp_path: Path) -> None:
    """Of five labels two are wrong; the more confident one comes first, and unknown classes are never wrong."""
    gallery = PseudoLabelGallery(every_n_rounds=1, images=3)

    class Known:
        @staticmethod
        def true_labels(indices: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0, 1, 2, 1, -1])

    trainer: Any = SimpleNamespace(datamodule=Known)
    labels, confidence = torch.tensor([0, 2, 1, 1, 0]), torch.tensor([0.9, 0.5, 0.8, 0.7, 1.0])
    pseudo = PseudoLabels(labels, confidence, confidence >= 0.6)
    algorithm: Any = SimpleNamespace(clients=SimpleNamespace(staging=7))
    gallery.on_pseudo_labels(trainer, algorithm, torch.arange(10, 15), pseudo)
    (collected,) = gallery._labels[7]
    wrong = gallery._most_confident_wrong(trainer, collected)
    assert [entry[1:] for entry in wrong] == [(12, 1, 2, True), (11, 2, 1, False)]


def test_the_gallery_marks_labels_below_the_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With threshold 1 no label is trained on; with 0 all are."""
    figures: list[Any] = []
    monkeypatch.setattr(client_pictures, "show_figure", lambda trainer, name, figure: figures.append(figure))
    for threshold in (1.0, 0.0):
        trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[PseudoLabelGallery(1, images=2)])
        trainer.fit(toy_semifl(threshold=threshold), ToyData())
    captions = [[axes.get_title().endswith("%, not used") for axes in figure.axes[:2]] for figure in figures]
    assert captions == [[True, True], [False, False]]


def test_a_client_without_a_confident_image_has_mask_rate_0_and_no_update(tmp_path: Path) -> None:
    maps = ClientHeatMaps()
    toy_trainer(tmp_path, max_rounds=1, callbacks=[maps]).fit(toy_semifl(threshold=1.0), ToyData())
    assert sorted(maps.history["mask_rate"][1].values()) == [0, 0, 0]
    assert maps.history["update_norm"] == {}


def test_the_last_round_of_a_run_that_a_callback_ends_is_drawn_once(tmp_path: Path) -> None:
    """Round 3 ends the run, also when it is resumed from round 1; once it has ended, resuming it draws nothing."""
    seen, ckpt_path = [], None
    for max_rounds in (1, 9, 9):
        pictures = [ClientHeatMaps(2), PseudoLabelGallery(2), PseudoLabelQuality(matrix_every_n_rounds=2)]
        trainer = toy_trainer(
            tmp_path, max_rounds=max_rounds, callbacks=[*pictures, StopAtEquilibrium(threshold=100.0, window=3)]
        )
        trainer.fit(toy_semifl(), ToyData(), ckpt_path=ckpt_path)
        ckpt_path = "last"
        events = events_of(trainer)
        drawn = [name for name in events.Tags()["images"] if name.startswith(("clients/", "pseudo_label/"))]
        seen.append({name: [event.step for event in events.Images(name)] for name in drawn})
        assert ("pseudo_label/confidence" in events.Tags()["histograms"]) == bool(drawn)
    for name in ("pseudo_label/confusion_matrix", *(f"clients/{name}" for name in TITLES)):
        assert (seen[0][name], seen[1][name]) == ([1], [2, 3])
    assert seen[1]["pseudo_label/most_confident_wrong"][-1] == 3
    assert seen[2] == {}
