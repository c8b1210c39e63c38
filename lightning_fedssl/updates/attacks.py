"""Simulated attackers: a share of the clients that send false updates, or train on poisoned data.

The attackers are drawn once, as a function of the seed. They follow the protocol until they attack:
an attacker that skips a round sends nothing. Attacks on updates know the global model w and all
updates of the round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.by_name import mapped, paired
from lightning_fedssl.run import Run
from lightning_fedssl.task import Classification
from lightning_fedssl.updates.aggregators import require_a_mean
from lightning_fedssl.updates.rule import Arrival, UpdateRule


class Attack(UpdateRule):
    """The base of attacks: one of your own overrides :meth:`falsify` or :meth:`poison`.

    Args:
        share: The share of all clients that attack, rounded to a whole number of clients.
    """

    def __init__(self, share: float = 0.2) -> None:
        if not 0 <= share <= 1:
            raise ValueError(
                f"{type(self).__name__}.share is {share}: give a share of the clients from 0 to 1"
            )
        self.share = share
        self._attackers = frozenset[int]()

    comes_first = True

    def check(self, trainer: Run) -> None:
        """Refuse data and methods that cannot be attacked so."""
        self.check_data(trainer.datamodule)
        if self.falsifies:
            require_a_mean(self, trainer.algorithm)

    def on_fit_start(  # type: ignore[override]
        self, trainer: Run, algorithm: FederatedAlgorithm
    ) -> None:
        """Draw the attackers."""
        self._attackers = self.attackers(trainer.seed, trainer.datamodule.num_clients)

    def on_data(self, trainer: Run, data: LocalData) -> LocalData:
        """An attacker may have changed its data."""
        return self.poison(data, trainer.algorithm) if data.party in self._attackers else data

    def holds(self, arrival: Arrival) -> bool:
        """Attackers that falsify know all updates of the round."""
        return self.falsifies

    def on_round(
        self,
        trainer: Run,
        algorithm: FederatedAlgorithm,
        arrivals: Sequence[Arrival],
        passed: Sequence[Mapping[str, Any]],
    ) -> Sequence[Arrival]:
        """What arrives at the server when the attackers have changed their updates."""
        if not self.falsifies:
            return arrivals
        model = mapped(Tensor.cpu, algorithm.server.model())
        own: dict[int, State] = {}
        others: dict[int, State] = {}
        for arrival in arrivals:
            client = arrival.update.client
            (own if client in self._attackers else others)[client] = arrival.update.model()
        rng = sampling.rng(trainer.seed, "attack", trainer.round_index)
        self.falsify([*own.values()], [*others.values()], model, rng)
        return [arrival.changed(own.get(arrival.update.client, {})) for arrival in arrivals]

    def on_deployment(self, min_clients: int) -> None:
        """Refuse it: a deployment has real clients."""
        raise ValueError(
            f"trainer.updates: {type(self).__name__} simulates attackers, and a deployment has "
            "real clients: leave it out"
        )

    def attackers(self, seed: int, num_clients: int) -> frozenset[int]:
        """The clients that attack."""
        order = sampling.rng(seed, "attackers").permutation(num_clients)
        return frozenset(order[: round(self.share * num_clients)].tolist())

    def falsify(
        self, own: Sequence[State], others: Sequence[State], model: State, rng: Generator
    ) -> None:
        """Change what the attackers of a round send, in place; by default nothing.

        Args:
            own: The trained weights and buffers of each attacker.
            others: Those of the other clients, which must stay as they are.
            model: w, the global model that all have received.
            rng: The random numbers of this round.
        """

    def poison(self, data: LocalData, algorithm: FederatedAlgorithm) -> LocalData:
        """What an attacker trains on in a round; by default its own data.

        Args:
            data: Its data.
            algorithm: The method; ``algorithm.server`` has the model that the client receives.
        """
        return data

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse data that cannot be attacked so; called before the first round.

        Args:
            data: All data.

        Raises:
            ValueError: Names the key and the remedy.
        """

    @property
    def falsifies(self) -> bool:
        """Whether the attackers change their updates."""
        return type(self).falsify is not Attack.falsify


class SignFlip(Attack):
    """Attackers send ``w - scale (w_k - w)``: they move away from what they have learned.

    With a negative scale they move on in the same direction: model replacement (Bagdasaryan et al.,
    AISTATS 2020, arXiv 1807.00459).

    Args:
        share: The share of all clients that attack.
        scale: How many times as far as it has moved an attacker moves in the opposite direction.
    """

    def __init__(self, share: float = 0.2, scale: float = 5.0) -> None:
        super().__init__(share)
        self.scale = scale

    def falsify(
        self, own: Sequence[State], others: Sequence[State], model: State, rng: Generator
    ) -> None:
        """Reverse the movements."""
        for state in own:
            state |= paired(lambda t, w: torch.lerp(w, t, -self.scale), state, model)


class ALIE(Attack):
    """A little is enough: attackers send the others' mean, shifted by so little that it is within
    their spread.

    G. Baruch, M. Baruch, Y. Goldberg, NeurIPS 2019, arXiv 1902.06156, Algorithm 3. With n clients
    in the round, m of them attackers, ``s = floor(n / 2 + 1) - m``, all attackers send ``mean - z
    std`` of the others' updates with ``z = quantile((n - m - s) / (n - m))`` of the normal
    distribution.

    Args:
        share: The share of all clients that attack.
        z: The shift in standard deviations; left out, as above.
    """

    def __init__(self, share: float = 0.2, z: float | None = None) -> None:
        super().__init__(share)
        self.z = z

    def falsify(
        self, own: Sequence[State], others: Sequence[State], model: State, rng: Generator
    ) -> None:
        """Send the shifted mean."""
        if len(others) < 2:
            return
        z = self.largest_shift(len(own), len(others)) if self.z is None else self.z
        for name in others[0]:
            values = torch.stack([state[name] for state in others])
            sent = values.mean(dim=0) - z * values.std(dim=0)
            for state in own:
                state[name] = sent

    @staticmethod
    def largest_shift(attackers: int, others: int) -> float:
        """z, with at least 0 and at most 3 standard deviations, which the paper's formula can
        exceed in small rounds.

        Args:
            attackers: m.
            others: n - m.
        """
        supporters = (attackers + others) // 2 + 1 - attackers
        share = (others - supporters) / others
        return (
            min(max(NormalDist().inv_cdf(share), 0.0), 3.0) if 0 < share < 1 else 3.0 * (share >= 1)
        )


def _check_classes(attack: Attack, data: FederatedDataModule) -> None:
    if not isinstance(data.task, Classification):
        raise ValueError(
            f"trainer.updates: {type(attack).__name__} gives samples other classes, which "
            "data.task has not; SignFlip and ALIE attack every task"
        )


class LabelFlip(Attack):
    """Attackers train on the labels ``classes - 1 - y`` instead of y; for labels at the clients."""

    def check_data(self, data: FederatedDataModule) -> None:
        """The clients have labels; an attacker without any trains as usual."""
        _check_classes(self, data)
        if data.label_location != "clients" or not data.class_names:
            raise ValueError(
                "trainer.updates: LabelFlip needs labels at the clients (data.label_location: "
                "clients); "
                "PseudoLabelPoison attacks unlabelled images"
            )

    def poison(self, data: LocalData, algorithm: FederatedAlgorithm) -> LocalData:
        """Flip the labels."""
        return replace(data, labels=int(algorithm.num_classes or 0) - 1 - data.labels)


class PseudoLabelPoison(Attack):
    """Attackers change their unlabelled images so that the received model labels them confidently
    with a wrong class.

    Every image of the predicted class c is moved towards class c + 1 (the last towards class 0), by
    ``steps`` of projected gradient descent on the global model (Madry et al., ICLR 2018, arXiv
    1706.06083) that change no pixel by more than ``radius``. All attackers thus teach the same
    wrong labels, and the training itself is honest: the update has the length and the spread of an
    honest one. That unlabelled images can carry an attack is known from N. Carlini, "Poisoning the
    Unlabeled Dataset of Semi-Supervised Learning", USENIX Security 2021, arXiv 2105.01622; the
    variant for federations is ours.

    Args:
        share: The share of all clients that attack.
        radius: The largest change of a pixel, of its range 0..1.
        steps: Gradient steps, each of ``2.5 radius / steps``.
    """

    def __init__(self, share: float = 0.2, radius: float = 0.2, steps: int = 10) -> None:
        super().__init__(share)
        if not 0 <= radius <= 1 or steps < 1:
            raise ValueError(
                f"PseudoLabelPoison: radius is {radius} and steps {steps}: give a radius from 0 "
                "to 1 and 1 or more "
                "steps"
            )
        self.radius = radius
        self.steps = steps

    def check_data(self, data: FederatedDataModule) -> None:
        """The samples are images."""
        _check_classes(self, data)
        if not data.spec.pixels or data.backbone is not None:
            raise ValueError(
                "trainer.updates: PseudoLabelPoison changes 8-bit pixels, and these samples are "
                "others"
            )

    def poison(self, data: LocalData, algorithm: FederatedAlgorithm) -> LocalData:
        """Change the images; the run's images are copied, so that indices stay valid."""
        if not len(data.unlabeled):
            return data
        images = data.images.clone()
        images[data.unlabeled] = self.moved(data.images[data.unlabeled], data, algorithm)
        return replace(data, images=images)

    def moved(self, images: Tensor, data: LocalData, algorithm: FederatedAlgorithm) -> Tensor:
        """Images of other classes to the global model: uint8 ``(n, channels, height, width)``.

        Args:
            images: As they are.
            data: Has the normalisation.
            algorithm: Has the global model.
        """
        model = algorithm.server.model()
        no_keys = data.unlabeled[:0]

        def logits(x: Tensor) -> Tensor:
            found: Tensor = functional_call(
                algorithm, model, data.views.plain(x, no_keys).to(data.dtype)
            )
            return found

        original = images.float()
        radius = 255 * self.radius
        x = original.clone()
        with evaluating(algorithm):
            wrong = (logits(x).argmax(dim=1) + 1) % int(algorithm.num_classes or 1)
            for _ in range(self.steps):
                with torch.enable_grad():
                    loss = F.cross_entropy(logits(x.requires_grad_()), wrong, reduction="sum")
                    (gradient,) = torch.autograd.grad(loss, x)
                x = x.detach() - 2.5 * radius / self.steps * gradient.sign()
                x = original + (x - original).clamp(-radius, radius)
                x = x.clamp(0, 255)
        return x.round().to(torch.uint8)
