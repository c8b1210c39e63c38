"""Watches one client train: finds the first number that is not finite, and describes the steps until then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.state import Batch
from lightning_fedssl.trainer_interface import TrainerInterface

_HIDDEN = (str(Path(torch.__file__).parent), __file__)
"""Folders whose code is not reported as the source line of an operation."""

_SHOWN = 5
"""The largest number of steps at each end of a table, and of image indices in a line."""


@dataclass
class WatchedStep:
    """What a client computed at a step.

    Attributes:
        step: The step, from 0.
        loss: The loss; None in split learning, where the server computes it.
        gradient_norm: The L2 norm of the gradient before clipping; None in split learning.
        movement: The L2 norm of the movement of the weights since the client's start; None in split learning.
        batch: The range and mean of each tensor of the batch, in words.
    """

    step: int
    loss: float | None
    gradient_norm: float | None
    movement: float | None
    batch: str


@dataclass
class ReplayReport:
    """The behaviour of a client in a round that was trained again.

    Attributes:
        round: The round.
        client: The client.
        first: The source of the first number that is not finite, as text; None if all were finite.
        outcome: The outcome for the update, as text.
        steps: The client's steps.
    """

    round: int
    client: int
    first: str | None = None
    outcome: str = "the client made no step, so it sent no update"
    steps: list[WatchedStep] = field(default_factory=list)

    def __str__(self) -> str:
        """The report as text, with a table of the steps."""
        rows = [("step", "loss", "gradient norm", "movement", "batch")]
        shown = self.steps if len(self.steps) <= 2 * _SHOWN else [*self.steps[:_SHOWN], *self.steps[-_SHOWN:]]
        rows += [(str(s.step), *map(_number, (s.loss, s.gradient_norm, s.movement)), s.batch) for s in shown]  # type: ignore[misc]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        table = ["  ".join([*map(str.rjust, row[:4], widths), row[4]]) for row in rows]
        head = f"client {self.client} in round {self.round}, trained again: {len(self.steps)} steps"
        first = self.first or "none; all numbers were finite"
        return "\n".join([head, *table, f"first number that is not finite: {first}", f"result: {self.outcome}"])

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return asdict(self)


class NumberWatch(FederatedCallback):
    """Looks at every number that one client computes: batches, weights, results of operations, loss and gradients.

    An operation may give an infinite number on purpose, such as the logarithm of 0 under a mask. So an operation that
    gave one in a step that ended well is no suspect later.

    Args:
        report: What is found is added to it.
    """

    def __init__(self, report: ReplayReport) -> None:
        self.report = report
        self._broken = False
        self._suspects: dict[str, str] = {}
        self._harmless: set[str] = set()
        self._layers: list[str] = []
        self._computing = False
        self._batch: Batch | None = None
        self._start: State = {}
        self._squares: list[Tensor] = []

    @contextmanager
    def watching(self, algorithm: FederatedAlgorithm) -> Iterator[None]:
        """Inside this context the training of the client is watched; other clients train as usual."""
        with ExitStack() as stack:
            for name, module in algorithm.named_modules():
                if name:
                    stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                    stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            for name, parameter in algorithm.named_parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(self._gradient_of(name)).remove)
            for name, watched in (
                ("on_client_start", self._preparing),
                ("training_step", self._computed_by),
                ("client_features", self._computed_by),
            ):
                if hasattr(algorithm, name):
                    vars(algorithm)[name] = watched(getattr(algorithm, name))
                    stack.callback(vars(algorithm).pop, name)
            yield
            self._end_step()

    def on_client_start(
        self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, data: LocalData, work: LocalWork
    ) -> None:
        """Store the client's initial weights."""
        if data.party == self.report.client:
            self._start = {name: p.detach().clone() for name, p in algorithm.named_parameters()}

    def on_client_batch_end(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, step: int) -> None:
        """Check the weights after a step; in split learning the working module does not have the client's weights."""
        if self._batch is None or not self._squares:
            return
        now = self.report.steps[-1]
        weights = {name: p.detach() for name, p in algorithm.named_parameters()}
        now.movement = float(
            torch.stack([(t - self._start[name]).double().norm() for name, t in weights.items()]).norm()
        )
        now.gradient_norm = float(torch.stack(self._squares).sum().sqrt())
        for name, t in weights.items():
            if _is_bad(t):
                self._note(f"weight {name}", f"the weight {name} after the optimizer's step", broken=True)
        self._end_step()

    # What the client computes.

    def _preparing(self, original: Callable[[LocalData], LocalWork]) -> Callable[[LocalData], LocalWork]:
        def on_client_start(data: LocalData) -> LocalWork:
            work = original(data)
            if data.party != self.report.client:
                return work
            return replace(work, batch=lambda step: self._begin_step(work.batch(step), step))

        return on_client_start

    def _begin_step(self, batch: Batch, step: int) -> Batch:
        self._end_step()
        self._batch = batch
        described = [_described(name, t) for name, t in batch.items() if t.is_floating_point()]
        self.report.steps.append(WatchedStep(step, None, None, None, "; ".join(described)))
        for name, t in batch.items():
            if _is_bad(t):
                self._note(f"batch {name}", _bad_rows(name, t, batch.get("index")), broken=True)
        return batch

    def _end_step(self) -> None:
        """The cause of a failed step is the first of its suspected operations."""
        if self._broken and self.report.first is None:
            suspects = [text for place, text in self._suspects.items() if place not in self._harmless]
            self.report.first = f"step {self.report.steps[-1].step}, {suspects[0]}" if suspects else "not found"
        elif not self._broken:
            self._harmless |= self._suspects.keys()
        self._broken, self._batch = False, None
        self._suspects, self._squares = {}, []

    def _computed_by(self, original: Callable[[Batch, int], Any]) -> Callable[[Batch, int], Any]:
        def compute(batch: Batch, step: int) -> Any:
            if batch is not self._batch:
                return original(batch, step)
            self._computing = True
            try:
                with _Operations(self._operated):
                    computed = original(batch, step)
            finally:
                self._computing = False
            if isinstance(computed, Tensor):
                self.report.steps[-1].loss = float(computed.detach())
            for name, t in computed.items() if isinstance(computed, dict) else [("loss", computed)]:
                if isinstance(t, Tensor) and _is_bad(t):
                    self._note(f"result {name}", f"the {name} of {original.__name__}", broken=True)
            return computed

        return compute

    def _operated(self, function: Callable[..., Any], result: Any) -> None:
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor) and _is_bad(t):
                name, line = resolve_name(function) or getattr(function, "__name__", "an operation"), _line()
                layer = f" in the layer {self._layers[-1]}" if self._layers else ""
                self._note(f"{name} {layer} {line}", f"{name}{layer} ({line}), from numbers that were finite")
                return

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            self._layers.append(name)
            if self._computing:
                for own, parameter in module.named_parameters(recurse=False):
                    if _is_bad(parameter):
                        self._note(f"start {name}.{own}", f"the weight {name}.{own} before the step", broken=True)

        return enter

    def _leaving(self, module: nn.Module, arguments: Any, result: Any) -> None:
        self._layers.pop()

    def _gradient_of(self, name: str) -> Callable[[Tensor], None]:
        def received(gradient: Tensor) -> None:
            if self._batch is not None:
                self._squares.append(gradient.detach().double().square().sum())
                if _is_bad(gradient):
                    self._note(f"gradient {name}", f"the gradient of {name} (the loss was finite)", broken=True)

        return received

    def _note(self, place: str, text: str, broken: bool = False) -> None:
        self._suspects.setdefault(place, text)
        self._broken |= broken


class _Operations(TorchFunctionMode):
    """Reports the result of every function of torch."""

    def __init__(self, done: Callable[[Callable[..., Any], Any], None]) -> None:
        super().__init__()
        self.done = done

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.done(func, result)
        return result


def _is_bad(t: Tensor) -> bool:
    return t.is_floating_point() and not bool(t.detach().isfinite().all())


def _described(name: str, t: Tensor) -> str:
    finite = t.detach()[t.detach().isfinite()].double()
    bad = f", {t.numel() - finite.numel()} not finite" if finite.numel() < t.numel() else ""
    shown = (
        f"{finite.min():.3g} to {finite.max():.3g}, mean {finite.mean():.3g}" if finite.numel() else "no finite number"
    )
    return f"{name}: {shown}{bad}"


def _bad_rows(name: str, t: Tensor, index: Tensor | None) -> str:
    bad = ~t.detach().isfinite().reshape(len(t) if t.dim() else 1, -1)
    rows, what = bad.any(1).nonzero().flatten(), "rows"
    if index is not None and index.shape == t.shape[:1]:
        rows, what = index[rows.to(index.device)], "samples (by their numbers in the training data)"
    listed = ", ".join(str(int(n)) for n in rows[:_SHOWN])
    return f"the batch: {name} holds numbers that are not finite, in {len(rows)} of {len(bad)} {what}: {listed}"


def _line() -> str:
    """The file and line of the caller that is neither of torch nor of this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
