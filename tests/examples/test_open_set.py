"""Unlabelled images of classes that the server does not know, and of another domain."""

from pathlib import Path

import pytest
import torch
from examples.domains import ClientsOfAnotherDomain, TwoDomains
from examples.open_set import KnownOrNot, OpenSet

from lightning_fedssl import FederatedDataModule, Iid, Supervised
from lightning_fedssl.data import datasets
from lightning_fedssl.models import MLP
from tests.toy import toy_trainer


def test_unknown_images_are_at_the_clients_and_the_auroc_is_the_share_of_ordered_pairs(tmp_path: Path) -> None:
    source = OpenSet()
    data, model = FederatedDataModule(source, num_clients=4, num_labels=30, validation=0.1), Supervised(network=MLP)
    trainer = toy_trainer(tmp_path, callbacks=[KnownOrNot()], max_rounds=1)
    trainer.fit(model, data)
    truth = datasets.load("digits")[1].labels
    assert (truth[data.split.server_labeled] < 6).all()
    assert (truth[data.split.client_list.unlabeled.values] >= 6).sum() == (truth >= 6).sum() > 500
    known = torch.cat([images for images, _ in data.evaluation_batches("test")])
    unknown = data.inputs.views().plain(source.unknown, torch.zeros(0, dtype=torch.int64))
    first, second = (model(images).softmax(1).amax(1).detach() for images in (known, unknown))
    pairs = (first[:, None] > second).double() + 0.5 * (first[:, None] == second)
    assert trainer.test(model, data)[0]["test/auroc_known"] == pytest.approx(pairs.mean().item(), abs=1e-6)


def test_labels_are_of_the_first_domain_and_the_clients_have_the_other_one_with_a_tail() -> None:
    partition = ClientsOfAnotherDomain(Iid(), server_images=400, tail=0.2)
    data = FederatedDataModule(TwoDomains("digits", "digits", server_images=400), partition=partition)
    data.setup()
    held, counts = data.split.client_list.unlabeled.values, data.statistics.class_counts.sum(dim=0)
    assert data.split.server_labeled.max() < 400 <= held.unique().min()
    assert 0 < 2 * counts[9] < counts[0]
