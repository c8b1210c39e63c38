"""The file of a partition, and its hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_fedssl.data.partition.base import Dirichlet
from lightning_fedssl.data.partition.federated_split import FederatedSplit
from tests.data.partition.helpers import draw, hand_split


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
        with pytest.raises(ValueError, match=r"other\.json' was changed"):
            FederatedSplit.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"seed": 0}', '{"seed": 0, "server_labeled": [1.5], "clients": [], "hash": ""}',
     '{"seed": 0, "server_labeled": [-1], "clients": [], "hash": ""}',
     '{"seed": 0, "server_labeled": [], "clients": [3], "hash": ""}', "[" * 100000],
)  # fmt: skip
def test_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "partition.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"partition\.json' is not a partition"):
        FederatedSplit.load(path)
