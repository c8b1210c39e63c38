"""Which client updates the server accepts: valid ones that did not explode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedssl.functional.averaging import State
from lightning_fedssl.metrics import Gather
from lightning_fedssl.state import ClientUpdate

FEWEST = 3
"""The smallest number of finite updates in a round for which the median is used."""

_KINDS = ("weights", "buffers")


@dataclass
class _Held:
    """An update that waits for the median.

    Attributes:
        update: A copy on the CPU.
        reason: Why it is rejected in any case.
        moved: The length of the movement of its weights, and that of its buffers.
        longest: The lengths up to which a movement is accepted in any case.
        device: Where the update was.
    """

    update: ClientUpdate
    reason: str | None
    moved: tuple[float, float]
    longest: tuple[float, float]
    device: torch.device


def judge(
    updates: Iterable[ClientUpdate],
    sent: Callable[[int], tuple[State, State]],
    factor: float | None,
    gather: Gather,
    check: Callable[[ClientUpdate], str | None],
    lr_factor: float = 1.0,
) -> Iterator[tuple[ClientUpdate, str | None]]:
    """Decide on every update of this rank, in order; every rank must exhaust the iterator.

    With ``w_k`` the weights that client k received, ``d_k`` the movement of its weights from there, ``s`` the
    schedule's factor of the learning rate, and the median over all valid updates of the round and of all ranks, an
    update is rejected if

        ``|d_k| > factor * median_j |d_j|``   and   ``|d_k| > s |w_k|``.

    The second condition avoids false rejections: the median is tiny if most clients learn nothing, but a normal update
    never moves the weights by more than their norm, and movements shrink with the learning rate. The condition also
    saves memory: only an update that meets it, and the updates after it, must be copied to the CPU until the median is
    known. The same rule, with ``s = 1``, holds for the buffers (statistics of batch norm). With fewer than three valid
    updates no update is rejected for its norm.

    Args:
        updates: Each valid until the next is taken.
        sent: Gives the weights and the buffers that a client received, by name; called once for each valid update.
        factor: ``trainer.quarantine``; None accepts every valid update.
        gather: Gives every rank's value.
        check: Why an update is not valid, independently of others; None if it is.
        lr_factor: ``s``.

    Yields:
        An update and the reason to reject it, or None.
    """
    if factor is None:
        yield from ((update, check(update)) for update in updates)
        return
    movements: list[tuple[float, float]] = []
    held: list[_Held] = []
    length_of_weights, length_of_buffers = _Length(), _Length()
    for update in updates:
        reason, moved, longest = check(update), (0.0, 0.0), (0.0, 0.0)
        if reason is None:
            weights, buffers = sent(update.client)
            longest = lr_factor * length_of_weights(weights), length_of_buffers(buffers)
            moved = _norm(_movement(update.parameters, weights)), _norm(_movement(update.buffers, buffers))
            movements.append(moved)
        if held or moved[0] > longest[0] or moved[1] > longest[1]:
            device = next(iter(update.parameters.values())).device
            held.append(_Held(update.to(torch.device("cpu"), copy=True), reason, moved, longest, device))
        else:
            yield update, reason
    everyone = [moved for part in gather(movements) for moved in part]
    medians = [math.inf, math.inf]
    if len(everyone) >= FEWEST:
        medians = [statistics.median(norms) for norms in zip(*everyone, strict=True)]
    for waiting in held:
        reason = waiting.reason
        for kind, norm, accepted, median in zip(_KINDS, waiting.moved, waiting.longest, medians, strict=True):
            if norm > accepted and norm > factor * median:
                reason = reason or _exploded(kind, norm, median)
        yield waiting.update.to(waiting.device), reason


class _Length:
    """The length of what a client received, computed once for clients that received the same tensors."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._length = 0.0

    def __call__(self, received: State) -> float:
        weights = list(received.values())
        if len(weights) != len(self._weights) or any(a is not b for a, b in zip(weights, self._weights, strict=True)):
            self._weights, self._length = weights, _norm(weights)
        return self._length


def _exploded(kind: str, norm: float, median: float) -> str:
    times = f"{norm / median:.3g} times the median" if median else "the median being 0"
    return f"moved its {kind} by {norm:.3g}, {times} of the round (trainer.quarantine)"


def _movement(state: State, sent: State) -> Sequence[Tensor]:
    names = [name for name in state if name in sent]
    return torch._foreach_sub([state[name] for name in names], [sent[name] for name in names]) if names else ()


def _norm(tensors: Collection[Tensor]) -> float:
    """The L2 norm over all tensors; one read of the device."""
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    return math.sqrt(sum(norm * norm for norm in torch.stack(norms).tolist())) if norms else 0.0
