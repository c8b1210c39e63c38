"""Local work: the steps that a client or the server makes in one round, and all functions that
build their batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.local_data import LocalData, Span, Visits
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.state import Batch


@dataclass(frozen=True)
class LocalWork:
    """What one party, a client or the server, does in one round: a number of steps, and the batch
    of each.

    Attributes:
        num_samples: Images trained on, the client's usual weight in the average.
        num_steps: Optimizer steps; 0 means that the client skips the round.
        batch: Returns the batch of a step; called for the steps 0, 1, ... in order.
        pseudo_labels: The pseudo-labels of the party's unlabelled images, for diagnostics.
        control_variate: Tensors by the names of the weights, added to the gradient of every step
            after clipping.
        epoch_steps: Steps after which every image has been visited once, for passes over all of the
            data.
        extra_download: Tensors that the client requests from the server after it has seen its
            broadcast. They are loaded into the working module, and counted as downloaded.
        payload: Tensors that ``on_client_end`` finds in the update's payload; they are uploaded
            unless it removes them.
        train: Trains the working module in place of the loop over ``batch``. It is called with the
            number of steps, and with a function to call with the number of each step after it, or
            None.
    """

    num_samples: int
    num_steps: int
    batch: Callable[[int], Batch]
    pseudo_labels: PseudoLabels | None = None
    control_variate: State = field(default_factory=dict)
    epoch_steps: int = 0
    extra_download: State = field(default_factory=dict)
    payload: State = field(default_factory=dict)
    train: Callable[[int, Callable[[int], object] | None], None] | None = None

    def limited(self, max_steps: int | None) -> LocalWork:
        """The same work with at most ``max_steps`` steps; None for no limit."""
        return (
            self if max_steps is None else replace(self, num_steps=min(self.num_steps, max_steps))
        )

    def __iter__(self) -> Iterator[Batch]:
        return map(self.batch, range(self.num_steps))


NO_WORK = LocalWork(0, 0, lambda step: {})
"""The local work of a client that skips the round: no steps."""

MakeBatch = Callable[[Tensor, Visits], Batch]
"""Returns the tensors of rows ``(n,)``; its random numbers belong to the visits of these rows."""


def epochs_of(
    data: LocalData,
    make_batch: MakeBatch,
    order: Callable[[int], Tensor],
    count: int,
    *,
    epochs: float = 0,
    steps: int | None = None,
    batch_size: int = 0,
    pseudo_labels: PseudoLabels | None = None,
) -> LocalWork:
    """Local work on ``count`` images in batches, for a number of epochs or of steps.

    With ``epochs`` the last, shorter batch of an epoch is kept. With ``steps`` batches are full: an
    epoch ends when fewer images are left than a batch, and the next begins (fewer images than one
    batch are all taken).

    Views are computed for several batches, of at most ``data.chunk`` images, in one call and then
    sliced: for some whole epochs, or a part of one.

    Args:
        data: The party's data.
        make_batch: Returns the tensors of a batch.
        order: Returns the rows of an epoch in the order of their visits, ``(count,)``.
        count: Images of an epoch; 0 gives no steps.
        epochs: E; a fraction ends within an epoch, with at least one step.
        steps: T, instead of ``epochs``.
        batch_size: Images per step; ``data.batch_size`` if left out.
        pseudo_labels: See :class:`LocalWork`.
    """
    batch_size = batch_size or data.batch_size
    steps_per_epoch, num_steps = _steps(count, batch_size, epochs, steps)
    visited = min(count, steps_per_epoch * batch_size)
    order = lru_cache(maxsize=1)(order)  # parts of an epoch share it
    chunk = range(0)
    batches = []

    def batch(step: int) -> Batch:
        nonlocal chunk, batches
        if step not in chunk:
            chunk = _chunk_of(step, batch_size, steps_per_epoch, visited, data.chunk)
            # No views that no step needs.
            chunk = range(chunk.start, max(min(chunk.stop, num_steps), step + 1))
            visits = Visits(tuple(_spans(chunk, batch_size, steps_per_epoch, visited)))
            batches = _split(make_batch(visits.select(order), visits), batch_size, visits)
        return batches[step - chunk.start]

    return LocalWork(
        count if num_steps else 0, num_steps, batch, pseudo_labels, epoch_steps=steps_per_epoch
    )


def _chunk_of(step: int, batch_size: int, steps_per_epoch: int, visited: int, chunk: int) -> range:
    """The steps whose views are made with those of a step: some whole epochs, or a part of one."""
    if visited <= chunk:
        size = chunk // visited * steps_per_epoch
        start = step // size * size
        return range(start, start + size)
    size = max(1, chunk // batch_size)
    epoch = step - step % steps_per_epoch
    start = epoch + (step - epoch) // size * size
    return range(start, min(start + size, epoch + steps_per_epoch))


def _spans(chunk: range, batch_size: int, steps_per_epoch: int, visited: int) -> Iterator[Span]:
    """The part of each epoch that the steps of a chunk visit."""
    for epoch in range(chunk.start // steps_per_epoch, (chunk.stop - 1) // steps_per_epoch + 1):
        before = epoch * steps_per_epoch
        start = max(chunk.start - before, 0) * batch_size
        yield Span(epoch, start, min((chunk.stop - before) * batch_size, visited) - start)


def _split(tensors: Batch, batch_size: int, visits: Visits) -> list[Batch]:
    """Consecutive batches of named tensors.

    An epoch may end with a shorter one. They share the tensors' memory.
    """
    sizes = [
        min(batch_size, span.length - place)
        for span in visits.spans
        for place in range(0, span.length, batch_size)
    ]
    # The unsafe split, because a loss may change a batch in place.
    parts = [torch.unsafe_split_with_sizes(t, sizes) for t in tensors.values()]
    return [dict(zip(tensors, batch, strict=True)) for batch in zip(*parts, strict=True)]


def _steps(count: int, batch_size: int, epochs: float, steps: int | None) -> tuple[int, int]:
    """The number of steps of an epoch, and of all epochs."""
    if steps is not None:
        return max(1, count // batch_size), steps if count else 0
    per_epoch = math.ceil(count / batch_size)
    return per_epoch, max(1, math.ceil(_exact(per_epoch * epochs))) if count and epochs > 0 else 0


def _exact(steps: float) -> float:
    """A number of steps without the rounding error of a product: in floating-point numbers 0.07 *
    100 is above 7.
    """
    return round(steps, 9)


def labeled_work(
    data: LocalData,
    epochs: float = 0,
    steps: int | None = None,
    view: Literal["plain", "weak", "strong"] = "weak",
    count: int | None = None,
) -> LocalWork:
    """Epochs, or steps, on the labelled images of a party: batches ``{"x", "y"}``.

    Args:
        data: The party's data.
        epochs: As in :func:`~lightning_fedssl.local_work.epochs_of`.
        steps: As in :func:`~lightning_fedssl.local_work.epochs_of`.
        view: The view of the images.
        count: Images of an epoch, the first in its order; all of them if left out.
    """
    augment = data.weak if view == "weak" else data.strong

    def make_batch(rows: Tensor, visits: Visits) -> Batch:
        images = data.labeled[rows]
        x = data.plain(images) if view == "plain" else augment(images, "labeled", visits=visits)
        y = data.labels[rows]
        return {"x": x, "y": y if view == "plain" else data.target(y, "labeled", visits=visits)}

    order = partial(data.permutation, len(data.labeled), "labeled")
    count = len(data.labeled) if count is None else count
    return epochs_of(data, make_batch, order, count, epochs=epochs, steps=steps)


def local_steps(data: LocalData, epochs: float) -> int:
    """tau_k, the steps of a client: ``floor(max(N_k, M_k) E / B)``, at least 1; 0 for a client
    without images.

    Args:
        data: The client's N_k labelled and M_k unlabelled images, and its batch size B.
        epochs: E, local epochs.
    """
    largest = max(len(data.labeled), len(data.unlabeled))
    return max(1, math.floor(_exact(largest * epochs / data.batch_size))) if largest else 0


def paired_work(
    data: LocalData,
    num_steps: int,
    *,
    unlabeled: Callable[[Tensor, Tensor], Batch] | None,
    pseudo_labels: PseudoLabels | None = None,
    control_variate: State | None = None,
) -> LocalWork:
    """Steps on a labelled batch ``x``, ``y`` and an unlabelled batch ``u``, both drawn
    independently at every step.

    A batch is drawn uniformly without replacement. A client with fewer images of a kind than a
    batch takes all of them. Without images of one kind its batches lack their tensors, and without
    any images it makes no step. All views are weak.

    Args:
        data: The client's data.
        num_steps: tau_k.
        unlabeled: Returns further tensors ``(n, ...)`` of a batch, from the indices of ``u`` among
            the client's unlabelled images ``(n,)`` and the step of each ``(n,)``. None leaves
            unlabelled images out.
        pseudo_labels: See :class:`LocalWork`.
        control_variate: See :class:`LocalWork`.
    """
    rows_x = _draw(data, len(data.labeled), num_steps, "labeled rows")
    rows_u = _draw(data, len(data.unlabeled) if unlabeled else 0, num_steps, "unlabeled rows")

    def labeled_batch(rows: Tensor, visits: Visits) -> Batch:
        start = visits.spans[0].start
        x = data.weak(data.labeled[rows], "labeled", start=start)
        return {"x": x, "y": data.target(data.labels[rows], "labeled", start=start)}

    def unlabeled_batch(rows: Tensor, visits: Visits) -> Batch:
        start = visits.spans[0].start
        positions = torch.arange(start, start + len(rows), device=rows.device)
        further = unlabeled(rows, positions // rows_u.shape[1]) if unlabeled else {}
        return {"u": data.weak(data.unlabeled[rows], "unlabeled", start=start), **further}

    work = side_by_side(
        one_pass(data, labeled_batch, rows_x.flatten(), rows_x.shape[1]),
        one_pass(data, unlabeled_batch, rows_u.flatten(), rows_u.shape[1]),
    )
    return replace(
        work,
        num_samples=len(data.labeled) + len(data.unlabeled),
        epoch_steps=0,
        pseudo_labels=pseudo_labels,
        control_variate=control_variate or {},
    )


def one_pass(
    data: LocalData, make_batch: MakeBatch, rows: Tensor, batch_size: int = 0
) -> LocalWork:
    """One pass over rows in their order.

    Args:
        data: The party's data.
        make_batch: Returns the tensors of a batch.
        rows: ``(n,)``; none give no steps.
        batch_size: Images per step; ``data.batch_size`` if left out.
    """
    return epochs_of(data, make_batch, lambda _: rows, len(rows), epochs=1, batch_size=batch_size)


def unlabeled_work(
    data: LocalData,
    *,
    epochs: float = 0,
    steps: int | None = None,
    strong: bool = True,
    batch_size: int = 0,
    pseudo_labels: PseudoLabels | None = None,
    shift: Tensor | None = None,
) -> LocalWork:
    """Epochs, or steps, on the unlabelled images of a party: batches ``{"x_weak", "x_strong"}`` of
    the same images.

    Args:
        data: The party's data.
        epochs: As in :func:`~lightning_fedssl.local_work.epochs_of`.
        steps: As in :func:`~lightning_fedssl.local_work.epochs_of`.
        strong: Whether a batch has a strong view.
        batch_size: Images per step; the party's batch size if left out.
        pseudo_labels: See :class:`LocalWork`.
        shift: What is added to logits before they become labels, ``(classes,)``; batches have it
            for each image as ``shift``.
    """

    def make_batch(rows: Tensor, visits: Visits) -> Batch:
        x = data.unlabeled[rows]
        batch = {"x_weak": data.weak(x, "weak", visits=visits)}
        if shift is not None:
            batch["shift"] = shift.expand(len(rows), -1)
        return batch | ({"x_strong": data.strong(x, "strong", visits=visits)} if strong else {})

    count = len(data.unlabeled)
    return epochs_of(
        data,
        make_batch,
        partial(data.permutation, count, "unlabeled"),
        count,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        pseudo_labels=pseudo_labels,
    )


def side_by_side(a: LocalWork, b: LocalWork) -> LocalWork:
    """Combine two local works: each batch has the tensors of both. If one of them has no steps, the
    other is returned.

    The result has the control variates, extra downloads and payloads of both; where both have a
    name, that of ``a``.

    Args:
        a: Sets the number of steps.
        b: Has as many steps, and other names in its batches.
    """
    if not a.num_steps or not b.num_steps:
        return a if a.num_steps else b
    return LocalWork(
        a.num_samples + b.num_samples,
        a.num_steps,
        lambda step: {**a.batch(step), **b.batch(step)},
        a.pseudo_labels or b.pseudo_labels,
        control_variate={**b.control_variate, **a.control_variate},
        epoch_steps=max(a.epoch_steps, b.epoch_steps),
        extra_download={**b.extra_download, **a.extra_download},
        payload={**b.payload, **a.payload},
    )


def _draw(data: LocalData, count: int, num_steps: int, purpose: str) -> Tensor:
    """Draw the rows of the batch of every step, ``(num_steps, at most batch_size)`` int64."""
    generator = data.rng(purpose)
    size = min(count, data.batch_size)
    rows = torch.empty((num_steps, size), dtype=torch.int64)
    if size:
        for step in range(num_steps):
            rows[step] = torch.from_numpy(
                generator.choice(count, size, replace=False, shuffle=False)
            )
    return rows.to(data.images.device, non_blocking=True)


def infinite_shuffle(data: LocalData, first: int, count: int) -> Tensor:
    """A part of a client's endless sequence of shuffled passes over its unlabelled images,
    ``(count,)``.

    The sequence does not depend on the round, so a client that resumes where it stopped visits
    every image equally often. A batch may span the end of one pass and the beginning of the next.

    Args:
        data: The client's data.
        first: The number of images visited before.
        count: The number of images to visit.
    """
    size = len(data.unlabeled)
    passes = range(first // size, -(-(first + count) // size))
    orders = [
        sampling.permutation(size, data.seed, "endless", data.party, number) for number in passes
    ]
    rows = torch.cat(orders)[first % size :][:count]
    return rows.to(data.images.device, non_blocking=True)
