"""Measures how much the gradients of a round's clients differ: FedRGD's gradient diversity.

FedRGD (Z. Zhang et al., IEEE BigData 2021, arXiv 2008.11364), Eq. 1 and 9-12; the quantity is that
of D. Yin et al., "Gradient Diversity: a Key Ingredient for Scalable Distributed Learning", AISTATS
2018, arXiv 1706.05699. In a checkout: ``lightning-fedssl fit --config fedrgd_digits.yaml
--trainer.callbacks+=examples.diagnostics.gradient_diversity.GradientDiversity``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callback import FederatedCallback, at_least
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.local_training.sequential import recording

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import Batch, ClientUpdate

Source = Literal["update", "gradient"]

NormName = Literal["l1", "l2"]
"""Which norm of the gradients is compared."""


@dataclass
class GradientSum:
    """The sum of gradients and the sums of their norms: sufficient for diversity, for any number of
    gradients.

    Attributes:
        total: The sum, one flat vector ``(weights,)``; None before the first gradient.
        count: n, how many gradients were added.
        l1: Sum of the L1 norms.
        l1_squared: Sum of their squares.
        l2: Sum of the L2 norms.
        l2_squared: Sum of their squares.
    """

    total: Tensor | None = None
    count: int = 0
    l1: float = 0.0
    l1_squared: float = 0.0
    l2: float = 0.0
    l2_squared: float = 0.0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, a flat vector ``(weights,)``; no reference to it is stored."""
        l1, l2 = (
            float(torch.linalg.vector_norm(gradient, order, dtype=torch.float64))
            for order in (1, 2)
        )
        self.merge(GradientSum(gradient, 1, l1, l1**2, l2, l2**2))

    def merge(self, other: GradientSum) -> None:
        """Add the gradients of another sum, which is not changed."""
        if other.total is not None:
            moved = other.total.to(self.total.device) if self.total is not None else other.total
            self.total = moved.clone() if self.total is None else self.total + moved
        self.count += other.count
        self.l1 += other.l1
        self.l1_squared += other.l1_squared
        self.l2 += other.l2
        self.l2_squared += other.l2_squared

    def diversity(self, norm: NormName = "l2", *, squared: bool = True) -> float:
        """``sum_k ||g_k||^p / ||sum_k g_k||^p``, p = 2 if squared (Eq. 1), else 1 (Eq. 9).

        It is ``1 / n^(p-1)`` for n equal gradients, 1 for orthogonal ones (squared L2), and
        infinite if their sum is 0.

        Args:
            norm: ``l2`` (Eq. 1, 9) or ``l1`` (Eq. 10, 11).
            squared: Whether norms are squared.

        Raises:
            ValueError: No gradient was added.
        """
        if self.total is None:
            raise ValueError("diversity needs at least one gradient")
        norms = {"l1": (self.l1, self.l1_squared), "l2": (self.l2, self.l2_squared)}[norm][squared]
        of_sum = float(
            torch.linalg.vector_norm(self.total, 1 if norm == "l1" else 2, dtype=torch.float64)
        )
        of_sum = of_sum**2 if squared else of_sum
        return norms / of_sum if of_sum else float("inf")

    def diversity_of_means(self, norm: NormName = "l2", *, squared: bool = True) -> float:
        """``mean_k ||g_k||^p / ||mean_k g_k||^p``, as the authors' code prints it: ``n^(p-1)``
        times :meth:`diversity`.

        At least 1 for p = 2; exactly 1 for any number of equal gradients.

        Args:
            norm: As in :meth:`diversity`.
            squared: As in :meth:`diversity`.
        """
        return self.diversity(norm, squared=squared) * (self.count if squared else 1)


def sum_gradients(gradients: Iterable[Tensor]) -> GradientSum:
    """The sums over flat gradients ``(weights,)``."""
    total = GradientSum()
    for gradient in gradients:
        total.add(gradient)
    return total


def merged(sums: Iterable[GradientSum]) -> GradientSum:
    """The total of several sums, which are not changed."""
    total = GradientSum()
    for part in sums:
        total.merge(part)
    return total


class GradientDiversity(FederatedCallback):
    """Logs the sixteen variants of gradient diversity in FedRGD's section III-E, and those of the
    authors' code.

    The scalars are ``diversity/<source>_<norm>``. The source is ``update`` (a client's weights
    after its local steps minus the weights that it received, Eq. 12) or ``gradient`` (the gradient
    of its loss on all its images at the weights that it received, in training mode, as a mean over
    batches). The norm is ``l2`` or ``l1``, with or without ``_squared``. Variants with
    ``_with_server`` are logged if the server trains before the clients' updates are summed, and the
    clients send all weights that it trains. Eq. 1 is ``l2_squared``.
    ``diversity/<source>_of_means`` is the form of the authors' code, ``mean ||g||^2 / ||mean
    g||^2``, over all clients and the server. ``diversity/<source>_of_means_in_groups`` is its mean
    over the groups of a method with several groups, each with its server. A group has fewer
    gradients, and for independent ones that makes it smaller; a group whose gradients nearly cancel
    makes it larger. Use the other forms to compare methods.

    A client whose update was rejected does not count.

    Only part of a run that lists it. For updates it costs a pass over the weights per client, and
    one copy of the weights per group and per client that the server has not judged yet. For
    gradients it costs about one local epoch per drawn client and measured round.

    Args:
        source: What to measure: ``update``, ``gradient``, or ``both``.
        every_n_rounds: Interval of the measurements, in rounds.
    """

    def __init__(
        self, source: Literal["update", "gradient", "both"] = "update", every_n_rounds: int = 1
    ) -> None:
        at_least(1, every_n_rounds=every_n_rounds)
        self.sources: tuple[Source, ...] = get_args(Source) if source == "both" else (source,)
        self.every_n_rounds = every_n_rounds
        self._due = False
        self._waiting: dict[int, dict[Source, Tensor]] = {}
        self._clients: dict[Source, dict[int, GradientSum]] = {}
        self._servers: dict[Source, list[GradientSum]] = {}
        self._server_start: State = {}
        self._server_version = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reject methods whose clients and server train parts of one network together."""
        if isinstance(pl_module, JointAlgorithm):
            raise ValueError(
                "GradientDiversity compares updates of one model, but the clients of "
                f"{type(pl_module).__name__} train "
                "the lower layers and the server the others: leave it out of trainer.callbacks"
            )

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Reset the sums, and determine whether this round is measured."""
        self._due = trainer.round_index % self.every_n_rounds == 0
        self._waiting = defaultdict(dict)
        self._clients = {source: defaultdict(GradientSum) for source in self.sources}
        self._servers = {source: [] for source in self.sources}

    def on_server_phase_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Measure the server's gradient, and store its initial weights."""
        if not self._due:
            return
        self._server_version = algorithm.server.version
        trained = {name for name, p in algorithm.named_parameters() if p.requires_grad}
        self._server_start = {
            n: p.clone() for n, p in algorithm.server.parameters.items() if n in trained
        }
        if "gradient" in self.sources:
            data = trainer.local_data(sampling.SERVER)
            work = algorithm.on_server_start(data)
            if work.num_steps:
                gradient = full_gradient(
                    trainer, algorithm, data, work, algorithm.server_training_step
                )
                self._add_server("gradient", gradient)

    def on_server_phase_end(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Measure the server's update, if it has trained."""
        if (
            self._due
            and "update" in self.sources
            and algorithm.server.version != self._server_version
        ):
            self._add_server(
                "update", _difference(self._server_start, algorithm.server.parameters, -1.0)
            )
        self._server_start = {}

    def on_client_start(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Measure a client's gradient.

        The working module has the weights that the client received.
        """
        if self._due and "gradient" in self.sources and work.num_steps:
            gradient = full_gradient(trainer, algorithm, data, work, algorithm.training_step)
            self._waiting[data.party]["gradient"] = gradient

    def on_client_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Measure a client's update."""
        if self._due and "update" in self.sources:
            change = _difference(update.parameters, algorithm.broadcast(update.client))
            self._waiting[update.client]["update"] = change

    def on_client_judged(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, client: int, accepted: bool
    ) -> None:
        """Add what was measured of a client to the sums of its group if the server accepts its
        update.
        """
        for source, gradient in self._waiting.pop(client, {}).items():
            if accepted:
                group = getattr(algorithm, "group_of", lambda _: 0)(client)
                self._clients[source][group].add(gradient)

    def on_aggregate(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Log the diversities over the accepted clients of all ranks."""
        if self._due:
            for source in self.sources:
                for name, value in diversities(
                    self._groups(trainer, source), self._servers[source]
                ).items():
                    if math.isfinite(value):
                        trainer.log(f"diversity/{source}_{name}", value)

    def _groups(self, trainer: TrainerView, source: Source) -> list[GradientSum]:
        """The sums of all ranks by group, in the order of the servers.

        A group without accepted clients has no sum.
        """
        own = dict(self._clients[source])
        ranks = trainer.gather(own)
        count = max(
            len(self._servers[source]),
            1 + max((group for part in ranks for group in part), default=-1),
        )
        return [merged(part[group] for part in ranks if group in part) for group in range(count)]

    def _add_server(self, source: Source, gradient: Tensor) -> None:
        self._servers[source].append(sum_gradients([gradient]))


def diversities(groups: list[GradientSum], servers: list[GradientSum]) -> dict[str, float]:
    """Every variant of diversity by its name; empty without a client.

    Args:
        groups: The sums over clients, one for each group; one without clients is in no mean over
            groups.
        servers: The sums of the server models: none, one for all groups, or one for each group.
    """
    if not any(group.count for group in groups):
        return {}
    found: dict[str, float] = {}
    everyone = {"": merged(groups)}
    servers = [server for server in servers if _length(server) == _length(everyone[""])]
    if servers:
        everyone["_with_server"] = merged([*groups, *servers])
    for (suffix, total), norm, squared in product(
        everyone.items(), get_args(NormName), (True, False)
    ):
        found[f"{norm}{'_squared' if squared else ''}{suffix}"] = total.diversity(
            norm, squared=squared
        )
    found["of_means"] = merged([*groups, *servers]).diversity_of_means()
    own = servers if len(servers) == len(groups) else servers[:1] * len(groups)
    inside = [
        merged([g, *own[index : index + 1]]).diversity_of_means()
        for index, g in enumerate(groups)
        if g.count
    ]
    found["of_means_in_groups"] = sum(inside) / len(inside)
    return found


def _length(total: GradientSum) -> int:
    """The number of weights; methods whose clients send a part of them have shorter sums of clients
    than of servers.
    """
    return 0 if total.total is None else total.total.numel()


def full_gradient(
    trainer: TrainerView,
    algorithm: FederatedAlgorithm,
    data: LocalData,
    work: LocalWork,
    step_loss: Callable[[Batch, int], Tensor | None],
) -> Tensor:
    """The gradient of a party's loss on all its images at the current weights, ``(weights,)``: the
    mean over batches.

    The function does not change weights, buffers, logs or torch's random state, nor a teacher that
    follows the steps.

    Args:
        trainer: The trainer, which sets the precision.
        algorithm: The working module.
        data: The party's data.
        work: The party's batches.
        step_loss: Computes the loss of a batch from the batch and the step's number.
    """
    parameters = [p for p in algorithm.parameters() if p.requires_grad]
    frozen = [p for p in algorithm.parameters() if not p.requires_grad]
    before = [(t, t.clone()) for t in (*frozen, *algorithm.buffers())]
    device = data.images.device
    total, count = (
        torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=device),
        0,
    )
    algorithm.train()
    with (
        recording(algorithm, []),  # what the steps log here is not of the round
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        torch.manual_seed(sampling.derive_key(data.seed, "diversity", data.round, data.party))
        for step in range(work.epoch_steps or work.num_steps):
            with trainer.fabric.autocast():
                loss = step_loss(work.batch(step), step)
            if loss is not None:
                total += _flat(torch.autograd.grad(loss, parameters, materialize_grads=True))
            count += 1
    for tensor, value in before:
        tensor.copy_(value)
    return total / max(count, 1)


def _difference(a: State, b: State, sign: float = 1.0) -> Tensor:
    """``sign (a - b)`` over the tensors of a, as one flat vector."""
    return _flat([sign * (t - b[name].to(t.device)) for name, t in a.items()])


def _flat(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])
