from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.partition.base import Dirichlet, FromFile, Iid, Partition, Shards
from lightning_fedssl.data.partition.class_balance import choose_balanced, choose_stratified, even_counts
from lightning_fedssl.data.partition.class_skew import ClassSkew
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.natural import FullyLabeledClients
from lightning_fedssl.data.partition.pooled import Pooled
from lightning_fedssl.data.partition.statistics import heatmap, statistics
from tests.toy import ToyData

CIFAR_LABELS = torch.arange(50000) % 10
NumLabels = int | Literal["all"]
Location = Literal["server", "clients"]

partitions = st.one_of(
    st.builds(Iid, st.booleans()),
    st.builds(Shards, st.integers(4, 8)),
    st.builds(Dirichlet, st.floats(1e-6, 1e3), st.integers(1, 20)),
)
locations: st.SearchStrategy[Location] = st.sampled_from(["server", "clients"])


def draw(
    partition: Partition,
    labels: Tensor,
    num_clients: int = 10,
    num_labels: NumLabels = 40,
    location: Location = "server",
    seed: int = 0,
    num_classes: int = 10,
) -> FederatedSplit:
    generator = sampling.rng(seed, "partition")
    asked = SplitRequest(labels, num_classes, num_clients, num_labels, location, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        split = partition.split(asked, generator)
    partition.check(split, asked)
    return split


def drawn_with_unlabeled(partition: Partition, asked: SplitRequest) -> FederatedSplit:
    split = partition.split(asked, sampling.rng(0, "partition"))
    split = partition.add_unlabeled(split, asked, sampling.rng(0, "unlabeled"))
    partition.check(split, asked)
    return split


def held(client: ClientIndices) -> Tensor:
    return torch.cat([client.labeled, client.unlabeled])


def all_labeled(split: FederatedSplit) -> Tensor:
    return torch.cat([split.server_labeled, *(client.labeled for client in split.clients)])


def sizes(split: FederatedSplit) -> list[int]:
    return [len(held(client)) for client in split.clients]


def hand_split(*clients: list[int], server: list[int] | None = None) -> FederatedSplit:
    empty = torch.zeros(0, dtype=torch.int64)
    parts = [ClientIndices(empty, torch.tensor(client, dtype=torch.int64)) for client in clients]
    return FederatedSplit(3, torch.tensor(server or [], dtype=torch.int64), parts)


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
    assert len(labeled) == split.num_labeled == num_labels
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


def test_split_leaves_global_random_states_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    draw(Dirichlet(0.1), torch.arange(400) % 10)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert all(np.array_equal(a, b) for a, b in zip(numpy_state, np.random.get_state(), strict=True))


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


def test_cifar_iid_is_100_clients_with_460_images() -> None:
    split = draw(Iid(), CIFAR_LABELS, 100, 4000)
    assert sizes(split) == [460] * 100
    assert CIFAR_LABELS[split.server_labeled].bincount().tolist() == [400] * 10


def test_cifar_250_labels_iid_drops_the_remainder_as_published() -> None:
    assert sizes(draw(Iid(), CIFAR_LABELS, 100, 250)) == [497] * 100
    assert sorted(sizes(draw(Iid(drop_remainder=False), CIFAR_LABELS, 100, 250))) == [497] * 50 + [498] * 50


def test_cifar_two_classes_per_client() -> None:
    split = draw(Shards(2), CIFAR_LABELS, 100, 4000)
    assert sizes(split) == [460] * 100
    classes = [len(CIFAR_LABELS[client.unlabeled].unique()) for client in split.clients]
    assert set(classes) == {1, 2}
    dealt = torch.cat([client.unlabeled for client in split.clients])
    assert CIFAR_LABELS[dealt].bincount().tolist() == [4600] * 10


def test_shards_are_cut_in_data_set_order() -> None:
    labels = torch.arange(40) % 2
    parts = Shards(1).assign(labels, 4, 2, sampling.rng(0, "test"))
    expected = [list(range(start, start + 20, 2)) for start in (0, 1, 20, 21)]
    assert sorted(part.tolist() for part in parts) == sorted(expected)


def test_one_client_in_eleven_draws_one_class_twice() -> None:
    """Of 20 shards of each of 10 classes: the second is of the first's class with probability 19 / 199."""
    doubles = [
        len(CIFAR_LABELS[part].unique()) == 1
        for seed in range(20)
        for part in Shards(2).assign(CIFAR_LABELS[:5000], 100, 10, sampling.rng(seed, "test"))
    ]
    assert np.mean(doubles) == pytest.approx(19 / 199, abs=0.02)


@pytest.mark.parametrize(("num_clients", "alpha"), [(100, 0.3), (100, 0.1), (100, 0.05), (500, 0.3)])
def test_cifar_dirichlet_uses_all_and_leaves_nobody_short(num_clients: int, alpha: float) -> None:
    split = draw(Dirichlet(alpha), CIFAR_LABELS, num_clients, 4000)
    assert sum(sizes(split)) == 46000
    assert min(sizes(split)) >= 10


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


def test_dirichlet_is_more_uneven_for_smaller_alpha() -> None:
    skews = [
        statistics(draw(Dirichlet(a), CIFAR_LABELS, 100, 4000), CIFAR_LABELS, 10).class_skew for a in (0.1, 1, 100)
    ]
    assert skews[0] > skews[1] > skews[2]


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


def test_short_class_gives_all_it_has() -> None:
    labels = torch.tensor([0] * 3 + [1] * 50 + [2] * 50)
    chosen = choose_balanced(labels, 30, 3, sampling.rng(0, "test"))
    assert sorted(labels[chosen].bincount().tolist()) == [3, 13, 14]


def test_even_counts_fill_up_to_capacity() -> None:
    counts = even_counts(np.array([1, 0, 100, 5]), 20, sampling.rng(0, "test"))
    assert counts.tolist() == [1, 0, 14, 5]


def test_stratified_choice_keeps_the_proportions() -> None:
    labels = torch.tensor([0] * 10 + [1] * 20 + [2] * 70)
    chosen = choose_stratified(labels, 20, 3, sampling.rng(0, "test"))
    assert labels[chosen].bincount().tolist() == [2, 4, 14]
    assert labels[choose_stratified(labels, 5, 3, sampling.rng(0, "test"))].bincount(minlength=3).sum() == 5


def test_all_labels_at_the_server_leave_the_clients_empty() -> None:
    split = draw(Iid(), torch.arange(50) % 10, 100, "all")
    assert len(split.server_labeled) == 50
    assert sizes(split) == [0] * 100


def test_all_labels_at_the_clients_leave_nothing_unlabelled() -> None:
    split = draw(Dirichlet(0.3), torch.arange(500) % 10, 10, "all", "clients")
    assert split.num_labeled == 500
    assert all(len(client.unlabeled) == 0 for client in split.clients)


def test_unknown_images_are_nobodys() -> None:
    labels = torch.arange(100) % 10
    labels[40:] = -1
    split = draw(Iid(), labels, 3, 10)
    assert sum(sizes(split)) == 30
    assert max(int(held(client).max()) for client in split.clients) < 40


@pytest.mark.parametrize(
    ("num_clients", "num_labels", "location", "message"),
    [
        (10, 101, "server", r"data\.num_labels: 101 labels, but only 100 training samples"),
        (10, 101, "clients", r"data\.num_labels: 101 labels, but only 100 training samples"),
        (10, 9, "server", r"data\.num_labels: 9 labels cannot cover 10 classes"),
        (91, 10, "server", r"data\.num_clients: 91 clients cannot share 90 samples"),
        (101, 10, "clients", r"data\.num_clients: 101 clients cannot share 100 samples"),
    ],
)
def test_impossible_numbers_name_the_key(num_clients: int, num_labels: int, location: Location, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(Iid(), torch.arange(100) % 10, num_clients, num_labels, location)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_dirichlet_refuses_a_senseless_alpha(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"data\.partition: alpha of Dirichlet must be a finite number above 0"):
        Dirichlet(alpha)


def test_constructors_refuse_senseless_counts() -> None:
    with pytest.raises(ValueError, match="min_size of Dirichlet must be at least 1"):
        Dirichlet(min_size=0)
    with pytest.raises(ValueError, match="classes_per_client must be at least 1"):
        Shards(0)


def test_shards_refuse_more_classes_than_there_are_and_too_few_shards() -> None:
    labels = torch.arange(200) % 10
    with pytest.raises(ValueError, match=r"data\.partition: classes_per_client is 11, but .* only 10 classes"):
        draw(Shards(11), labels, 10, 10)
    with pytest.raises(ValueError, match=r"data\.partition: 8 shards .* cannot hold all 10 classes"):
        draw(Shards(2), labels, 4, 10)


def test_users_own_partition_needs_only_deal() -> None:
    class EveryThird(Partition):
        def assign(
            self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator
        ) -> list[Tensor]:
            return [torch.arange(client, len(labels), 3) for client in range(3)]

    labels = torch.arange(100) % 10
    split = draw(EveryThird(), labels, 3, 10)
    assert sizes(split) == [30, 30, 30]
    with pytest.raises(ValueError, match=r"EveryThird\.assign returned 3 entries; return a list .* of 4 clients"):
        draw(EveryThird(), labels, 4, 10)


def test_partition_without_a_rule_says_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match="Partition must override assign or split"):
        draw(Partition(), torch.arange(100) % 10)


def test_saved_split_loads_equal(tmp_path: Path) -> None:
    split = draw(Dirichlet(0.1), torch.arange(400) % 10, location="clients", seed=5)
    path = tmp_path / "run" / "partition.json"
    split.save(path)
    content = json.loads(path.read_text())
    assert list(content) == ["seed", "server_labeled", "clients", "hash"]
    assert all(list(client) == ["labeled", "unlabeled"] for client in content["clients"])
    again = FederatedSplit.load(path)
    assert (again.seed, again.hash) == (5, split.hash)
    for ours, theirs in zip(split.clients, again.clients, strict=True):
        assert torch.equal(ours.labeled, theirs.labeled)
        assert torch.equal(ours.unlabeled, theirs.unlabeled)
    assert [entry.name for entry in path.parent.iterdir()] == ["partition.json"]


def test_hash_tells_splits_apart() -> None:
    hashes = [
        hand_split([1, 2], [3]).hash,
        hand_split([1], [2, 3]).hash,
        hand_split([1, 2], [3], server=[4]).hash,
        FederatedSplit(4, hand_split().server_labeled, hand_split([1, 2], [3]).clients).hash,
    ]
    assert len(set(hashes)) == 4
    assert hand_split([1, 2], [3]).hash == hashes[0]


def test_tampered_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "partition.json"
    hand_split([1, 2], [3], server=[0]).save(path)
    for key, value in (("seed", 9), ("server_labeled", [5]), ("hash", "0")):
        content = json.loads(path.read_text())
        (tmp_path / "other.json").write_text(json.dumps({**content, key: value}))
        with pytest.raises(ValueError, match=r"other\.json' was changed after it was written"):
            FederatedSplit.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"seed": 0}',
        '{"seed": 0, "server_labeled": [1.5], "clients": [], "hash": ""}',
        '{"seed": 0, "server_labeled": [-1], "clients": [], "hash": ""}',
        '{"seed": 0, "server_labeled": [99999999999999999999], "clients": [], "hash": ""}',
        '{"seed": 0, "server_labeled": "12", "clients": [], "hash": ""}',
        '{"seed": 0, "server_labeled": [], "clients": [3], "hash": ""}',
        "[" * 100000,
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "partition.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"partition\.json' is damaged or not a partition"):
        FederatedSplit.load(path)


def test_binary_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is damaged or not a partition"):
        FederatedSplit.load(tmp_path / "p.json")
    with pytest.raises(FileNotFoundError, match=r"nothing\.json' does not exist"):
        FederatedSplit.load(tmp_path / "nothing.json")


def test_from_file_repeats_a_partition_whatever_the_seed(tmp_path: Path) -> None:
    labels = torch.arange(400) % 10
    path = tmp_path / "partition.json"
    for location in ("server", "clients"):
        split = draw(Shards(2), labels, location=location, seed=1)
        split.save(path)
        assert draw(FromFile(str(path)), labels, location=location, seed=2).hash == split.hash


def test_from_file_repeats_a_fully_labelled_partition(tmp_path: Path) -> None:
    labels = torch.arange(400) % 10
    split = draw(Iid(), labels, num_labels="all", location="clients")
    split.save(tmp_path / "p.json")
    assert draw(FromFile(str(tmp_path / "p.json")), labels, num_labels="all", location="clients").hash == split.hash


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


def test_from_file_refuses_all_labels_where_some_or_no_client_has_them(tmp_path: Path) -> None:
    source, labels = FromFile(str(tmp_path / "p.json")), torch.arange(400) % 10
    for split in (draw(Iid(), labels, location="clients"), hand_split(*[[k] for k in range(10)])):
        split.save(source.path)
        with pytest.raises(ValueError, match=rf"data\.num_labels: all, but .* has {split.num_labeled} labels"):
            draw(source, labels, num_labels="all", location="clients")


@pytest.mark.parametrize("num_labels", [40, "all"])
def test_from_file_repeats_labels_at_the_clients_beside_images_of_the_server(
    tmp_path: Path, num_labels: NumLabels
) -> None:
    labels = torch.arange(400) % 10
    split = draw(ClassSkew(0.4, server_images=20), labels, num_labels=num_labels, location="clients")
    split.save(tmp_path / "p.json")
    source = FromFile(str(tmp_path / "p.json"))
    assert draw(source, labels, num_labels=num_labels, location="clients").hash == split.hash
    with pytest.raises(
        ValueError, match=r"data\.label_location: 'server', but .* has 20 labels at the server and \d+ at"
    ):
        draw(source, labels, num_labels=num_labels, location="server")


def test_from_file_refuses_what_does_not_fit(tmp_path: Path) -> None:
    labels = torch.arange(400) % 10
    path = tmp_path / "p.json"
    draw(Iid(), labels).save(path)
    source = FromFile(str(path))
    with pytest.raises(ValueError, match=r"data\.num_clients: 11, but .* has 10 clients"):
        draw(source, labels, num_clients=11)
    with pytest.raises(ValueError, match=r"data\.num_labels: 50, but .* has 40 labels"):
        draw(source, labels, num_labels=50)
    with pytest.raises(ValueError, match=r"data\.num_labels: all, but"):
        draw(source, labels, num_labels="all")
    with pytest.raises(ValueError, match=r"data\.label_location: 'clients', but"):
        draw(source, labels, location="clients")
    with pytest.raises(ValueError, match=r"names sample 399, but the training split has 300 samples"):
        draw(source, labels[:300])
    held_out = labels.clone()
    held_out[:200] = -1
    with pytest.raises(ValueError, match=r"samples that this run holds out; use the seed_everything"):
        draw(source, held_out)


def test_from_file_refuses_an_image_assigned_twice(tmp_path: Path) -> None:
    hand_split([1, 2, 1], [2], server=[0]).save(tmp_path / "p.json")
    with pytest.raises(ValueError, match="assigns a sample twice to one client, or to the server"):
        draw(FromFile(str(tmp_path / "p.json")), torch.arange(10), num_clients=2, num_labels=1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("of", [Iid(), Shards(), Dirichlet(0.1)])
def test_pooled_images_are_those_of_the_federation_with_the_same_labels(of: Partition, seed: int) -> None:
    federation = draw(of, CIFAR_LABELS[:1003], num_clients=20, num_labels=50, seed=seed)
    pooled = draw(Pooled(20, of), CIFAR_LABELS[:1003], num_clients=1, num_labels=50, location="clients", seed=seed)
    assert torch.equal(pooled.clients[0].labeled, federation.server_labeled)
    assert set(pooled.clients[0].unlabeled.tolist()) == set(
        torch.cat([c.unlabeled for c in federation.clients]).tolist()
    )
    assert len(pooled.clients) == 1
    assert len(pooled.server_labeled) == 0


def test_pooled_refuses_a_federation() -> None:
    with pytest.raises(ValueError, match=r"needs data\.num_clients: 1"):
        draw(Pooled(20), CIFAR_LABELS, num_clients=2, location="clients")
    with pytest.raises(ValueError, match=r"data\.label_location: clients"):
        draw(Pooled(20), CIFAR_LABELS, num_clients=1, location="server")
    with pytest.raises(ValueError, match="num_clients of Pooled is 0"):
        Pooled(0)


def test_statistics_by_hand() -> None:
    """Pairs of class shares (1, 0, 0), (1/2, 1/2, 0), (0, 2/3, 1/3): half the L1 distances are 1/2, 1 and 1/2."""
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    stats = statistics(hand_split([0, 1], [2, 3], [4, 5, 6], [], server=[7]), labels, 3)
    assert stats.class_counts.tolist() == [[2, 0, 0], [1, 1, 0], [0, 2, 1], [0, 0, 0]]
    assert stats.sizes.tolist() == [2, 2, 3, 0]
    assert stats.classes_per_client.tolist() == [1, 2, 2, 0]
    assert stats.server_class_counts.tolist() == [0, 0, 1]
    assert stats.class_skew == pytest.approx((1 / 2 + 1 + 1 / 2) / 3)
    entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
    assert stats.effective_classes == pytest.approx((1 + 2 + np.exp(entropy)) / 3)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(2, 6), st.integers(0, 1000))
def test_class_skew_equals_the_sum_over_pairs(num_clients: int, num_classes: int, seed: int) -> None:
    labels = torch.arange(20 * num_clients) % num_classes
    split = draw(Dirichlet(0.3, 1), labels, num_clients, "all", "clients", seed, num_classes)
    stats = statistics(split, labels, num_classes)
    pairs = [float((a - b).abs().sum() / 2) for a, b in itertools.combinations(stats.histograms, 2)]
    assert stats.class_skew == pytest.approx(np.mean(pairs))


def test_skew_runs_from_alike_to_disjoint() -> None:
    labels = torch.arange(20) // 10
    assert statistics(hand_split([0, 10], [1, 11]), labels, 2).class_skew == 0
    assert statistics(hand_split([0, 1], [10, 11]), labels, 2).class_skew == 1
    assert statistics(hand_split([0, 1]), labels, 2).class_skew == 0


def test_summary_is_a_few_plain_lines() -> None:
    server = statistics(draw(Shards(2), CIFAR_LABELS, 100, 4000), CIFAR_LABELS, 10).summary()
    lines = server.splitlines()
    assert lines[0] == "100 clients: 460 images each, 46,000 in all"
    assert lines[1] == "server: 4,000 labelled images, 400 of each class"
    assert lines[2].startswith("classes per client: 1 to 2, effectively 1.9")
    assert len(lines) == 5
    clients = statistics(draw(Iid(), CIFAR_LABELS, 1, 40, "clients"), CIFAR_LABELS, 10).summary()
    assert clients.startswith("1 client: 50,000 images each")
    assert "clients: 40 labelled images, 40 at each client" in clients


def test_summary_and_heatmap_bear_empty_clients() -> None:
    labels = torch.arange(50) % 10
    stats = statistics(draw(Iid(), labels, 3, "all"), labels, 10)
    assert stats.summary().startswith("3 clients: 0 images each")
    assert stats.class_skew == stats.effective_classes == 0
    assert heatmap(stats).dtype == torch.uint8


@pytest.mark.parametrize("num_clients", [1, 100, 3000])
def test_heatmap_is_a_picture(num_clients: int) -> None:
    labels = torch.arange(6000) % 10
    stats = statistics(draw(Dirichlet(0.3, 1), labels, num_clients, 40), labels, 10)
    picture = heatmap(stats)
    assert picture.dtype == torch.uint8
    assert picture.shape[0] == 3
    assert picture.min() < 100
    assert picture[:, 0, 0].tolist() == [255, 255, 255]


def test_heatmap_shows_more_images_darker() -> None:
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    few, many = (heatmap(statistics(hand_split(rows, [4]), labels, 2)) for rows in ([0], [0, 1, 2, 3]))
    bluest = [int(picture[0].float().flatten(1).min()) for picture in (few, many)]
    assert max(bluest) < 100  # the fullest cell of either partition is dark blue: the scale ends at the largest count
    assert not torch.equal(few, many)


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
        (Fixed([0], ([], [120]), ([], [1])), "names sample 120, but the training split has 120 samples"),
        (Fixed([0], ([], [-1]), ([], [1])), "names sample -1, but the training split has 120 samples"),
        (Fixed([0], ([], [1])), "made 1 clients, but data.num_clients is 2; give one ClientIndices for each"),
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


@pytest.mark.parametrize(("rule", "clients"), [(Pooled, 1), (FullyLabeledClients, 3)])
def test_a_rule_over_a_file_checks_the_file(rule: Any, clients: int, tmp_path: Path) -> None:
    hand_split([1], [200]).save(tmp_path / "p.json")
    with pytest.raises(ValueError, match=r"data\.num_labels: all, but|data\.num_clients: 3, but"):
        draw(rule(2, FromFile(str(tmp_path / "p.json"))), torch.arange(10), clients, "all", "clients")


class Assigns(Partition):
    """A rule of a user's own with one mistake, which gives both clients the same kind of positions."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def assign(self, labels: Tensor, num_clients: int, num_classes: int, generator: np.random.Generator) -> Any:
        if isinstance(self.parts, Exception):
            raise self.parts
        return self.parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "Assigns.assign returned NoneType; return a list with the positions of each of 2 clients"),
        ([[0]], "Assigns.assign returned 1 entries; return a list"),
        ([[0], [999]], r"gave client 1 torch.int64 \(1,\), from 999 to 999; give whole numbers from 0 to"),
        ([[-1], [1]], r"gave client 0 torch.int64 \(1,\), from -1 to -1; give whole numbers"),
        ([[0.5], [1]], r"gave client 0 torch.float32 \(1,\), from 0.5 to 0.5; give whole numbers"),
        ([[0, 1], [1]], "Assigns.assign must give 2 clients positions without repetition"),
        (KeyError("x"), "Assigns raised KeyError: 'x'; FEDSSL_TRACEBACK=1 shows the line"),
    ],
)
def test_a_mistake_in_a_rule_of_a_user_s_own_is_named(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.partition: .*{message}"):
        ToyData(partition=Assigns(parts), num_clients=2).setup("fit")


def test_a_rule_may_give_arrays_and_lists() -> None:
    data = ToyData(partition=Assigns([np.array([3, 1]), []]), num_clients=2, num_labels=3, validation=0)
    data.setup("fit")
    assert data.statistics.sizes.tolist() == [2, 0]
