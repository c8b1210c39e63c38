"""Batches of a party's steps: views of several epochs, made in one call, are those made epoch by epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_fedssl.data import local_data
from lightning_fedssl.data.local_data import CHUNK, DEVICE_CHUNK, LocalData, Visits
from lightning_fedssl.local_work import LocalWork, epochs_of, labeled_work, local_steps, paired_work, side_by_side
from lightning_fedssl.state import Batch
from tests.toy import ToyData


def party() -> LocalData:
    data = ToyData(num_labels="all", label_location="clients", validation=0, client_batch_size=7)
    data.setup("fit")
    return data.local_data(1, 3)


def views(data: LocalData, count: int, batch_size: int, calls: list[int], **length: float) -> LocalWork:
    """Work in which the views of ``count`` visits an epoch are made from the images of the party, in turns."""

    def make_batch(rows: Tensor, visits: Visits) -> Batch:
        calls.append(len(rows))
        images = data.labeled[rows % len(data.labeled)]
        places = visits.select(lambda epoch: torch.arange(count) + 1000 * epoch)
        return {"x": data.weak(images, "views", 5, visits=visits), "rows": rows, "places": places}

    def order(epoch: int) -> Tensor:
        return data.permutation(count, "order", epoch)

    return epochs_of(data, make_batch, order, count, batch_size=batch_size, **length)  # type: ignore[arg-type]


def epoch_by_epoch(data: LocalData, count: int, batch_size: int, length: int, whole_batches: bool) -> list[Batch]:
    """The same batches as a reader of the documentation would make them: one epoch after the other."""
    batches: list[Batch] = []
    epoch = 0
    while len(batches) < length:
        rows = data.permutation(count, "order", epoch)
        x = data.weak(data.labeled[rows % len(data.labeled)], "views", 5, epoch)
        for start in range(0, count, batch_size):
            here = slice(start, start + batch_size)
            if whole_batches and start and start + batch_size > count:
                break
            places = torch.arange(count)[here] + 1000 * epoch
            batches.append({"x": x[here], "rows": rows[here], "places": places})
        epoch += 1
    return batches[:length]


@pytest.mark.parametrize("count", [1, 7, 27, 256, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("batch_size", [4, 10])
@pytest.mark.parametrize("length", [{"epochs": 3}, {"epochs": 2.3}, {"steps": 70}])
def test_batches_are_those_of_one_epoch_after_the_other(count: int, batch_size: int, length: dict[str, float]) -> None:
    data, calls = party(), list[int]()
    work = views(data, count, batch_size, calls, **length)
    expected = epoch_by_epoch(data, count, batch_size, work.num_steps, "steps" in length)
    batches = list(work)
    assert [len(batch["x"]) for batch in batches] == [len(batch["x"]) for batch in expected]
    for name in ("x", "rows", "places"):
        assert torch.equal(torch.cat([b[name] for b in batches]), torch.cat([b[name] for b in expected])), name
    assert sum(calls) == sum(len(batch["x"]) for batch in expected)
    assert max(calls) <= CHUNK


@pytest.mark.parametrize(
    ("device", "side", "chunk"), [("cpu", 8, CHUNK), ("cpu", 224, 111), ("meta", 8, DEVICE_CHUNK), ("meta", 32, 5461)]
)
def test_views_are_made_in_calls_that_suit_the_device(device: str, side: int, chunk: int) -> None:
    assert replace(party(), images=torch.zeros(1, 3, side, side, device=device)).chunk == chunk


def test_paired_batches_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of several chunks are those of one: no view is made again from the numbers of an earlier chunk."""

    def batches(chunk: int) -> list[Batch]:
        monkeypatch.setattr(local_data, "CHUNK", chunk)
        unlabeled = replace(party(), unlabeled=party().labeled)
        work = paired_work(unlabeled, 9, unlabeled=lambda rows, steps: {"steps": steps})
        return list(work)

    whole, parts = batches(10**4), batches(16)  # 9 batches of 7 in one chunk, and two in each
    for name in ("x", "y", "u", "steps"):
        assert torch.equal(torch.cat([b[name] for b in whole]), torch.cat([b[name] for b in parts])), name
    assert not torch.equal(parts[0]["x"], parts[2]["x"])


def test_epochs_of_few_images_share_a_call() -> None:
    calls: list[int] = []
    list(views(party(), 27, 10, calls, epochs=25))
    assert calls == [18 * 27, 7 * 27]


def test_views_are_made_for_the_steps_of_a_round_alone() -> None:
    data, calls = party(), list[int]()
    work = views(data, 500, 5, calls, steps=3)
    assert [len(batch["x"]) for batch in work] == [5] * 3
    assert calls == [15]
    assert torch.equal(work.batch(100)["places"], torch.arange(1000, 1005))


def test_a_step_may_be_asked_for_again() -> None:
    work = labeled_work(party(), epochs=3)
    first = [{name: t.clone() for name, t in batch.items()} for batch in work]
    for step in (0, work.num_steps - 1, 1):
        assert all(torch.equal(t, first[step][name]) for name, t in work.batch(step).items())


def test_two_works_side_by_side_keep_what_each_of_them_exchanges() -> None:
    """Names of both; a name that both have is that of the first."""
    one, two = torch.ones(1), torch.full((1,), 2.0)
    a = LocalWork(3, 2, lambda step: {"x": one}, control_variate={"w": one}, payload={"p": one})
    b = LocalWork(4, 2, lambda step: {"u": two}, extra_download={"d": two}, payload={"p": two, "q": two})
    work = side_by_side(a, b)
    assert (work.num_samples, work.num_steps, work.batch(1)) == (7, 2, {"x": one, "u": two})
    assert work.control_variate == {"w": one}
    assert work.extra_download == {"d": two}
    assert work.payload == {"p": one, "q": two}


@pytest.mark.parametrize(
    ("images", "epochs", "up", "down"), [(100, 0.07, 7, 7), (100, 0.29, 29, 29), (3, 0.5, 2, 1), (2, 1.5, 3, 3)]
)
def test_the_rounding_error_of_a_product_changes_no_number_of_steps(
    images: int, epochs: float, up: int, down: int
) -> None:
    """With one image a step. In floating-point numbers 0.07 * 100 is above 7, and 0.29 * 100 is below 29."""
    nothing = torch.zeros(0, dtype=torch.int64)
    data = replace(party(), batch_size=1, labeled=torch.zeros(images, dtype=torch.int64), unlabeled=nothing)
    assert labeled_work(data, epochs=epochs).num_steps == up
    assert local_steps(data, epochs) == down
