"""What the ranks send each other after clients have trained: updates, the clients' new state, what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedssl.distributed import collectives
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.trainer.participation import Share

Changes = Mapping[tuple[str, int], State]
"""Client states by kind and client, as :meth:`ClientStore.changes` returns them."""

ORDERED_BYTES = 2**29
"""The largest size of a round's updates, in bytes, for which every rank receives all updates (512 MiB)."""


def sends_all_updates(model_bytes: int, clients: int) -> bool:
    """Whether every rank receives all updates of a round: a function of the configuration, not of the machine.

    Args:
        model_bytes: The size of the global model.
        clients: Clients of a round.
    """
    return model_bytes * clients <= ORDERED_BYTES


class FromRanks(NamedTuple):
    """What all ranks have sent; all tensors are on the CPU.

    Attributes:
        updates: The updates of all ranks.
        changes: The changes of each rank, in rank order.
        outcomes: What became of the clients of each rank, in rank order.
    """

    updates: list[ClientUpdate]
    changes: list[dict[tuple[str, int], State]]
    outcomes: list[Share]


def exchange(
    fabric: Fabric, updates: Iterable[ClientUpdate], afterwards: Callable[[], tuple[Changes, Share]]
) -> FromRanks:
    """Send updates, changed client states and outcomes to all ranks; the tensors of a rank are in one buffer.

    Args:
        fabric: The ranks.
        updates: The updates that this rank sends; each is copied before the next one is taken.
        afterwards: Returns, when all updates have been taken, the states that this rank's clients have changed, and
            what became of its clients.
    """
    everyone = FromRanks([], [], [])
    for *of_rank, (share, _) in collectives.gather_tensors(fabric, _parts(updates, afterwards)):
        everyone.outcomes.append(share)
        everyone.changes.append({})
        for (label, names), tensors in of_rank:
            values = iter(tensors)
            states = [{name: next(values) for name in of_state} for of_state in names]
            if isinstance(label, ClientUpdate):
                everyone.updates.append(replace(label, parameters=states[0], buffers=states[1], payload=states[2]))
            else:
                # A copy of its own: the buffer is as large as all that was sent, and ends with the round.
                everyone.changes[-1][label] = {name: t.clone() for name, t in states[0].items()}
    return everyone


def _parts(
    updates: Iterable[ClientUpdate], afterwards: Callable[[], tuple[Changes, Share]]
) -> Iterator[tuple[Any, list[Tensor]]]:
    """All that a rank sends, as labelled lists of tensors: updates, changes, and the outcomes last."""
    for update in updates:
        bare = replace(update, parameters={}, buffers={}, payload={})
        yield _labelled(bare, update.parameters, update.buffers, update.payload)
    changes, outcomes = afterwards()
    for key, state in changes.items():
        yield _labelled(key, state)
    yield outcomes, []


def _labelled(label: Any, *states: State) -> tuple[Any, list[Tensor]]:
    """A label with the names of the states' tensors, and the tensors."""
    return (label, [list(state) for state in states]), [t for state in states for t in state.values()]
