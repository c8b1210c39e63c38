"""``trainer.share_server_steps``: ranks divide the server's batches, and reach the weights of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_fedssl.algorithm import mean_over_images, unmarked_losses
from lightning_fedssl.algorithms import FixMatch, SemiFL
from lightning_fedssl.functional.batch_norm import batch_moments, by_position, in_order_of_batches
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.local_training.shared_steps import refuse_unshareable
from lightning_fedssl.models import CNN
from lightning_fedssl.state import Batch
from tests.test_fedmatch import toy_fedmatch
from tests.test_fedswitch import ByNumber, toy_fedswitch
from tests.test_resume import METHODS
from tests.test_semi_sfl import toy_semi_sfl
from tests.test_uda import toy_uda
from tests.toy import ToyData, forked, sgd, toy_semifl, toy_trainer, weights


class DropsAndCounts(nn.Sequential):
    """A network with dropout and with batch norms that have running statistics, one of them over vectors."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(4, 3, 3),
            nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Dropout(), nn.Linear(48, 6), nn.BatchNorm1d(6),
            nn.Linear(6, 3),
        )  # fmt: skip


class Records(SemiFL):
    """Logs the number of images of every step of the server, which is averaged over steps and ranks."""

    @mean_over_images
    def server_training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor | None:
        self.log("server/rows", float(len(batch["x"])))
        return super().server_training_step(batch, batch_idx)


def run(tmp_path: Path, ranks: int, make: Any, size: int = 7, **kwargs: Any) -> tuple[dict[str, torch.Tensor], Any]:
    algorithm = make()
    settings = {"max_rounds": 1, "precision": "64-true", "share_server_steps": True, **forked(ranks)} | kwargs
    trainer = toy_trainer(tmp_path / f"{ranks}", logger=False, **settings)
    trainer.fit(algorithm, ToyData(server_batch_size=size))  # of 12 images: the last batch of an epoch is shorter
    return weights(algorithm), trainer.callback_metrics


@pytest.mark.parametrize(
    ("make", "ranks", "size"),
    [
        (toy_semifl, 2, 7),
        (partial(toy_semifl, network=partial(CNN, width=4, norm="group"), gradient_clip_norm=0.1), 3, 11),
        (partial(toy_semifl, network=DropsAndCounts), 2, 7),
        (toy_fedmatch, 2, 7),
        (partial(toy_fedswitch, ByNumber), 2, 7),  # the server's teacher follows every step
        (METHODS["semifl_paper"][0], 2, 7),
        (METHODS["fixmatch"][0], 2, 7),
        (METHODS["supervised"][0], 3, 7),
    ],
)
def test_ranks_share_the_servers_batches(tmp_path: Path, make: Any, ranks: int, size: int) -> None:
    alone, metrics = run(tmp_path, 1, make, size)
    together, metrics_together = run(tmp_path, ranks, make, size)
    assert alone.keys() == together.keys()
    for name in alone:
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=1e-10)
    torch.testing.assert_close(metrics_together["server/loss"], metrics["server/loss"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("share", "rows"), [(True, 3), (False, 6)])
def test_a_rank_computes_its_part_of_each_batch(tmp_path: Path, share: bool, rows: float) -> None:
    network = partial(CNN, width=4, norm="static_batch")
    make = partial(Records, network=network, threshold=0.4, client_epochs=1, server_epochs=1)
    _, metrics = run(tmp_path, 2, make, share_server_steps=share, precision="bf16-mixed")  # batches of 7 and 5
    assert metrics["server/rows"] == rows


def test_statistics_are_measured_by_all_ranks_and_equal_to_the_bit() -> None:
    torch.manual_seed(0)
    norm, batches = nn.BatchNorm2d(2), [torch.randn(3, 2, 4, 4) for _ in range(5)]
    network = nn.Sequential(nn.Conv2d(2, 2, 1), norm, nn.ReLU(), norm, nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    whole = batch_moments(network, batches)
    for ranks in (2, 3, 7):  # with seven, two ranks have no batch
        parts = [batches[rank::ranks] for rank in range(ranks)]
        measured = [(len(part), by_position(batch_moments(network, part))) for part in parts]
        ordered = in_order_of_batches(measured)
        assert {name: len(found) for name, found in ordered.items()} == {"1": 10, "5": 5}
        for name, found in ordered.items():
            for a, b in zip(found, whole[name], strict=True):
                assert a.count == b.count
                assert torch.equal(a.mean, b.mean)
                assert torch.equal(a.variance, b.variance)


class SkipsSmallShares(SemiFL):
    """Has no loss for a single image."""

    @mean_over_images
    def server_training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor | None:
        return super().server_training_step(batch, batch_idx) if len(batch["x"]) > 1 else None


def test_a_step_that_skips_one_rank_s_share_ends_the_run(tmp_path: Path) -> None:
    """The other rank would otherwise wait for ever: of three images, the first rank has one."""
    with pytest.raises(ProcessRaisedException, match=r"server_training_step returned None for 1 of the 3 images"):
        run(tmp_path, 2, partial(SkipsSmallShares, network=partial(CNN, width=4, norm="none"), optimizer=sgd), size=3)


class ByBrightness(nn.Module):
    """One layer for dark images, one for bright ones, and one that no image needs."""

    def __init__(self) -> None:
        super().__init__()
        self.dark, self.bright, self.unused = (nn.Linear(64, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        bright, logits = flat[:, 27] > -1, flat.new_zeros(len(flat), 3)
        for rows, layer in ((bright, self.bright), (~bright, self.dark)):
            if rows.any():
                logits = logits.index_put((rows,), layer(flat[rows]))
        return logits


def test_a_weight_that_only_one_rank_s_images_need_moves_as_on_one_rank(tmp_path: Path) -> None:
    """Of two images, each rank has one. A weight that no image needs has no gradient, so nothing decays it."""
    make = partial(toy_semifl, network=ByBrightness, optimizer=partial(torch.optim.SGD, lr=0.1, weight_decay=0.1))
    (alone, _), (shared, _) = (run(tmp_path, ranks, make, size=2) for ranks in (1, 2))
    for name, weight in alone.items():
        torch.testing.assert_close(shared[name], weight, rtol=1e-9, atol=1e-9)
    later, _ = run(tmp_path, 2, make, size=2, max_rounds=2)
    moved = {name for name, weight in later.items() if not torch.equal(weight, shared[name])}
    assert moved == {f"network.{layer}.{kind}" for layer in ("dark", "bright") for kind in ("weight", "bias")}


@pytest.mark.parametrize(("make", "name"), [(toy_semi_sfl, "SemiSFL"), (toy_uda, "UDA")])
def test_a_loss_that_is_no_mean_over_images_is_refused(tmp_path: Path, make: Any, name: str) -> None:
    """UDA's is a mean over the images below its threshold, of which every rank may have another number."""
    with pytest.raises(ValueError, match=rf"trainer.share_server_steps: {name}\..* leave the key out"):
        run(tmp_path, 1, make)


class OwnLabeledLoss(FixMatch):
    """Another loss on labelled images, which FixMatch's marked step at the server calls."""

    def labeled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.std() * super().labeled_loss(logits, labels)


class OwnLabel(FixMatch):
    """Other pseudo-labels, which the server does not use."""

    def label(self, logits: Tensor) -> PseudoLabels:
        return super().label(2 * logits)


class OwnMark(OwnLabeledLoss):
    """Says that it is a mean all the same."""

    @mean_over_images
    def labeled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().labeled_loss(logits, labels)


@pytest.mark.parametrize(("method", "part"), [(OwnLabeledLoss, "labeled_loss"), (OwnLabel, None), (OwnMark, None)])
def test_a_subclass_that_overrides_a_marked_loss_loses_the_mark(method: Any, part: str | None) -> None:
    algorithm = method(network=CNN)
    if part is None:
        refuse_unshareable(algorithm)
        return
    with pytest.raises(ValueError, match=rf"trainer\.share_server_steps: {method.__name__}\.{part} is not marked"):
        refuse_unshareable(algorithm)


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_whose_servers_loss_is_no_mean_over_images(method: str) -> None:
    unmarked = unmarked_losses(type(METHODS[method][0]()))
    assert bool(unmarked) == method.startswith(("semi_sfl", "uda", "fedswitch_sl"))


def test_a_compiled_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.share_server_steps needs a network that is not compiled"):
        run(tmp_path, 1, toy_semifl, compile=True)
