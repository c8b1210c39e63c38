"""Data sharing: every user trains on its own images and on a part of a small, class-balanced,
shared labelled set.

Y. Zhao, M. Li, L. Lai, N. Suda, D. Civin, V. Chandra, "Federated Learning with Non-IID Data", arXiv
1806.00582; here as FedRGD's Table III compares it, with T steps a round.

The server holds the shared set G. A run:

1. for some rounds the server alone trains the model on G (the warm-up);
2. then users train: each takes T supervised steps from the average, on the union of its own images
   and a random share a of G, which is drawn once;
3. the server averages with weights by number of images (FedAvg).

FedRGD does not state the size of G or the length of the warm-up; here they are ``server_images`` of
the partition and ``warmup_rounds``. The momentum of users does not persist between rounds, as in
FedAvg.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.cohort_slots import SlotAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork, labeled_work

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.round import Federation


class DataSharing(SlotAlgorithm):
    """Federated averaging with supervised users that share some labelled data.

    Args:
        share: a, the fraction of the server's labelled images that every user receives; 0 is FedAvg
            with a warm-up.
        warmup_rounds: Rounds of T steps in which the server alone trains; they are included in
            ``max_rounds``.
        keep_client_optimizer: The momentum of a cohort slot persists between rounds.
        kwargs: The arguments of :class:`SlotAlgorithm`, with those of federated averaging.
    """

    not_deployable = "gives clients images of the server"
    labels_at = "clients"

    def __init__(
        self,
        share: float = 1.0,
        warmup_rounds: int = 0,
        keep_client_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(keep_client_optimizer=keep_client_optimizer, **kwargs)
        checks.require(0 <= share <= 1, "share", share, "give a fraction from 0 to 1")
        checks.at_least(0, warmup_rounds=warmup_rounds)
        self.share = share
        self.warmup_rounds = warmup_rounds
        self.shared_images, self.shared_labels = torch.zeros(2, 0, dtype=torch.int64)

    def check_data(self, data: FederatedDataModule) -> None:
        """Users need labels of their own, and the server some to share."""
        super().check_data(data)
        remedy = (
            "the server has no images to share; set data.partition to ClassSkew with server_images"
        )
        checks.require(self.server_takes_part, "share", self.share, remedy)
        shared = data.local_data(sampling.SERVER, 0)
        self.shared_images = shared.labeled
        self.shared_labels = shared.labels

    def on_round_start(self) -> None:
        """Assign the slots, in rounds in which the users train."""
        if not self.is_warming_up:
            super().on_round_start()

    @property
    def is_warming_up(self) -> bool:
        """Whether this is a round of the warm-up, in which the server alone trains."""
        return self.current_round.index <= self.warmup_rounds

    def round(self, federation: Federation) -> None:
        """The server alone trains in the warm-up, the users alone after it."""
        if self.is_warming_up:
            federation.train_server()
        else:
            super().round(federation)

    def shared_with(self, data: LocalData) -> Tensor:
        """Rows of the shared images that a user has,
        the same in all rounds: ``(share * shared,)``.
        """
        count = len(self.shared_images)
        order = sampling.permutation(count, data.seed, "shared", data.party)
        return order[: round(self.share * count)].to(self.shared_images.device)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """T batches of the user's own images and its share of the others, shuffled together."""
        rows = self.shared_with(data)
        labeled = torch.cat([data.labeled, self.shared_images[rows]])
        labels = torch.cat([data.labels, self.shared_labels[rows]])
        return labeled_work(replace(data, labeled=labeled, labels=labels), steps=self.local_steps)
