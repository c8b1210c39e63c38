"""FixMatch with labels at every client, where the received global model labels images too."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from lightning_fedssl.algorithms.common.site_shares import received_shift
from lightning_fedssl.algorithms.fixmatch import FixMatch
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork, labeled_work, side_by_side, unlabeled_work
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.storage.hyperparameters import hyperparameters


@hyperparameters
class ReceivedModelLabels(FixMatch):
    """The local training that SAGE and ProxyFL share.

    A client takes E times ``floor(n / B)`` steps, with n its images, labelled ones included. A step
    has a batch of B labelled images, and mu B of all n without their labels. The received model
    stays in evaluation mode in ``self.received["network"]``.

    Args:
        unlabeled_ratio: mu: a step has ``mu * data.client_batch_size`` images without labels.
        client_epochs: E, each of as many steps as a client has batches of
            ``data.client_batch_size`` images.
    """

    needs = "one class"
    labels_at = "clients"
    clients_use_statistics = True
    local_modules = frozenset({"received"})

    unlabeled_ratio: int = 2
    client_epochs: float = 5

    def build_parts(self) -> None:
        """Build a copy of the network for the received global model."""
        self.received = Teacher({"network": self.network})

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Keep the received model for the round, and return batches of labelled images and of all
        images without their labels.
        """
        self.received.follow({"network": self.network}, 0.0)
        images = torch.cat([data.unlabeled, data.labeled])
        steps = self.client_steps
        if steps is None:
            steps = math.ceil(self.client_epochs * self.epoch_steps(data))
        size = self.unlabeled_ratio * data.batch_size
        shift = received_shift(self, data)
        everything = replace(data, unlabeled=images)
        unlabeled = unlabeled_work(everything, steps=steps, batch_size=size, shift=shift)
        return replace(
            side_by_side(unlabeled, labeled_work(data, steps=steps)), num_samples=len(images)
        )

    def epoch_steps(self, data: LocalData) -> int:
        """Steps of a client in an epoch: ``floor(n / B)``, at least one."""
        return max(1, (len(data.unlabeled) + len(data.labeled)) // data.batch_size)
