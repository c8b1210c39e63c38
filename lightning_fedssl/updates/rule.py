"""What happens to the clients' updates before they enter the new model: the interface of a rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State
from lightning_fedssl.functional.dictionaries import select
from lightning_fedssl.run import TrainerView
from lightning_fedssl.state import ClientUpdate


@dataclass(frozen=True)
class Arrival:
    """An update that a client has sent, and what rules have found about it.

    Attributes:
        update: The update.
        reason: Why it is rejected, as the end of a sentence about the client: "client 3 *returned
            weights that are not finite*"; None if it is valid so far.
        notes: What rules have noted about it by name, as plain values: ranks send them to each
            other.
    """

    update: ClientUpdate
    reason: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def rejected(self, reason: str) -> Arrival:
        """The same, rejected."""
        return replace(self, reason=reason)

    def with_notes(self, **values: Any) -> Arrival:
        """The same with further notes."""
        return replace(self, notes={**self.notes, **values})

    def changed(self, tensors: State) -> Arrival:
        """The same with other values of some weights and buffers, by name."""
        if not tensors:
            return self
        parameters = self.update.parameters | select(tensors, self.update.parameters)
        buffers = self.update.buffers | select(tensors, self.update.buffers)
        return replace(self, update=replace(self.update, parameters=parameters, buffers=buffers))

    def copied(self) -> Arrival:
        """The same with copies of the update's tensors on the CPU, which stay valid."""
        return replace(self, update=self.update.to(torch.device("cpu"), copy=True))


class UpdateRule(FederatedCallback):
    """A rule for the clients' updates, one of ``trainer.updates``; by default it changes nothing.

    Rules are applied in the order of the list. Each update passes :meth:`on_update` as it arrives,
    on the rank that has trained its client. Rules that compare updates override :meth:`on_round`;
    then the updates of a round wait, as copies on the CPU, until all have arrived. Those that are
    accepted pass :meth:`combine`. A client's state, and what it logs, count only if its update is
    accepted.

    A rule is a callback too: it may override hooks, and keep a state as other callbacks do.
    """

    def check(self, trainer: TrainerView) -> None:
        """Refuse a run that the rule does not fit; called before it.

        Args:
            trainer: The run, with its algorithm and data.

        Raises:
            ValueError: Names the key and the remedy.
        """

    def on_data(self, trainer: TrainerView, data: LocalData) -> LocalData:
        """The data that a client trains on in a round; by default its own."""
        return data

    def upload_sizes(self, update: ClientUpdate, sizes: Sizes) -> Sizes:
        """Bytes by name that a client uploads: fewer, if the rule compresses its update.

        Args:
            update: The update.
            sizes: The bytes without this rule.
        """
        return sizes

    def on_update(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, arrival: Arrival, received: State
    ) -> Arrival:
        """Change, note or reject one valid update.

        Args:
            trainer: The run.
            algorithm: The method; ``algorithm.server`` has the global model.
            arrival: The update as it arrived.
            received: The weights and buffers that its client has received.
        """
        return arrival

    def must_wait(self, arrival: Arrival) -> bool:
        """Whether an update waits for :meth:`on_round`: by default if the rule overrides it.

        The updates that arrive after it wait, too.
        """
        return self.compares

    def on_round(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        arrivals: Sequence[Arrival],
        accepted: Sequence[Mapping[str, Any]],
    ) -> Sequence[Arrival]:
        """Reject valid updates of a round, knowing all; the same on every rank.

        Args:
            trainer: The run.
            algorithm: The method.
            arrivals: Those that have waited, on the CPU, in the order of the cohort.
            accepted: The notes of the updates that were accepted without waiting.

        Returns:
            As many, in the same order.
        """
        return arrivals

    def combine(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, updates: Iterator[ClientUpdate]
    ) -> Iterator[ClientUpdate]:
        """What the method averages in place of the accepted updates, such as one robust mean.

        Args:
            trainer: The run.
            algorithm: The method.
            updates: The updates in the order of the cohort; taking one may train its client, and it
                is valid until the next is taken.
        """
        return updates

    def draw_cohort(self, trainer: TrainerView, index: int) -> list[int] | None:
        """The clients of a round where the rule has to draw them; by default it leaves that to the
        trainer.
        """
        return None

    def at_node(self, update: ClientUpdate, model: State) -> ClientUpdate:
        """What a client of a deployment does to its update before it sends it.

        Args:
            update: The update.
            model: What the client has received.
        """
        return update

    def on_deployment(self, min_clients: int) -> None:
        """Prepare for a deployment, or refuse it.

        Args:
            min_clients: How many clients have to answer in a round.
        """

    def describe(self) -> dict[str, Any] | None:
        """The privacy that the rule has guaranteed so far; None if it guarantees none."""
        return None

    is_client_side: ClassVar[bool] = False
    """Whether the rule is what clients do, before the server's rules."""

    @property
    def compares(self) -> bool:
        """Whether the rule looks at all updates of a round together."""
        return type(self).on_round is not UpdateRule.on_round

    @property
    def place(self) -> int:
        """0 for what clients do, 2 for what combines a round's updates into one, 1 for others."""
        combines = type(self).combine is not UpdateRule.combine
        return 0 if self.is_client_side else 1 + combines


def check_order(rules: Sequence[UpdateRule]) -> None:
    """Refuse lists of rules that make no sense.

    Raises:
        ValueError: An entry is not a rule, two rules combine the updates, a rule comes
            after one that does, or an attack after rules of the server.
    """
    for rule in rules:
        if not isinstance(rule, UpdateRule):
            raise ValueError(
                f"trainer.updates has {rule!r}, which is not a rule: give objects of "
                "lightning_fedssl.updates such as [Quarantine(), Median()]"
            )
    judges = [type(rule).__name__ for rule in rules if rule.place == 1]
    if twice := sorted({name for name in judges if judges.count(name) > 1}):
        raise ValueError(f"trainer.updates has {twice[0]} twice: keep one of them")
    for before, after in pairwise(rules):
        first = type(before).__name__
        second = type(after).__name__
        if before.place == after.place == 2:
            raise ValueError(
                f"trainer.updates: {first} and {second} both combine a round's updates into one; "
                "keep one of them (noise of CentralDP is for a mean, not for a robust rule)"
            )
        if before.place > after.place:
            raise ValueError(
                f"trainer.updates: {second} comes after {first}: put attacks first, which clients "
                "make before the server judges, and what combines the updates into one last"
            )
