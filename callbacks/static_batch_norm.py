"""Static batch norm (sBN): statistics of the global model, computed apart from training (SemiFL,
App. B).
"""

from __future__ import annotations

import logging
from collections import ChainMap
from typing import TYPE_CHECKING, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.averaging import Sizes, sizes_of
from lightning_fedssl.functional.batch_norm import (
    BatchMoments,
    LayerMoments,
    Statistics,
    average_moments,
    batch_moments,
    has_static_batch_norm,
    measuring_batches,
)
from lightning_fedssl.functional.dictionaries import add_prefix
from lightning_fedssl.state import load_state

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import Direction

_log = logging.getLogger(__name__)


class StaticBatchNorm(FederatedCallback):
    """Computes the batch-norm statistics of the global model before it is sent and before it is
    evaluated.

    Training steps do not use the statistics. A client uses them when it labels images in evaluation
    mode. They are computed once for each change of the weights. Networks without static batch norm
    are not changed.

    The communication is logged. With ``moments``, every client of the federation, drawn or not,
    downloads the weights for each measurement, under the names ``for statistics ...``; in a
    deployment, every client that is connected. A client that is then drawn for these weights
    downloads only the statistics. With ``pooled``, every client uploads its unlabelled images, once
    in a run.

    Args:
        source: The images that the statistics are measured on. ``server``: the server's labelled
            images, without communication; the mean of the batches' means and variances.
            ``moments``: the images of all clients and of the server; each of them sends count, mean
            and variance per layer, and the server combines these exactly; a client that drops out
            of the round (``trainer.faults``) sends none. ``pooled``: all training images in one
            place, as in the authors' code: one sequence of batches, averaged like those of
            ``server``, first the labelled images class by class, then all others, including those
            that the partition assigns to no client; this breaks the privacy of a real federation.
        batch_size: Images per batch of the measurement.
        for_clients: Whether clients use the statistics. If not (as when labels come from the
            forward pass of training), they are computed only in rounds with an evaluation. The
            checkpoint of another round then has older statistics, which ``validate``, ``test`` and
            ``predict`` compute again.
    """

    saved = ("measured", "held", "has_images")

    def __init__(
        self,
        source: Literal["server", "moments", "pooled"] = "server",
        batch_size: int = 250,
        for_clients: bool = True,
    ) -> None:
        if batch_size < 2:
            raise ValueError(
                f"StaticBatchNorm.batch_size is {batch_size}: a variance needs at least 2 samples"
            )
        self.source = source
        self.batch_size = batch_size
        self.for_clients = for_clients
        self.reset()

    def reset(self) -> None:
        """Forget an earlier run."""
        # The version of the weights that the statistics belong to, and the source.
        self.measured = (-1, "")
        self.held = (-1, "")  # those that clients downloaded for a measurement in a round
        self.has_images = False  # whether the server has received the clients' images
        self._counts = True

    def on_train_start(  # type: ignore[override]
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> None:
        """Warn if the network has no static batch norm, and refuse a personal one."""
        personal_means = [name for name in algorithm.personal if name.endswith(".running_mean")]
        if personal_means and has_static_batch_norm(algorithm):
            raise ValueError(
                f"model.personal: {personal_means[0]} is measured on all clients' images: take "
                "model.network.norm batch"
            )
        if trainer.is_global_zero and not has_static_batch_norm(algorithm):
            _log.warning(
                "StaticBatchNorm has no effect: the network has no static batch norm; set "
                "model.network.init_args.norm: static_batch, or remove the callback"
            )

    def on_client_phase_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Compute the statistics of the model before clients receive it."""
        if self.for_clients:
            self._refresh_in_round(trainer, algorithm)
        if self.source == "moments" and self.held == (algorithm.server.version, self.source):
            algorithm.server.last_broadcast_version = algorithm.server.version

    def on_global_model(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Compute the statistics of the model before it is evaluated or saved."""
        if self.for_clients or trainer.evaluates_now:
            self._refresh_in_round(trainer, algorithm)

    def on_evaluation_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Compute the statistics of the model before it is evaluated.

        After a round without an evaluation this is a measurement that a run without a stop does not
        make. Later rounds do not depend on it: clients download the weights again. If a signal has
        stopped the run, the measurement is not counted either, because it only completes the model
        that is saved.
        """
        self._counts = not trainer.interrupted
        self._refresh(trainer, algorithm)
        self._counts = True

    def _refresh_in_round(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        self._refresh(trainer, algorithm)
        self.held = self.measured

    def _refresh(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        version = (algorithm.server.version, self.source)
        if self.measured == version or not has_static_batch_norm(algorithm):
            return
        load_state(algorithm, algorithm.server.model())
        with trainer.fabric.autocast():
            statistics = self._statistics(trainer, algorithm)
        for name, (mean, variance) in statistics.items():
            algorithm.server.buffers[f"{name}.running_mean"].copy_(mean)
            algorithm.server.buffers[f"{name}.running_var"].copy_(variance)
        self.measured = version

    def _statistics(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> Statistics:
        if self.source == "moments":
            moments_of_parties = self._all_moments(trainer, algorithm)
            combined = algorithm.federation.accepted_moments(moments_of_parties)
            return {name: (moments.mean, moments.variance) for name, moments in combined.items()}
        if self.source == "pooled" and self._counts and not self.has_images:
            self._send_images(trainer)
            self.has_images = True
        # Of the server in data-set order: every batch has many classes. Of all images the labelled
        # ones class by class, then the rest in data-set order.
        server = trainer.local_data(sampling.SERVER)
        images = server.labeled.sort().values
        if self.source == "pooled":
            by_class = server.labeled[server.labels.argsort(stable=True)]
            images = torch.cat([by_class, trainer.datamodule.images_outside_the_server()])
        batches = measuring_batches(images, self.batch_size)
        return average_moments(self._measure(trainer, algorithm, batches))

    @staticmethod
    def _measure(
        trainer: TrainerView, algorithm: FederatedAlgorithm, batches: list[Tensor]
    ) -> BatchMoments:
        """The moments of all batches of indices, which are divided among the ranks; they are
        bitwise those of one rank.
        """
        of_this_rank = batches[trainer.global_rank :: trainer.world_size]
        data = trainer.local_data(sampling.SERVER)
        measured = batch_moments(algorithm, map(data.plain, of_this_rank))
        if trainer.world_size == 1:
            return measured
        ranks = trainer.gather(move_data_to_device(measured, torch.device("cpu")))
        joined: BatchMoments = {}
        for name in measured:
            uses = sum(len(of_rank[name]) for of_rank in ranks) // max(1, len(batches))
            joined[name] = []
            for number in range(len(batches)):
                first = number // len(ranks) * uses
                joined[name] += ranks[number % len(ranks)][name][first : first + uses]
        return joined

    def _all_moments(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm
    ) -> dict[int, LayerMoments]:
        """The moments of the server and then of every client in order.

        The parties are divided among the ranks.
        """
        parties = range(sampling.SERVER, trainer.datamodule.num_clients)
        weights = add_prefix("for statistics ", sizes_of(algorithm.server.parameters))
        moments_of_rank = {}
        of_this_rank = parties[trainer.global_rank :: trainer.world_size]
        clients = [party for party in of_this_rank if party != sampling.SERVER]
        for client in algorithm.federation.reachable(clients):
            self._transfer(trainer, client, "down", weights)
        lost = set(filter(trainer.drops_out, clients))
        present = [party for party in of_this_rank if party not in lost]
        for party, moments in algorithm.federation.moments(present, self.batch_size):
            if moments:
                moments_of_rank[party] = moments
            if party != sampling.SERVER:
                self._transfer(trainer, party, "up", _sizes_of_moments(moments))
        on_cpu = (
            move_data_to_device(moments_of_rank, torch.device("cpu"))
            if trainer.world_size > 1
            else moments_of_rank
        )
        of_all = ChainMap(*trainer.gather(on_cpu))
        in_order = {party: of_all[party] for party in parties if party in of_all}
        moved: dict[int, LayerMoments] = move_data_to_device(in_order, trainer.fabric.device)
        return moved

    def _transfer(
        self, trainer: TrainerView, client: int, direction: Direction, sizes: Sizes
    ) -> None:
        if self._counts:
            trainer.algorithm.federation.transfer(client, direction, sizes)

    @staticmethod
    def _send_images(trainer: TrainerView) -> None:
        """Log the upload of the clients' unlabelled images.

        The clients are divided among the ranks.
        """
        clients = range(trainer.datamodule.num_clients)
        for client in clients[trainer.global_rank :: trainer.world_size]:
            data = trainer.local_data(client)
            trainer.algorithm.federation.transfer(
                client, "up", {"images": len(data.unlabeled) * data.images[0].nbytes}
            )


def _sizes_of_moments(moments: LayerMoments) -> Sizes:
    """Bytes of a client's moments by name.

    A count has 8 bytes. A client with too few images has no moments.
    """
    sizes: Sizes = {}
    for layer, layer_moments in moments.items():
        parts = {
            "count": 8,
            "mean": layer_moments.mean.nbytes,
            "variance": layer_moments.variance.nbytes,
        }
        sizes |= {f"moments.{layer}.{part}": size for part, size in parts.items()}
    return sizes
