"""Simulated attackers: a share of the clients that send false updates, or train on poisoned data.

The attackers are drawn once, as a function of the seed. They follow the protocol until they attack:
an attacker that skips a round sends nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.dictionaries import map_values, select
from lightning_fedssl.run import TrainerView
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

    is_client_side = True

    def check(self, trainer: TrainerView) -> None:
        """Refuse data and methods that cannot be attacked so."""
        self.check_data(trainer.datamodule)
        if self.falsifies:
            require_a_mean(self, trainer.algorithm)

    def on_fit_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Draw the attackers."""
        self._attackers = self.attackers(trainer.seed, trainer.datamodule.num_clients)

    def on_data(self, trainer: TrainerView, data: LocalData) -> LocalData:
        """An attacker may have changed its data."""
        return self.poison(data, trainer.algorithm) if data.party in self._attackers else data

    def on_update(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, arrival: Arrival, received: State
    ) -> Arrival:
        """An attacker may have changed its update."""
        update = arrival.update
        if not self.falsifies or update.client not in self._attackers:
            return arrival
        return arrival.changed(self.falsify(update.model(), select(received, update.model())))

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

    def falsify(self, trained: State, received: State) -> State:
        """What an attacker sends; by default what it has trained.

        Args:
            trained: Its weights and buffers by name.
            received: w, the same of the model that it has received.
        """
        return trained

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

    def falsify(self, trained: State, received: State) -> State:
        """Reverse the movement."""
        return map_values(lambda t, w: torch.lerp(w, t, -self.scale), trained, received)


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
                f"PseudoLabelPoison: radius is {radius} and steps {steps}: give a radius from 0 to "
                "1 and 1 or more steps"
            )
        self.radius = radius
        self.steps = steps

    def check_data(self, data: FederatedDataModule) -> None:
        """The samples are images, with one class each."""
        if "one class" not in data.task.gives:
            raise ValueError(
                "trainer.updates: PseudoLabelPoison gives samples other classes, which data.task "
                "has not; SignFlip attacks every task"
            )
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
            outputs: Tensor = functional_call(
                algorithm, model, data.views.plain(x, no_keys).to(data.dtype)
            )
            return outputs

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
