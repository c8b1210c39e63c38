"""Heat maps of the clients and the gallery of wrong pseudo-labels."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
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
from lightning_fedssl.callbacks.client_evaluation import draw_heat_map
from lightning_fedssl.callbacks.client_pictures import TITLES, draw_clients
from lightning_fedssl.callbacks.metric_matrices import draw_matrix, write_matrix
from lightning_fedssl.callbacks.participation_plot import draw_participation
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from tests.algorithms.helpers import toy_easgd, toy_fixmatch, toy_rgd
from tests.test_dashboard import events_of
from tests.toy import SPEC, ToyData, assert_same, labeled_clients, toy_fedavg, toy_semifl, toy_trainer, weights


class Movements(FederatedCallback):
    """Stores every client's movement, to compute the heat maps' values again."""

    def __init__(self) -> None:
        self.rounds: dict[int, dict[int, tuple[float, torch.Tensor]]] = {}

    def on_client_end(self, trainer: Any, algorithm: Any, update: Any) -> None:
        sent = algorithm.server.parameters
        moved = torch.cat([(p - sent[name]).flatten() for name, p in update.parameters.items()])
        self.rounds.setdefault(trainer.round_index, {})[update.client] = (algorithm.client_weight(update), moved)


def test_heat_maps_hold_each_clients_update_and_pseudo_labels(tmp_path: Path) -> None:
    maps, movements = ClientHeatMaps(every_n_rounds=2, coordinates=10**6), Movements()
    algorithm = toy_semifl()
    trainer = toy_trainer(tmp_path, max_rounds=3, callbacks=[maps, movements])
    trainer.fit(algorithm, ToyData())
    for number, clients in movements.rounds.items():
        total = sum(weight for weight, _ in clients.values())
        mean = torch.stack([weight / total * moved for weight, moved in clients.values()]).sum(0)
        for client, (_, moved) in clients.items():
            assert maps.history["update_norm"][number][client] == pytest.approx(float(moved.norm()), rel=1e-5)
            cosine = float(torch.nn.functional.cosine_similarity(moved, mean, dim=0))
            assert maps.history["cosine_to_mean"][number][client] == pytest.approx(cosine, abs=1e-5)
    assert all(len(clients) == 3 for clients in maps.history["mask_rate"].values())
    images = events_of(trainer).Tags()["images"]
    assert {"clients/mask_rate", "clients/update_norm", "clients/cosine_to_mean"} <= set(images)
    assert [event.step for event in events_of(trainer).Images("clients/mask_rate")] == [2, 3]


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


def test_pictures_change_no_number_and_a_method_without_pseudo_labels_has_no_map_of_them(tmp_path: Path) -> None:
    plain, watched = toy_fedavg(), toy_fedavg()
    toy_trainer(tmp_path, logger=False).fit(plain, labeled_clients())
    maps = ClientHeatMaps(coordinates=7)
    toy_trainer(tmp_path, callbacks=[maps, PseudoLabelGallery(1)]).fit(watched, labeled_clients())
    assert_same(weights(plain), weights(watched))
    assert maps.history["mask_rate"] == {}
    assert set(maps.history["update_norm"]) == {1, 2, 3}


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


@pytest.mark.parametrize("make", [ClientHeatMaps, PseudoLabelGallery])
def test_an_interval_of_zero_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}\.every_n_rounds .* must be 1 or more"):
        make(every_n_rounds=0)


class OfFive:
    """A trainer whose five images have these true classes; the fifth one's is unknown."""

    round_index, is_global_zero, log_dir, loggers = 4, True, "", ()
    truth = torch.tensor([0, 1, 2, 1, -1])
    participation = MappingProxyType({0: "finished", 1: "skipped", 2: "rejected"})

    class datamodule:  # noqa: N801
        num_classes, has_unknown_labels = 3, True

        class spec:  # noqa: N801
            class_names = ("a", "b", "c")

        @staticmethod
        def true_labels(indices: torch.Tensor) -> torch.Tensor:
            return OfFive.truth[indices]

    def log(self, *scalar: Any) -> None:
        """Scalars are tested elsewhere."""

    def gather(self, value: Any) -> list[Any]:
        """This rank, and a rank without clients."""
        return [value, None]


@pytest.mark.parametrize(("every", "is_last"), [(0, True), (3, False), (3, True), (4, False)])
def test_the_matrix_of_pseudo_labels_by_hand(tmp_path: Path, every: int, is_last: bool) -> None:
    """Image 0 is right, 2 and 3 are labelled b; 1 is not confident, and 4 has no known class. Client 2 is rejected.

    Round 4 is due for 4, and for 3 if it is the last.
    """
    quality: Any = PseudoLabelQuality(matrix_every_n_rounds=every)
    trainer = OfFive()
    trainer.log_dir = str(tmp_path)
    labels, mask = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([True, False, True, True, True])
    quality.on_round_start(trainer, None)
    for client, part in ((0, slice(0, 2)), (0, slice(2, 3)), (1, slice(3, 5)), (2, slice(0, 5))):
        algorithm = SimpleNamespace(clients=SimpleNamespace(staging=client))
        pseudo = PseudoLabels(labels[part], torch.ones(5)[part], mask[part])
        quality._compare(trainer, algorithm, torch.arange(5)[part], pseudo)
    quality.on_pictures(trainer, None, is_last)
    path = tmp_path / "pseudo_label_confusion_matrix.csv"
    assert path.exists() == (every == 4 or (every == 3 and is_last))
    if path.exists():
        assert path.read_text() == "true class,a,b,c\na,1,0,0\nb,0,1,0\nc,0,1,0\n"


@pytest.mark.parametrize("semi", [True, False])
def test_a_run_draws_the_matrix_of_its_pseudo_labels_and_changes_no_number(tmp_path: Path, semi: bool) -> None:
    """SemiFL shows its labels to callbacks; for FixMatch the callback labels a sample itself."""
    make = toy_semifl if semi else toy_fixmatch
    plain, drawn = make(), make()
    toy_trainer(tmp_path, logger=False, max_rounds=2).fit(plain, ToyData())
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=[PseudoLabelQuality(matrix_every_n_rounds=1)])
    trainer.fit(drawn, ToyData())
    assert_same(weights(plain), weights(drawn))
    assert [event.step for event in events_of(trainer).Images("pseudo_label/confusion_matrix")] == [1, 2]
    rows = (Path(str(trainer.log_dir)) / "pseudo_label_confusion_matrix.csv").read_text().splitlines()[1:]
    confident = sum(float(value) for row in rows for value in row.split(",")[1:])
    assert confident > 0


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


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PseudoLabelQuality\.matrix_every_n_rounds is -1: give 0 or more"):
        PseudoLabelQuality(matrix_every_n_rounds=-1)


def whole_ticks(figure: Any) -> bool:
    """Whether all ticks of rounds, clients and counts are whole numbers."""
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis) if axis.get_label_text() != ""]
    counted = [axis for axis in axes if axis.get_label_text() != "accuracy"]
    return all(tick == int(tick) for axis in counted for tick in axis.get_ticklocs())


def test_one_client_and_one_round_are_numbered_by_integers() -> None:
    assert whole_ticks(draw_clients({1: {0: 0.5}}, 1, "a title"))
    assert whole_ticks(draw_heat_map({1: torch.tensor([0.5])}))
    assert whole_ticks(draw_participation({1: {0: "finished"}}, 1))


def cells(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_matrix_shows_counts_in_full_and_shares_with_two_digits(tmp_path: Path) -> None:
    counts = torch.tensor([[1234567, 2], [0, 7654321]])
    assert cells(draw_matrix(counts, ("a", "b"), "m")) == ["1234567", "2", "0", "7654321"]
    shares = torch.tensor([[2 / 3, 1 / 3], [float("nan"), 1.0]])
    assert cells(draw_matrix(shares, ("a", "b"), "m")) == ["0.67", "0.33", "nan", "1"]
    write_matrix(counts, ("a", "b"), tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text() == "true class,a,b\na,1234567,2\nb,0,7654321\n"


@pytest.mark.parametrize("size", [3, 10, 20])
def test_the_numbers_of_neighbouring_cells_do_not_overlap(size: int) -> None:
    figure = draw_matrix(torch.full((size, size), 1234567), tuple(f"a long name {k}" for k in range(size)), "m")
    figure.savefig(io.BytesIO())
    boxes = [text.get_window_extent() for text in figure.axes[0].texts[:size]]
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))


def test_a_matrix_that_is_not_classes_by_classes_has_numbered_columns(tmp_path: Path) -> None:
    """Such as the five counts of each class of ``MulticlassStatScores``."""
    matrix = torch.arange(6).reshape(2, 3)
    figure = draw_matrix(matrix, ("a", "b"), "m")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1", "2"]
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("column", "true class")
    write_matrix(matrix, ("a", "b"), tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text() == "true class,0,1,2\na,0,1,2\nb,3,4,5\n"


def test_a_matrix_of_zeros_has_the_colour_of_zero() -> None:
    (image,) = draw_matrix(torch.zeros(2, 2), ("a", "b"), "m").axes[0].images
    assert float(image.norm(0.0)) == 0.0  # type: ignore[arg-type]


def test_the_gallery_shows_an_image_once() -> None:
    """Image 5 was labelled in two steps."""
    labels = [(0.8, 5, 1, 2, True), (0.9, 5, 1, 2, True), (0.7, 6, 0, 2, True), (0.6, 7, 0, 1, False)]
    assert client_pictures._most_confident(labels, 2) == [labels[1], labels[2]]


class LongNames(ToyData):
    """Classes with names as long as those of CIFAR-100."""

    def _load(self) -> Any:
        _, *parts = super()._load()
        return replace(SPEC, class_names=("aquarium_fish", "sweet_pepper", "pickup_truck")), *parts


def test_the_captions_of_neighbouring_images_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(client_pictures, "show_figure", lambda trainer, name, figure: figures.append(figure))
    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[PseudoLabelGallery(1, images=3)])
    trainer.fit(toy_semifl(threshold=1.0), LongNames())
    (figure,) = figures
    figure.savefig(io.BytesIO())
    boxes = [axes.title.get_window_extent() for axes in figure.axes[:3]]
    assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
