"""Partitions that assign a pool of images, files of partitions, and rules of a user's own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.base import (
    ClientDirichlet,
    Dirichlet,
    FromFile,
    Iid,
    Partition,
    Shards,
    check_samples,
)
from lightning_fedssl.data.partition.class_skew import ClassSkew
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.flower import FlowerPartitions
from lightning_fedssl.data.partition.natural import FullyLabeledClients
from lightning_fedssl.data.partition.pooled import Pooled
from lightning_fedssl.data.partition.statistics import statistics
from tests.data.partition.helpers import (
    CIFAR_LABELS,
    Location,
    NumLabels,
    all_labeled,
    draw,
    drawn_with_unlabeled,
    hand_split,
    held,
    sizes,
)
from tests.toy import ToyData

partitions = st.one_of(
    st.builds(Iid),
    st.builds(Shards, st.integers(4, 8)),
    st.builds(Dirichlet, st.floats(1e-6, 1e3), st.integers(1, 20)),
)
locations: st.SearchStrategy[Location] = st.sampled_from(["server", "clients"])


@settings(max_examples=40, deadline=None)
@given(partitions, locations, st.integers(1, 25), st.integers(10, 99), st.integers(150, 600), st.integers(0, 2**31))
def test_every_split_is_disjoint_and_balanced(
    partition: Partition, location: Location, num_clients: int, num_labels: int, count: int, seed: int
) -> None:
    labels = torch.arange(count) * 7 % 10
    labels[::11] = -1
    if isinstance(partition, Shards):
        num_clients = max(num_clients, 3)
    split = draw(partition, labels, num_clients, num_labels, location, seed)
    labeled = all_labeled(split)
    everything = torch.cat([split.server_labeled, *map(held, split.clients)])
    assert len(everything) == len(everything.unique())
    assert (labels[everything] >= 0).all()
    assert len(labeled) == num_labels
    per_class = labels[labeled].bincount(minlength=10)
    assert per_class.max() - per_class.min() <= 1
    assert len(split.clients) == num_clients
    assert min(sizes(split)) >= 1
    if location == "server":
        assert all(len(client.labeled) == 0 for client in split.clients)
    else:
        assert len(split.server_labeled) == 0


@settings(max_examples=20, deadline=None)
@given(partitions, locations, st.integers(0, 1000))
def test_split_is_a_function_of_the_seed(partition: Partition, location: Location, seed: int) -> None:
    labels = torch.arange(400) % 10
    first, again = (draw(partition, labels, location=location, seed=seed) for _ in range(2))
    assert first.hash == again.hash
    other = draw(partition, labels, location=location, seed=seed + 1)
    assert [held(client).tolist() for client in other.clients] != [held(client).tolist() for client in first.clients]


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.floats(5e-324, 1e-3), st.floats(1e-3, 10), st.floats(10, 1e308)),
    st.integers(1, 300),
    st.integers(0, 2000),
    st.integers(1, 12),
    st.integers(1, 40),
)
def test_dirichlet_never_fails(alpha: float, num_clients: int, extra: int, num_classes: int, min_size: int) -> None:
    labels = torch.arange(num_clients + extra) % num_classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        parts = Dirichlet(alpha, min_size).assign(labels, num_clients, num_classes, sampling.rng(0, "test"))
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))
    assert min(map(len, parts)) >= min(min_size, len(labels) // num_clients)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.lists(st.integers(0, 60), min_size=5, max_size=5), st.integers(0, 99))
def test_shards_hold_at_most_k_classes_and_use_all_images(
    classes_per_client: int, num_clients: int, class_sizes: list[int], seed: int
) -> None:
    labels = torch.repeat_interleave(torch.arange(5), torch.tensor(class_sizes))
    present = sum(size > 0 for size in class_sizes)
    assume(len(labels) >= num_clients and classes_per_client * num_clients >= present)
    parts = Shards(classes_per_client).assign(labels, num_clients, 5, sampling.rng(seed, "test"))
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))
    assert all(1 <= len(labels[part].unique()) <= classes_per_client for part in parts)


def test_cifar_250_labels_iid_drops_the_remainder_as_published() -> None:
    assert sizes(draw(Iid(), CIFAR_LABELS, 100, 250)) == [497] * 100


def test_shards_are_cut_in_data_set_order() -> None:
    labels = torch.arange(40) % 2
    parts = Shards(1).assign(labels, 4, 2, sampling.rng(0, "test"))
    expected = [list(range(start, start + 20, 2)) for start in (0, 1, 20, 21)]
    assert sorted(part.tolist() for part in parts) == sorted(expected)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_dirichlet_bears_a_draw_that_underflows(value: float) -> None:
    class Underflowing(np.random.Generator):
        def dirichlet(self, alpha: Any, size: Any = None) -> Any:
            return np.full(len(alpha), value)

    labels = torch.arange(100) % 10
    parts = Dirichlet(0.1, min_size=1).assign(labels, 10, 10, Underflowing(np.random.Philox(0)))
    assert [len(part) for part in parts] == [10] * 10
    assert all(len(labels[part].unique()) == 1 for part in parts)


def test_dirichlet_gives_a_full_client_nothing_more() -> None:
    """At tiny alpha one client takes a whole class, so with as many classes as clients everyone gets one."""
    labels = torch.arange(1000) % 10
    split = draw(Dirichlet(1e-4, min_size=1), labels, 10, 10)
    assert sizes(split) == [99] * 10
    assert statistics(split, labels, 10).classes_per_client.tolist() == [1] * 10


def test_dirichlet_lowers_the_minimum_aloud_when_images_are_few() -> None:
    with pytest.warns(UserWarning, match=r"data\.partition: 50 samples are too few for 10 at each of 12.*at least 4"):
        parts = Dirichlet(0.1).assign(torch.arange(50) % 5, 12, 5, sampling.rng(0, "test"))
    assert min(map(len, parts)) == 4


def test_remainder_of_the_labels_goes_to_drawn_classes() -> None:
    extra = set()
    for seed in range(30):
        counts = CIFAR_LABELS[draw(Iid(), CIFAR_LABELS, 10, 43, seed=seed).server_labeled].bincount().tolist()
        assert sorted(counts) == [4] * 7 + [5] * 3
        extra |= {label for label, count in enumerate(counts) if count == 5}
    assert extra == set(range(10))


class Drawn(np.random.Generator):
    """A generator whose Dirichlet vectors are given, and whose permutations are the identity."""

    def __init__(self, *vectors: list[float]) -> None:
        super().__init__(np.random.Philox(0))
        self.vectors = list(vectors)

    def dirichlet(self, alpha: Any, size: Any = None) -> Any:
        return np.array(self.vectors.pop(0))

    def permutation(self, x: Any, axis: int = 0) -> Any:
        return x


def test_client_dirichlet_divides_each_class_by_the_clients_entries() -> None:
    """Class 0 (6 images) by 0.5 : 0.2 : 0.3 is 3, 1.2 and 1.8; class 1 (4 images) by 0.5 : 0.8 : 0.7 is 1, 1.6, 1.4."""
    labels = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 1, 0])
    parts = ClientDirichlet().assign(labels, 3, 2, Drawn([0.5, 0.5], [0.2, 0.8], [0.3, 0.7]))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    nobody = ClientDirichlet().assign(labels, 3, 2, Drawn([1.0, 0.0], [1.0, 0.0], [1.0, 0.0]))
    assert [part.tolist() for part in nobody] == [[0, 1, 2, 4], [3, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("num_clients", "num_labels", "location", "message"),
    [
        (10, 101, "server", r"data\.num_labels: 101 labels must cover 10 classes, and be at most the 100 samples"),
        (10, 101, "clients", r"data\.num_labels: 101 labels"),
        (10, 9, "server", r"data\.num_labels: 9 labels must cover 10 classes"),
        (91, 10, "server", r"data\.num_clients: 91 clients cannot share 90 samples"),
        (101, 10, "clients", r"data\.num_clients: 101 clients cannot share 100 samples"),
    ],
)
def test_impossible_numbers_name_the_key(num_clients: int, num_labels: int, location: Location, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(Iid(), torch.arange(100) % 10, num_clients, num_labels, location)


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Dirichlet, 0.0),
        (Dirichlet, float("nan")),
        (ClientDirichlet, float("inf")),
        (Shards, 0),
        (Pooled, 0),
        (FullyLabeledClients, 0),
        (ClassSkew, 1.5),
        (lambda n: Dirichlet(min_size=n), 0),
    ],
)
def test_senseless_arguments_are_refused(rule: Any, value: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.partition: \w+ of \w+ is {value}: give"):
        rule(value)


# FromFile


def test_from_file_repeats_a_partition_whatever_the_seed(tmp_path: Path) -> None:
    labels = torch.arange(400) % 10
    path = tmp_path / "partition.json"
    for location in ("server", "clients"):
        split = draw(Shards(2), labels, location=location, seed=1)
        split.save(path)
        assert draw(FromFile(str(path)), labels, location=location, seed=2).hash == split.hash


def test_from_file_repeats_clients_with_all_labels_or_none(tmp_path: Path) -> None:
    """Also with images that have no label, which the clients without labels hold."""
    labels = torch.arange(400) % 10
    labels[::20] = -1
    asked = SplitRequest(labels, 10, 5, "all", "clients", without_label=torch.arange(0, 400, 20))
    drawn = {count: drawn_with_unlabeled(FullyLabeledClients(count), asked) for count in (1, 2)}
    drawn[1].save(tmp_path / "p.json")
    source = FromFile(str(tmp_path / "p.json"))
    assert drawn_with_unlabeled(source, asked).hash == drawn[1].hash
    assert drawn_with_unlabeled(FullyLabeledClients(2, source), asked).hash == drawn[2].hash
    with pytest.raises(ValueError, match=r"data\.num_labels: 40, but .* has 76 labels"):
        source.check(drawn[1], replace(asked, num_labels=40))
    with pytest.raises(ValueError, match=r"data\.label_location: 'server', but .* and 76 at the clients"):
        source.check(drawn[1], replace(asked, label_location="server"))


def test_from_file_reads_the_partitions_of_rscfed_s_and_cbafed_s_authors(tmp_path: Path) -> None:
    path = tmp_path / "SVHN_noniid_10%labeled.pth"
    torch.save({"data_partition": {0: [5, 1], 1: [0, 4, 2], 2: [3]}}, path)
    asked = SplitRequest(torch.arange(6) % 2, 2, 3, "all", "clients")
    split = FullyLabeledClients(1, FromFile(str(path))).split(asked, sampling.rng(0, "test"))
    assert [own.labeled.tolist() for own in split.clients] == [[1, 5], [], []]
    assert [own.unlabeled.tolist() for own in split.clients] == [[], [0, 2, 4], [3]]


@pytest.mark.parametrize("num_labels", [40, "all"])
def test_from_file_repeats_labels_at_the_clients_beside_images_of_the_server(
    tmp_path: Path, num_labels: NumLabels
) -> None:
    labels = torch.arange(400) % 10
    split = draw(ClassSkew(0.4, server_images=20), labels, num_labels=num_labels, location="clients")
    split.save(tmp_path / "p.json")
    source = FromFile(str(tmp_path / "p.json"))
    assert draw(source, labels, num_labels=num_labels, location="clients").hash == split.hash
    with pytest.raises(ValueError, match=r"data\.label_location: 'server', but .* has 20 labels at the server and"):
        draw(source, labels, num_labels=num_labels, location="server")


@pytest.mark.parametrize(("classes_per_client", "clients"), [(6, 4), (1, 3)])
def test_shards_that_cannot_hold_all_classes_are_refused(classes_per_client: int, clients: int) -> None:
    with pytest.raises(ValueError, match=f"{classes_per_client * clients} shards .* cannot hold all 5 classes"):
        Shards(classes_per_client).assign(torch.arange(50) % 5, clients, 5, sampling.rng(0, "test"))


def test_few_samples_with_a_class_are_shared_beside_those_without() -> None:
    """Labels of 2 of 3 images are at the server: 4 clients share the third, and 4 images without a label."""
    asked = SplitRequest(torch.tensor([0, 1, 0, -1, -1, -1, -1]), 2, 4, 2, "server", without_label=torch.arange(3, 7))
    split = Iid().split(asked, sampling.rng(0, "test"))
    whole = Iid().add_unlabeled(split, asked, sampling.rng(0, "test"))
    assert [len(client.unlabeled) for client in whole.clients] == [2, 1, 1, 1]
    with pytest.raises(ValueError, match=r"data\.num_clients: 5 clients cannot share 1 samples"):
        Iid().split(replace(asked, num_clients=5), sampling.rng(0, "test"))


def test_a_sample_without_label_is_not_assigned_as_labelled() -> None:
    asked = SplitRequest(torch.tensor([0, 1, 0, -1]), 2, 1, 2, "server", without_label=torch.tensor([3]))
    made = hand_split([1], server=[0, 3])
    with pytest.raises(ValueError, match="mine gives samples without a label as labelled ones"):
        check_samples(made, asked, "mine", "")


def test_from_file_refuses_what_does_not_fit(tmp_path: Path) -> None:
    labels = torch.arange(400) % 10
    path = tmp_path / "p.json"
    draw(Iid(), labels).save(path)
    source = FromFile(str(path))
    asked: list[tuple[dict[str, Any], str]] = [
        ({"num_clients": 11}, r"data\.num_clients: 11, but .* has 10 clients"),
        ({"num_labels": 50}, r"data\.num_labels: 50, but .* has 40 labels"),
        ({"num_labels": "all"}, r"data\.num_labels: all, but"),
        ({"location": "clients"}, r"data\.label_location: 'clients', but"),
        ({"labels": labels[:300]}, "names the samples 0 to 399 of 300"),
    ]
    for settings_asked, message in asked:
        with pytest.raises(ValueError, match=message):
            draw(source, **{"labels": labels} | settings_asked)
    held_out = labels.clone()
    held_out[:200] = -1
    with pytest.raises(ValueError, match=r"samples that this run holds out; use the data set, seed_everything"):
        draw(source, held_out)


# Rules of a user's own


class Fixed(Partition):
    """A partition of a user's own, which returns what it is given."""

    def __init__(self, server: list[int], *clients: tuple[list[int], list[int]]) -> None:
        self.server = server
        self.clients = clients

    def split(self, asked: SplitRequest, generator: np.random.Generator) -> FederatedSplit:
        def tensor(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64)

        clients = [ClientIndices(tensor(labeled), tensor(unlabeled)) for labeled, unlabeled in self.clients]
        return FederatedSplit(asked.seed, tensor(self.server), clients)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (Fixed([0], ([], [1, 1]), ([], [2])), "assigns a sample twice"),
        (Fixed([0], ([2], [2]), ([], [1])), "assigns a sample twice"),
        (Fixed([0, 0], ([], [2]), ([], [1])), "assigns a sample twice"),
        (Fixed([0], ([], [120]), ([], [1])), "names the samples 0 to 120 of 120"),
        (Fixed([0], ([], [-1]), ([], [1])), "names the samples -1 to 1 of 120"),
        (Fixed([0], ([], [1])), "made 1 clients, but data.num_clients is 2"),
        (Fixed([0], ([], [2]), ([], list(range(3, 120)))), "assigns samples that this run holds out"),
    ],
)
def test_a_split_of_a_user_s_own_is_checked(partition: Partition, message: str) -> None:
    """Nothing else keeps the held-out samples, and their labels, out of training."""
    with pytest.raises(ValueError, match=rf"data\.partition: Fixed {message}"):
        ToyData(partition=partition, num_clients=2, validation=0.25).setup("fit")


def test_parties_may_share_samples_which_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = ToyData(partition=Fixed([0], ([], [0, 1]), ([], [1])), num_clients=2, num_labels=1, validation=0)
    data.setup("fit")
    assert [data.local_data(client, 1).unlabeled.tolist() for client in range(2)] == [[0, 1], [1]]
    (message,) = {record.getMessage() for record in caplog.records}
    assert "Fixed assigns 4 samples, but only 2 different ones" in message
    data.split.save(tmp_path / "p.json")
    again = ToyData(partition=FromFile(str(tmp_path / "p.json")), num_clients=2, num_labels=1, validation=0)
    again.setup("fit")
    assert again.split.hash == data.split.hash


class Assigns(Partition):
    """A rule of a user's own with one mistake, which gives both clients the same kind of positions."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def assign(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> Any:
        return self.parts


@pytest.mark.parametrize("parts", [None, [[0]], [[0], [999]], [[-1], [1]], [["a"], [1]]])
def test_a_mistake_in_a_rule_of_a_user_s_own_is_named(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.partition: Assigns\.assign must return for every client the"):
        ToyData(partition=Assigns(parts), num_clients=2).setup("fit")


def test_a_rule_may_give_arrays_and_lists() -> None:
    data = ToyData(partition=Assigns([np.array([3, 1]), []]), num_clients=2, num_labels=3, validation=0)
    data.setup("fit")
    assert data.statistics.sizes.tolist() == [2, 0]


def test_partitioners_of_flower_divide_the_pool() -> None:
    """The second draw of one object is the first: flwr-datasets takes a data set once."""
    flwr = pytest.importorskip("flwr_datasets.partitioner")
    rule = flwr.PathologicalPartitioner(10, "label", 2, class_assignment_mode="deterministic")
    partition = FlowerPartitions(rule)
    first, again = ([client.unlabeled.tolist() for client in draw(partition, CIFAR_LABELS).clients] for _ in range(2))
    assert first == again
    assert [len(CIFAR_LABELS[client].unique()) for client in first] == [2] * 10
    with pytest.raises(ValueError, match=r"\(klass\) not in .* in the column label"):
        draw(FlowerPartitions(flwr.DirichletPartitioner(10, "klass", alpha=1)), CIFAR_LABELS)
