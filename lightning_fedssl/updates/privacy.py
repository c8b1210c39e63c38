"""Central differential privacy of clients: clipped updates, noise on their sum, and a budget that
ends the run.

B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially Private Recurrent Language
Models", ICLR 2018, arXiv 1710.06963, with its estimator of a fixed denominator. In a round, with w
the global model, C the clip, z the noise multiplier and m the expected size of a cohort:

1. each client k of the cohort uploads weights and buffers ``w_k``; ``d_k = (w_k - w) min(1, C /
   |w_k - w|)``, with the norm over all tensors together; a client that skips the round or does not
   answer counts as 0;
2. ``w <- w + (sum_k d_k + N(0, z^2 C^2)) / m``.

Private is whether a client takes part, with all its images. Labels and training at the server are
public. What the server computes from the noisy mean (momentum, its own training, a teacher) costs
nothing.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.functional.dictionaries import map_values, select
from lightning_fedssl.metrics.rounds import Metrics
from lightning_fedssl.run import TrainerView
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates.accounting import LEAST_NOISE, Budget, calibrated
from lightning_fedssl.updates.aggregators import why_not_a_mean
from lightning_fedssl.updates.rule import UpdateRule

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm

_log = logging.getLogger(__name__)


class CentralDP(UpdateRule):
    """Differential privacy for clients by a trusted server.

    Every round logs ``privacy/epsilon`` (spent so far), ``privacy/population`` (the clients that it
    is accounted for) and ``privacy/clipped_share`` (of the updates), which comes from single
    updates and is not protected. The run ends before the round that would spend more than
    ``epsilon``.

    Args:
        delta: Delta; below 1 / clients of the population.
        epsilon: The budget. Without ``noise_multiplier`` the noise is such that ``max_rounds``
            rounds spend it.
        noise_multiplier: z; without ``epsilon`` there is no limit. 0 clips only.
        clip: C, the largest L2 norm of a client's update over all its tensors together.
        population: M, a larger federation that the run stands for: epsilon and the noise are those
            of M clients, while this run trains ``data.num_clients`` (as in pfl-research). Left out:
            the run's own clients.
        population_cohort: Clients of a round in that federation; left out, ``clients_per_round``.
            The noise on the mean is ``z C / population_cohort``.

    Raises:
        ValueError: Names the argument.

    Example:
        >>> from lightning_fedssl import FederatedTrainer
        >>> rules = [CentralDP(delta=1e-5, epsilon=8, clip=1.0)]
        >>> FederatedTrainer(updates=rules, clients_per_round=50).updates[0].clip
        1.0
    """

    def __init__(
        self,
        delta: float,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        clip: float = 1.0,
        population: int | None = None,
        population_cohort: int | None = None,
    ) -> None:
        _require(0 < delta < 1, "delta", delta, "give a number between 0 and 1, below 1 / clients")
        _require(epsilon is None or epsilon > 0, "epsilon", epsilon, "give a number above 0")
        _require(
            noise_multiplier is None or noise_multiplier >= 0,
            "noise_multiplier",
            noise_multiplier,
            "give 0 or more",
        )
        _require(
            epsilon is not None or noise_multiplier is not None,
            "epsilon",
            None,
            "give it, or noise_multiplier",
        )
        _require(clip > 0, "clip", clip, "give a norm above 0")
        _require(
            population is not None or population_cohort is None,
            "population",
            None,
            "population_cohort needs it",
        )
        self.delta = delta
        self.epsilon = epsilon
        self.noise_multiplier = noise_multiplier
        self.clip = clip
        self.population = population
        self.population_cohort = population_cohort
        self._secret = False
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        self._spent: Budget | None = None
        self._last_round = 0

    # Before the run.

    def setup(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, stage: str
    ) -> None:
        """Refuse what the analysis does not cover."""
        if stage == "fit" and (reasons := uncovered(trainer, algorithm)):
            raise ValueError(
                "CentralDP: the analysis does not cover this run. " + " ".join(reasons)
            )

    def on_fit_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Calibrate the noise; continue the budget of a checkpoint.

        A budget that is spent ends the run at once.
        """
        planned = self.plan(trainer)
        spent = self._spent
        if spent is None and trainer.ckpt_path is not None:
            raise ValueError(
                f"ckpt_path: {trainer.ckpt_path} is of a run without CentralDP, so its rounds are "
                "not private: start a new run"
            )
        if trainer.ckpt_path is None and algorithm.origin:
            raise ValueError(
                "CentralDP: an earlier fit has trained this model, and its rounds would not count: "
                "build a new one, or resume that run by ckpt_path"
            )
        if spent is None:
            spent = replace(
                planned, noise_multiplier=self._noise(planned, trainer.max_rounds), rounds=0
            )
        if (
            replace(spent, noise_multiplier=planned.noise_multiplier, rounds=planned.rounds)
            != planned
        ):
            raise ValueError(
                f"ckpt_path: {trainer.ckpt_path} is of a run with another sampling or population "
                f"({spent}): its budget cannot be continued; give its settings, or start a new run"
            )
        self._spent = spent
        noise = spent.noise_multiplier
        remedy = "too small to account for; give 0.1 or more, or 0, which clips only"
        _require(not 0 < noise < LEAST_NOISE, "noise_multiplier", noise, remedy)
        if self._is_spent(spent) and not spent.rounds:
            raise ValueError(
                f"CentralDP: one round with noise_multiplier {spent.noise_multiplier:g} spends "
                f"epsilon {spent.epsilon(self.delta, 1):.3g}, more than {self.epsilon}: raise one "
                "of them, or leave noise_multiplier out"
            )
        trainer.should_stop |= self._is_spent(spent)

    def plan(self, trainer: TrainerView) -> Budget:
        """The budget of all rounds of a run.

        The noise multiplier is 0 where it has to be calibrated.

        Args:
            trainer: The trainer, with its data.
        """
        clients = trainer.datamodule.num_clients
        cohort = trainer.cohort_size
        if self.population is not None:
            clients = self.population
            cohort = self.population_cohort or cohort
        _require(cohort <= clients, "population", clients, f"it has rounds of {cohort} clients")
        remedy = f"give less than 1 / clients, {1 / clients:.2g}: with more, one may be published"
        _require(self.delta * clients < 1, "delta", self.delta, remedy)
        return Budget(
            self.noise_multiplier or 0.0,
            trainer.max_rounds,
            clients,
            cohort,
        )

    def _noise(self, planned: Budget, rounds: int) -> float:
        if self.noise_multiplier is not None or self.epsilon is None:
            return planned.noise_multiplier
        return calibrated(replace(planned, rounds=rounds), self.epsilon, self.delta)

    def draw_cohort(self, trainer: TrainerView, index: int) -> list[int]:
        """The clients of a round, in drawn order: each with probability ``clients_per_round /
        num_clients``, so that cohorts vary in size.

        In a deployment nobody can compute them from the seed.

        Args:
            trainer: The run.
            index: The round.
        """
        seed = secrets.randbits(60) if self._secret else trainer.seed
        clients = trainer.datamodule.num_clients
        size = trainer.cohort_size
        rng = sampling.rng(seed, "cohort", index)
        cohort = rng.permutation(np.flatnonzero(rng.random(clients) < size / clients))
        return list(map(int, cohort))

    def on_deployment(self, min_clients: int) -> None:
        """Take cohorts and noise from the operating system's entropy, not from the seed."""
        self._secret = True
        if min_clients > 1:
            raise ValueError(
                f"min-clients is {min_clients}, and with CentralDP no client may decide on others: "
                "set it to 1"
            )

    # In a round.

    def clipped(self, update: ClientUpdate, model: State) -> tuple[State, float]:
        """``d_k`` by name, and the norm that it had before it was clipped.

        Args:
            update: What the client uploads.
            model: What it has received.
        """
        sent = update.model()
        moved = torch._foreach_sub(
            list(sent.values()), [model[name].to(t.device) for name, t in sent.items()]
        )
        norm = math.hypot(*map(_norm, moved))
        if norm > self.clip:
            torch._foreach_mul_(moved, self.clip / norm)
        return dict(zip(sent, moved, strict=True)), norm

    def at_node(self, update: ClientUpdate, model: State) -> ClientUpdate:
        """The update of a client that clips it itself.

        Args:
            update: What the client has trained.
            model: What it has received.
        """
        moved, _ = self.clipped(update, model)
        sent = {name: model[name].to(t.device) + t for name, t in moved.items()}
        parameters, buffers = (
            {name: sent[name] for name in part} for part in (update.parameters, update.buffers)
        )
        return replace(update, parameters=parameters, buffers=buffers)

    def combine(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, updates: Iterator[ClientUpdate]
    ) -> Iterator[ClientUpdate]:
        """One update in place of a round's updates: the model plus the noisy mean, also if nobody
        has trained.

        Raises:
            ValueError: The method trains clients twice in a round, or an update has more than
                weights and buffers.
        """
        spent = self._spent
        assert spent is not None
        if self._last_round == trainer.round_index:
            raise ValueError(
                f"CentralDP: {type(algorithm).__name__} trains its clients twice in a round, which "
                "the analysis does not cover: choose another method"
            )
        self._last_round = trainer.round_index
        server = algorithm.server
        weights, statistics = algorithm.uploaded_weights(), algorithm.uploaded_buffers()
        model = {name: server.model()[name] for name in (*weights, *statistics)}
        total = map_values(torch.zeros_like, model)
        clipped = []
        for update in updates:
            if (
                more := algorithm.upload_sizes(update).keys()
                - update.parameters.keys()
                - update.buffers.keys()
            ):
                raise ValueError(
                    f"CentralDP: {type(algorithm).__name__} uploads {', '.join(sorted(more))} in "
                    "addition to the model; the analysis does not cover that: choose another method"
                )
            moved, norm = self.clipped(update, model)
            clipped.append(norm > self.clip)
            torch._foreach_add_([total[name] for name in moved], list(moved.values()))
        scale = spent.noise_multiplier * self.clip * trainer.cohort_size / spent.cohort
        mean = self._noisy_mean(model, total, scale, trainer)
        self._spent = replace(spent, rounds=spent.rounds + 1)
        trainer.log("privacy/epsilon", self._spent.epsilon(self.delta))
        trainer.log("privacy/population", spent.clients)
        trainer.log("privacy/clipped_share", sum(clipped) / max(len(clipped), 1), len(clipped))
        parameters = select(mean, weights)
        buffers = {name: mean[name] for name in statistics}
        yield ClientUpdate(sampling.SERVER, parameters, buffers, num_samples=1, num_steps=1)

    def _noisy_mean(self, model: State, total: State, scale: float, trainer: TrainerView) -> State:
        """``w + (sum + N(0, scale^2)) / m``; noise can make no variance negative."""
        rng = sampling.rng(trainer.seed, "privacy noise", trainer.round_index)
        mean = {}
        for name, t in total.items():
            noise = secret_normal(t.numel()) if self._secret else rng.standard_normal(t.numel())
            noisy = t + scale * torch.from_numpy(noise).view(t.shape).to(t)
            new = model[name] + noisy / trainer.cohort_size
            mean[name] = new.clamp(min=0) if name.endswith("running_var") else new
        return mean

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """End the run before the round that would spend too much."""
        if (
            trainer.round_index < trainer.max_rounds
            and self._spent is not None
            and self._is_spent(self._spent)
        ):
            trainer.should_stop = True
            _log.warning(
                "round %d: the privacy budget (epsilon %g) is spent",
                trainer.round_index,
                self.epsilon,
            )

    def _is_spent(self, spent: Budget) -> bool:
        return self.epsilon is not None and spent.epsilon(self.delta, more_rounds=1) > self.epsilon

    # After the run.

    def describe(self) -> dict[str, Any] | None:
        """What the run has spent; None before its start."""
        return None if self._spent is None else self.describe_budget(self._spent)

    def describe_budget(self, budget: Budget) -> dict[str, Any]:
        """A budget as :meth:`Budget.describe` says it, with the clip and whether the population is
        simulated.
        """
        described = budget.describe(self.delta) | {"clip": self.clip}
        if self.population is not None:
            described["statement"] += (
                "; it is simulated, and for the clients of this run there is no guarantee"
            )
        return described

    def state_dict(self) -> dict[str, Any]:
        """The spent budget."""
        return {} if self._spent is None else asdict(self._spent)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`, unless it has spent less than nothing."""
        self._spent = Budget(**state_dict)
        remedy = "use another checkpoint of the run"
        _require(self._spent.rounds >= 0, "rounds", self._spent.rounds, remedy)


def uncovered(trainer: TrainerView, algorithm: FederatedAlgorithm) -> list[str]:
    """What central differential privacy does not cover in a run: a sentence with the key and the
    remedy for each.

    Args:
        trainer: The trainer, with its callbacks.
        algorithm: The method.
    """
    method = type(algorithm).__name__
    leaks = []
    if reason := why_not_a_mean(algorithm):
        leaks.append(
            f"model: {method} {reason}; choose a method that averages its clients' models."
        )
    elif algorithm.client_weighting != "uniform":
        leaks.append(
            "model.client_weighting: samples weighs a client by its number of images (in SemiFL of "
            "confident ones), which is private; set it to uniform."
        )
    if (stated := trainer.datamodule.stated) is not None and not stated.public:
        leaks.append(
            "data.class_shares: what sites state is sent without noise; leave it out, or give "
            "public: true if it is not secret."
        )
    if trainer.precision.endswith("16-true"):
        leaks.append(
            "trainer.precision: updates and noise are rounded to 16 bits; take 32-true or a mixed "
            "precision."
        )
    leaks += trainer.datamodule.constants_of_clients
    for rule in trainer.callbacks:
        if isinstance(rule, UpdateRule) and rule.compares:
            leaks.append(
                f"trainer.updates: {type(rule).__name__} compares updates, so that one client "
                "decides about others; leave it out (clipping bounds every update)."
            )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        measures = isinstance(callback, StaticBatchNorm) and callback.source != "server"
        if measures and has_static_batch_norm(algorithm):
            leaks.append(
                f"{name}: source {getattr(callback, 'source', '')} reads the clients' images; set "
                "it to server."
            )
        monitor = getattr(callback, "monitor", None)
        if monitor is not None and not monitor.startswith(("val", "test", "server/")):
            leaks.append(
                f"{name}: monitor {monitor} is not a scalar of the server's own data; watch "
                "val or server/ ones."
            )
    return leaks


def secret_normal(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Standard normal numbers from the operating system's entropy, by the transform of Box and
    Muller.

    Args:
        count: How many.
    """
    bits = np.frombuffer(os.urandom(16 * count), dtype=np.uint64).reshape(2, count) >> np.uint64(11)
    u, v = bits * 2.0**-53
    return np.asarray(np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v))


def _norm(t: Tensor) -> float:
    """In 64 bits: in 32, the norm of a large tensor comes out too small."""
    there = t.cpu() if t.is_mps else t  # Apple's GPUs have no float64
    return float(torch.linalg.vector_norm(there, dtype=torch.float64))


def _require(valid: bool, key: str, value: object, remedy: str) -> None:
    if not valid:
        raise ValueError(f"CentralDP.{key} is {value}: {remedy}")
