"""What clients with labelled and unlabelled images do in a round: steps on a batch of each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.state import CHUNK, Batch, LocalWork, epochs_of

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

RampShape = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Ramp:
    """The weight alpha_0 of the unlabelled loss, which grows from 0 to its final value over the first local epochs.

    Args:
        final: The final value.
        epochs: Local epochs until it is reached; 0 for the final value from the start.
        shape: ``linear``, or ``exponential``: ``exp(-5 (1 - x)^2)`` at the fraction x of the way.
        every_step: Grow at every step instead of once an epoch.
        start: Local epochs that count as done before the first step.
    """

    final: float = 1.0
    epochs: float = 50.0
    shape: RampShape = "linear"
    every_step: bool = False
    start: float = 0.0

    def values(self, round_index: int, local_epochs: float, num_steps: int) -> Tensor:
        """The weight at every step of a round: ``(num_steps,)`` float64.

        Args:
            round_index: The round, from 1.
            local_epochs: E, epochs of a round.
            num_steps: tau_k, steps of the client in this round.
        """
        if self.epochs == 0:
            return torch.full((num_steps,), self.final, dtype=torch.float64)
        inside = torch.arange(num_steps, dtype=torch.float64) * local_epochs / max(num_steps, 1)
        done = self.start + (round_index - 1) * local_epochs + (inside if self.every_step else inside.floor())
        x = (done / self.epochs).clamp(max=1.0)
        return self.final * (x if self.shape == "linear" else torch.exp(-5 * (1 - x) ** 2))


def plain_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Fed-SHVR's optimizer where none is named: SGD at rate 0.01 without momentum (Eq. 16)."""
    return torch.optim.SGD(parameters, lr=0.01)


class PairedBatches(FederatedAlgorithm, ABC):
    """Methods whose clients add a loss on unlabelled images to the cross-entropy of labelled ones.

    A client without images of one kind drops the terms it has none for.

    Args:
        alpha0: Final value of alpha_0, the weight of the unlabelled loss.
        ramp_epochs: Local epochs over which alpha_0 grows from 0; 0 for its final value from the start.
        ramp_shape: ``linear``, or ``exponential``: ``exp(-5 (1 - x)^2)``.
        optimizer: The optimizer of a client's steps.
        client_epochs: E.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(
        self,
        alpha0: float = 1.0,
        ramp_epochs: float = 50,
        ramp_shape: RampShape = "linear",
        optimizer: OptimizerCallable = plain_sgd,
        client_epochs: float = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer=optimizer, client_epochs=client_epochs, **kwargs)
        for name, value in {"alpha0": alpha0, "ramp_epochs": ramp_epochs}.items():
            if not value >= 0:
                raise ValueError(f"model.{name} is {value}: give 0 or more")
        self.ramp = Ramp(alpha0, ramp_epochs, ramp_shape)

    def configure_callbacks(self) -> list[Callback]:
        """The spread of tau_k."""
        from lightning_fedssl.callbacks import LocalSteps

        return [LocalSteps()]

    def check_data(self, data: FederatedDataModule) -> None:
        """Labels must be at the clients, and every client needs an image."""
        check_labeled_clients(data, type(self).__name__)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Draw tau_k batches of labelled and unlabelled images."""
        steps = local_steps(data, self.client_epochs)
        weight = self.ramp.values(data.round, self.client_epochs, steps).to(data.images.device, data.dtype)
        return paired_work(data, steps, unlabeled=lambda _, step: {"alpha0": weight[step]})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Cross-entropy of the labelled images and the method's terms of the unlabelled ones, in one pass."""
        logits = self(torch.cat([batch[name] for name in ("x", "u") if name in batch]))
        count = len(batch["y"]) if "y" in batch else 0
        terms = [F.cross_entropy(logits[:count], batch["y"])] if count else []
        if "u" in batch:
            terms += self.unlabeled_terms(logits[count:], batch)
        return sum(terms[1:], start=terms[0])

    @abstractmethod
    def unlabeled_terms(self, logits: Tensor, batch: Batch) -> list[Tensor]:
        """Terms of the loss, at least one.

        Args:
            logits: Of the unlabelled images, ``(unlabelled, classes)``.
            batch: The batch, with ``alpha0``, the weight of each image: ``(unlabelled,)``.
        """


def local_steps(data: LocalData, epochs: float, of: Literal["larger", "labeled"] = "larger") -> int:
    """tau_k, the steps of a client: ``floor(max(N_k, M_k) E / B)``, at least 1; 0 for a client without images.

    Args:
        data: The client's N_k labelled and M_k unlabelled images, and its batch size B.
        epochs: E, local epochs.
        of: ``labeled`` counts the labelled images alone.
    """
    largest = max(len(data.labeled), len(data.unlabeled) if of == "larger" else 0)
    return max(1, math.floor(largest * epochs / data.batch_size)) if largest else 0


def paired_work(
    data: LocalData,
    num_steps: int,
    *,
    unlabeled: Callable[[Tensor, Tensor], Batch] | None,
    pseudo_labels: PseudoLabels | None = None,
    correction: State | None = None,
) -> LocalWork:
    """Steps on a labelled batch ``x``, ``y`` and an unlabelled batch ``u`` each, drawn anew for every step.

    A batch is drawn uniformly without replacement; one step's draw does not depend on another's. A client with fewer
    images of a kind than a batch takes all of them; with none, its batches lack that part. Views are the weak ones.

    Args:
        data: The client's data.
        num_steps: tau_k.
        unlabeled: Gives what goes beside ``u``, as tensors ``(n, ...)``, from the images' places among the client's
            unlabelled ones ``(n,)`` and the steps they belong to ``(n,)``. None leaves unlabelled images out.
        pseudo_labels: Passed on.
        correction: Passed on.
    """
    rows_x = _draw(data, len(data.labeled), num_steps, "labeled rows")
    rows_u = _draw(data, len(data.unlabeled) if unlabeled else 0, num_steps, "unlabeled rows")
    steps_per_chunk = max(1, CHUNK // data.batch_size)
    made = -1
    parts: list[tuple[int, Batch]] = []

    def part(rows: Tensor, chunk: int, make: Callable[[Tensor, Tensor, int], Batch]) -> tuple[int, Batch]:
        first, width = chunk * steps_per_chunk, rows.shape[1]
        chosen = rows[first : first + steps_per_chunk]
        steps = torch.arange(first, first + len(chosen), device=rows.device).repeat_interleave(width)
        return width, make(chosen.flatten(), steps, first * width) if width else {}

    def labeled_part(rows: Tensor, steps: Tensor, start: int) -> Batch:
        return {"x": data.weak(data.labeled[rows], "labeled", start=start), "y": data.labels[rows]}

    def unlabeled_part(rows: Tensor, steps: Tensor, start: int) -> Batch:
        beside = unlabeled(rows, steps) if unlabeled else {}
        return {"u": data.weak(data.unlabeled[rows], "unlabeled", start=start), **beside}

    def batch(step: int) -> Batch:
        nonlocal made, parts
        chunk, place = divmod(step, steps_per_chunk)
        if chunk != made:
            parts = [part(rows_x, chunk, labeled_part), part(rows_u, chunk, unlabeled_part)]
            made = chunk
        return {name: t[place * width : (place + 1) * width] for width, tensors in parts for name, t in tensors.items()}

    count = len(data.labeled) + len(data.unlabeled)
    return LocalWork(count, num_steps, batch, pseudo_labels, correction or {})


def unlabeled_work(
    data: LocalData,
    *,
    epochs: float = 0,
    steps: int | None = None,
    strong: bool = True,
    batch_size: int | None = None,
    pseudo_labels: PseudoLabels | None = None,
) -> LocalWork:
    """Epochs, or steps, over a party's unlabelled images: batches ``{"x_weak", "x_strong"}`` of the same images.

    Args:
        data: The party's data.
        epochs: As in :func:`~lightning_fedssl.state.epochs_of`.
        steps: As there.
        strong: Whether there is a strong view.
        batch_size: Images per step; the party's batch size if left out.
        pseudo_labels: Passed on.
    """

    def make_batch(rows: Tensor, epoch: int, start: int) -> Batch:
        x = data.unlabeled[rows]
        batch = {"x_weak": data.weak(x, "weak", epoch, start=start)}
        return batch | ({"x_strong": data.strong(x, "strong", epoch, start=start)} if strong else {})

    def order(epoch: int) -> Tensor:
        return data.permutation(len(data.unlabeled), "unlabeled", epoch)

    size, count = batch_size or data.batch_size, len(data.unlabeled)
    return epochs_of(
        make_batch, order, count=count, batch_size=size, epochs=epochs, steps=steps, pseudo_labels=pseudo_labels
    )


def side_by_side(a: LocalWork, b: LocalWork) -> LocalWork:
    """Batches of both at every step; of one alone if the other has none.

    Args:
        a: Gives the number of steps.
        b: As many steps, and other names in its batches.
    """
    if not a.num_steps or not b.num_steps:
        return a if a.num_steps else b
    return LocalWork(
        a.num_samples + b.num_samples,
        a.num_steps,
        lambda step: {**a.batch(step), **b.batch(step)},
        a.pseudo_labels or b.pseudo_labels,
        epoch_steps=max(a.epoch_steps, b.epoch_steps),
    )


def _draw(data: LocalData, count: int, num_steps: int, purpose: str) -> Tensor:
    """Rows of every step's batch, ``(num_steps, at most batch_size)`` int64."""
    generator, size = data.rng(purpose), min(count, data.batch_size)
    rows = torch.empty((num_steps, size), dtype=torch.int64)
    if size:
        for step in range(num_steps):
            rows[step] = torch.from_numpy(generator.choice(count, size, replace=False, shuffle=False))
    return rows.to(data.images.device)


def check_labeled_clients(data: FederatedDataModule, method: str) -> None:
    """Refuse data whose labels are not at the clients, and clients without any image.

    Args:
        data: The data.
        method: Who asks.

    Raises:
        ValueError: With the key to change.
    """
    if data.label_location != "clients":
        raise ValueError(f"{method} trains clients on labels of their own: set data.label_location to clients")
    empty = [k for k, part in enumerate(data.split.clients) if not len(part.labeled) + len(part.unlabeled)]
    if empty:
        raise ValueError(
            f"{method}: client {empty[0]} has no image ({len(empty)} such clients): lower data.num_clients or choose "
            "another data.partition"
        )
