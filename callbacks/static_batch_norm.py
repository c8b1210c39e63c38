"""Static batch norm (sBN): statistics of the global model, computed apart from training (SemiFL, App. B)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.averaging import sizes_of
from lightning_fedssl.functional.batch_norm import (
    Moments,
    combine_moments,
    estimate_statistics,
    has_static_batch_norm,
    local_moments,
    moments_on_cpu,
)
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.trainer_interface import TrainerInterface

_log = logging.getLogger(__name__)

Statistics = dict[str, tuple[Tensor, Tensor]]


class StaticBatchNorm(FederatedCallback):
    """Computes the batch-norm statistics of the global model before it is sent and before it is evaluated.

    Training steps never read them; a client reads them where it labels images in evaluation mode. They are computed
    once for each change of the weights. Networks without static batch norm are left alone.

    What this costs is counted as traffic. With ``moments`` every client of the federation, drawn or not, is sent the
    weights for each sweep, under the names ``for statistics ...``; one that is then drawn for these weights is sent the
    statistics alone. With ``pooled`` every client sends its unlabelled images, once in a run.

    Args:
        source: Whose images give the statistics. ``server``: the labelled ones, no traffic. ``moments``: all clients'
            and the server's; each sends count, mean and variance per layer and they are combined exactly. ``pooled``:
            all training images in one place, as the authors' code does: one sequence of batches, first the labelled
            images class by class, then all others, also those that the partition assigns to no client; it breaks the
            privacy of a real federation.
        average: ``batches``: plain mean of the batches' means and variances, as the authors' code does; ``exact``:
            moments of all images together. ``auto``: exact for ``moments``, else batches.
        batch_size: Images per pass.
        for_clients: Whether clients read them. If not, as with labels from the pass that is trained, they are computed
            where a round is evaluated; a checkpoint of another round holds older ones, which ``validate``, ``test``
            and ``predict`` replace.
    """

    def __init__(
        self,
        source: Literal["server", "moments", "pooled"] = "server",
        average: Literal["auto", "batches", "exact"] = "auto",
        batch_size: int = 250,
        for_clients: bool = True,
    ) -> None:
        if batch_size < 2:
            raise ValueError(f"StaticBatchNorm.batch_size is {batch_size}: a variance needs at least 2 images")
        if source == "moments" and average == "batches":
            raise ValueError(
                "StaticBatchNorm: source moments combines exactly; leave average out, or use source pooled"
            )
        self.source = source
        self.average: Literal["batches", "exact"] = "exact" if average == "exact" else "batches"
        self.batch_size = batch_size
        self.for_clients = for_clients
        self.version = -1

    def on_train_start(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:  # type: ignore[override]
        """Warn if there is nothing to do."""
        if trainer.is_global_zero and not has_static_batch_norm(algorithm):
            _log.warning(
                "StaticBatchNorm has no effect: the network has no static batch norm; set "
                "model.network.init_args.norm: static_batch, or remove the callback"
            )

    def on_client_phase_start(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Complete the model that is about to be sent."""
        if self.for_clients:
            self._refresh(trainer, algorithm)
        if self.source == "moments" and self.version == algorithm.server.version:
            algorithm.server.last_broadcast_version = self.version

    def on_global_model(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Complete the model that is about to be evaluated or saved."""
        if self.for_clients or trainer.evaluates_now:
            self._refresh(trainer, algorithm)

    def on_evaluation_start(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        """Complete the model that is about to be evaluated."""
        self._refresh(trainer, algorithm)

    def state_dict(self) -> dict[str, Any]:
        """Which weights the present statistics belong to."""
        return {"version": self.version, "source": self.source, "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; statistics of another source are computed anew."""
        same = (state_dict["source"], state_dict["average"]) == (self.source, self.average)
        self.version = state_dict["version"] if same else -1

    def split(self, indices: Tensor) -> list[Tensor]:
        """Batches of indices; a remainder of one image has no variance and joins the batch before it."""
        parts = [part for part in indices.split(self.batch_size) if len(part)]
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        return parts

    def _refresh(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> None:
        if self.version == algorithm.server.version or not has_static_batch_norm(algorithm):
            return
        load_state(algorithm, algorithm.server.model())
        with trainer.fabric.autocast():
            statistics = self._statistics(trainer, algorithm)
        for name, (mean, variance) in statistics.items():
            algorithm.server.buffers[f"{name}.running_mean"].copy_(mean)
            algorithm.server.buffers[f"{name}.running_var"].copy_(variance)
        self.version = algorithm.server.version

    def _statistics(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> Statistics:
        if self.source == "moments":
            combined = combine_moments(self._all_moments(trainer, algorithm))
            return {name: (moments.mean, moments.variance) for name, moments in combined.items()}
        if self.source == "pooled" and self.version == -1:
            self._send_images(trainer)
        batches = self._labeled_batches(trainer) if self.source == "server" else self._pooled_batches(trainer)
        return estimate_statistics(algorithm, batches, self.average)

    def _labeled_batches(self, trainer: TrainerInterface) -> Iterator[Tensor]:
        """Data-set order mixes the classes, so that a batch's variance is one over classes."""
        data = trainer.local_data(sampling.SERVER)
        return map(data.plain, self.split(data.labeled.sort().values))

    def _pooled_batches(self, trainer: TrainerInterface) -> Iterator[Tensor]:
        """One sequence: the labelled images class by class, then all others in data-set order."""
        data = trainer.local_data(sampling.SERVER)
        by_class = data.labels.argsort(stable=True)
        images = torch.cat([data.labeled[by_class], trainer.datamodule.images_outside_the_server()])
        return map(data.plain, self.split(images))

    def _all_moments(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm) -> list[dict[str, Moments]]:
        """Every party's moments, the server's first, then in the clients' order; the ranks share the work."""
        parties = range(sampling.SERVER, trainer.datamodule.num_clients)
        weights = {f"for statistics {name}": size for name, size in sizes_of(algorithm.server.parameters).items()}
        mine = {}
        for party in parties[trainer.global_rank :: trainer.world_size]:
            moments = self._moments_of(trainer.local_data(party), algorithm)
            if moments:
                mine[party] = moments
            if party != sampling.SERVER:
                trainer.transfer(party, "down", weights)
                trainer.transfer(party, "up", _sizes_of_moments(moments))
        sent = moments_on_cpu(mine) if trainer.world_size > 1 else mine
        everyone = {party: moments for part in trainer.gather(sent) for party, moments in part.items()}
        return [everyone[party] for party in parties if party in everyone]

    def _moments_of(self, data: LocalData, algorithm: FederatedAlgorithm) -> dict[str, Moments]:
        indices = torch.cat([data.labeled, data.unlabeled])
        return local_moments(algorithm, map(data.plain, self.split(indices))) if len(indices) > 1 else {}

    @staticmethod
    def _send_images(trainer: TrainerInterface) -> None:
        """Note that the clients' unlabelled images leave them; the ranks share the clients."""
        clients = range(trainer.datamodule.num_clients)
        for client in clients[trainer.global_rank :: trainer.world_size]:
            data = trainer.local_data(client)
            trainer.transfer(client, "up", {"images": len(data.unlabeled) * data.images[0].nbytes})


def _sizes_of_moments(moments: dict[str, Moments]) -> dict[str, int]:
    """Bytes of a client's moments by name; a count is a 64-bit number. A client with too few images has none."""
    sizes: dict[str, int] = {}
    for layer, found in moments.items():
        parts = {"count": 8, "mean": found.mean.nbytes, "variance": found.variance.nbytes}
        sizes |= {f"moments.{layer}.{part}": size for part, size in parts.items()}
    return sizes
