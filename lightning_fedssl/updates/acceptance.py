"""Which client updates the server accepts: valid ones that did not explode."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import State, is_finite
from lightning_fedssl.functional.dictionaries import select
from lightning_fedssl.run import TrainerView
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates.rule import Arrival, UpdateRule

FEWEST = 3
"""The smallest number of valid updates in a round for which the median is used."""

_ROUNDING = 1e-3
"""The share by which the numbers of two machines, or of 16 bits, may differ."""

_KINDS = ("weights", "buffers")

MOST = 2**53
"""The largest number of images or steps that is counted exactly."""


def check_update(
    algorithm: FederatedAlgorithm,
    update: ClientUpdate,
    most_samples: int = MOST,
    most_steps: int = MOST,
) -> str | None:
    """Why the server rejects an update, independently of other updates; None if there is no reason.

    A rejected update does not enter the average, and the client's persistent state stays what it
    was before the round.

    Args:
        algorithm: Its global model has the shapes and types that an update must have.
        update: The update as it was sent.
        most_samples: Images that this client can have trained on.
        most_steps: Steps that it can have made.

    Returns:
        The end of a sentence about the client: "client 3 *returned weights that are not finite*".
    """
    if not (0 <= update.num_samples <= most_samples and 1 <= update.num_steps <= most_steps):
        return (
            f"counts {update.num_samples} samples and {update.num_steps} steps, but at most "
            f"{most_samples} samples and {most_steps} steps are possible"
        )
    model = algorithm.server.model()
    for name, t in update.model().items():
        if name not in model:
            return f"returned {name!r}, which the global model does not have"
        if (t.shape, t.dtype) != (model[name].shape, model[name].dtype):
            return f"returned {name!r} as {described(t)} instead of {described(model[name])}"
    if not is_finite(
        [*update.parameters.values(), *update.buffers.values(), *update.payload.values()]
    ):
        return "returned weights that are not finite (lower the learning rate if many do)"
    for name, t in update.buffers.items():
        if name.endswith("running_var") and float(t.min()) < 0:
            return f"returned a negative variance {name!r}"
    weight = algorithm.client_weight(update)
    return (
        None if math.isfinite(weight) and weight >= 0 else f"has the weight {weight} in the average"
    )


def check_payload(algorithm: FederatedAlgorithm, update: ClientUpdate) -> str | None:
    """Why the server rejects what a client sent beside its model; None if there is no reason.

    Args:
        algorithm: It knows which values are possible.
        update: The update as it was sent.
    """
    limits = algorithm.payload_limits(update) if update.payload else {}
    for name, (low, high) in limits.items():
        t = update.payload.get(name)
        if t is not None and not torch.allclose(t, t.clamp(low, high), _ROUNDING, _ROUNDING):
            return f"sent {name!r} with values that are not possible"
    return None


def described(t: Tensor) -> str:
    """The type and shape of a tensor."""
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


class Quarantine(UpdateRule):
    """Rejects updates that have exploded: what ``trainer.updates`` has by default.

    With ``w_k`` the weights that client k received, ``d_k`` the movement of its weights from there,
    ``s`` the schedule's factor of the learning rate, and the median over all valid updates of the
    round and of all ranks, an update is rejected if

        ``|d_k| > factor * median_j |d_j|``   and   ``|d_k| > s |w_k|``.

    The second condition avoids false rejections: the median is tiny if most clients learn nothing,
    but a normal update never moves the weights by more than their norm, and movements shrink with
    the learning rate. The condition also saves memory: only an update that meets it, and the
    updates after it, must be copied to the CPU until the median is known. The same rule, with ``s =
    1``, holds for the buffers (statistics of batch norm). With fewer than three valid updates no
    update is rejected for its norm. A rejected update is logged with its client and counted as
    ``client/refused``.

    Args:
        factor: How many times the median movement is too far.
    """

    def __init__(self, factor: float = 10.0) -> None:
        if not factor > 1:
            raise ValueError(
                f"Quarantine.factor is {factor}: give a factor above 1, or leave the rule out of "
                "trainer.updates to accept every valid update"
            )
        self.factor = factor

    def on_update(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, arrival: Arrival, received: State
    ) -> Arrival:
        """Measure how far an update has moved, and up to which lengths that is normal."""
        server = algorithm.server
        update = arrival.update
        moved = []
        longest = []
        for sent, global_state, factor in (
            (update.parameters, server.parameters, trainer.round.lr_factor),
            (update.buffers, server.buffers, 1.0),
        ):
            before = {}
            for name, t in global_state.items():
                if t.is_floating_point():
                    before[name] = received[name].to(t.device)
            longest.append(factor * _norm(before.values()))
            moved.append(_norm(_movement(sent, before)))
        return arrival.with_notes(moved=tuple(moved), longest=tuple(longest))

    def must_wait(self, arrival: Arrival) -> bool:
        """Whether the update is judged by the movements of the round's other updates."""
        pairs = zip(arrival.notes["moved"], arrival.notes["longest"], strict=True)
        return any(moved > longest for moved, longest in pairs)

    def on_round(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        arrivals: Sequence[Arrival],
        accepted: Sequence[Mapping[str, Any]],
    ) -> Sequence[Arrival]:
        """Reject what has moved too far."""
        movements = [notes["moved"] for notes in (*accepted, *(a.notes for a in arrivals))]
        if len(movements) < FEWEST:
            return arrivals
        medians = list(map(statistics.median, zip(*movements, strict=True)))
        return [self._judged(arrival, medians) for arrival in arrivals]

    def _judged(self, arrival: Arrival, medians: Sequence[float]) -> Arrival:
        notes = arrival.notes
        for kind, norm, longest, median in zip(
            _KINDS, notes["moved"], notes["longest"], medians, strict=True
        ):
            if norm > longest and norm > self.factor * median:
                times = f"{norm / median:.3g} times the median" if median else "the median being 0"
                return arrival.rejected(
                    f"moved its {kind} by {norm:.3g}, {times} of the round (Quarantine)"
                )
        return arrival


def _movement(state: State, received: State) -> Sequence[Tensor]:
    moved = select(state, received)
    return (
        torch._foreach_sub([*moved.values()], [received[name] for name in moved]) if moved else ()
    )


def _norm(tensors: Collection[Tensor]) -> float:
    """The L2 norm over all tensors; one read of the device."""
    norms = torch._foreach_norm(list(tensors)) if tensors else ()
    return math.sqrt(sum(norm * norm for norm in torch.stack(norms).tolist())) if norms else 0.0
