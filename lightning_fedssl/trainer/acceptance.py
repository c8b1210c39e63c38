"""Which client updates the server accepts: finite ones that did not explode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedssl.functional.averaging import State, is_finite
from lightning_fedssl.metrics import Gather
from lightning_fedssl.state import ClientUpdate

FEWEST = 3
"""The smallest number of finite updates in a round for which the median is used."""


def reason_to_reject(update: ClientUpdate, seen: Container[str] = ()) -> str | None:
    """Why the server rejects a client's update, independently of other updates; None if there is no reason.

    A rejected update does not enter the average, and the client's persistent state stays what it was before the round.

    Args:
        update: The update as it was sent, payload included.
        seen: Names of weights that are known to be finite.

    Returns:
        The end of a sentence about the client: "client 3 *returned weights that are not finite*".
    """
    weights = [t for name, t in update.parameters.items() if name not in seen]
    tensors = [*weights, *update.buffers.values(), *update.payload.values()]
    return None if is_finite(tensors) else "returned weights that are not finite"


@dataclass
class _Held:
    """An update that waits for the median.

    Attributes:
        update: A copy on the CPU.
        reason: Why it is rejected in any case.
        norm: The length of its movement.
        longest: The length up to which a movement is accepted in any case.
        device: Where the update was.
    """

    update: ClientUpdate
    reason: str | None
    norm: float
    longest: float
    device: torch.device


def judge(
    updates: Iterable[ClientUpdate],
    sent: Callable[[int], State],
    factor: float | None,
    gather: Gather,
    lr_factor: float = 1.0,
) -> Iterator[tuple[ClientUpdate, str | None]]:
    """Decide on every update of this rank, in order; every rank must exhaust the iterator.

    With ``w_k`` the weights that client k received, ``d_k`` the movement of its weights from there, ``s`` the
    schedule's factor of the learning rate, and the median over all finite updates of the round and of all ranks, an
    update is rejected if

        ``|d_k| > factor * median_j |d_j|``   and   ``|d_k| > s |w_k|``.

    The second condition avoids false rejections: the median is tiny if most clients learn nothing, but a normal update
    never moves the weights by more than their norm, and movements shrink with the learning rate. The condition also
    saves memory: only an update that meets it, and the updates after it, must be copied to the CPU until the median is
    known. With fewer than three finite updates no update is rejected for its norm. Buffers and payload are checked for
    finite numbers alone.

    Args:
        updates: Each valid until the next is taken.
        sent: Gives ``w_k`` of a client, by name; called once for each update.
        factor: ``trainer.quarantine``; None accepts every finite update.
        gather: Gives every rank's value.
        lr_factor: ``s``.

    Yields:
        An update and the reason to reject it, or None.
    """
    if factor is None:
        yield from ((update, reason_to_reject(update)) for update in updates)
        return
    norms: list[float] = []
    held: list[_Held] = []
    length_of_weights = _LengthOfWeights()
    for update in updates:
        received = sent(update.client)
        longest = lr_factor * length_of_weights(received)
        norm = _norm(_movement(update, received))
        # A movement of finite length has finite weights only, so that these need not be read again.
        reason = reason_to_reject(update, seen=received if math.isfinite(norm) else {})
        if reason is not None:
            norm = 0.0
        else:
            norms.append(norm)
        if held or norm > longest:
            device = next(iter(received.values())).device
            held.append(_Held(update.to(torch.device("cpu"), copy=True), reason, norm, longest, device))
        else:
            yield update, reason
    everyone = [norm for part in gather(norms) for norm in part]
    median = statistics.median(everyone) if len(everyone) >= FEWEST else float("inf")
    for waiting in held:
        explodes = waiting.norm > waiting.longest and waiting.norm > factor * median
        reason = waiting.reason or (_exploded(waiting.norm, median) if explodes else None)
        yield waiting.update.to(waiting.device), reason


class _LengthOfWeights:
    """The length of the weights that a client received, computed once for clients that received the same tensors."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._length = 0.0

    def __call__(self, received: State) -> float:
        weights = list(received.values())
        if len(weights) != len(self._weights) or any(a is not b for a, b in zip(weights, self._weights, strict=True)):
            self._weights, self._length = weights, _norm(weights)
        return self._length


def _exploded(norm: float, median: float) -> str:
    times = f"{norm / median:.3g} times the median" if median else "the median being 0"
    return f"moved its weights by {norm:.3g}, {times} of the round (trainer.quarantine)"


def _movement(update: ClientUpdate, sent: State) -> Sequence[Tensor]:
    names = [name for name in update.parameters if name in sent]
    return torch._foreach_sub([update.parameters[name] for name in names], [sent[name] for name in names])


def _norm(tensors: Collection[Tensor]) -> float:
    """The L2 norm over all tensors; one read of the device."""
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    return math.sqrt(sum(norm * norm for norm in torch.stack(norms).tolist())) if norms else 0.0
