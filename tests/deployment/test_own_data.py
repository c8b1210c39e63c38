from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.data import Arrays, Table
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.deployment.own_data import OwnData, ServerData, module_of_spec, save_spec
from lightning_fedssl.models import MLP
from tests.toy import SPEC, ToyData, assert_same, images_of, toy_semifl, toy_trainer, weights

SAMPLES = np.zeros((2, 1, 8, 8), dtype=np.uint8)


class ServerToy(ServerData, ToyData):
    """The server's labelled images of ToyData's partition, and its test images; no client's image."""

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        whole = ToyData(validation=0)
        whole.setup()
        own, (spec, train, test) = whole.split.server_labeled, ToyData._load(self)
        return spec, ImageSplit(train.images[own], train.labels[own]), test


def corners(x: torch.Tensor) -> torch.Tensor:
    return x[..., ::4, ::4].flatten(1)


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        ({}, {}),
        (
            {"backbone": corners, "normalize": False, "weak": "none", "strong": "none"},
            {"network": partial(MLP, hidden=(8,)), "in_shape": (4,)},
        ),
    ],
)
def test_clients_with_images_of_their_own_equal_the_simulation(
    tmp_path: Path, keys: dict[str, Any], model: dict[str, Any]
) -> None:
    """The server has no image of a client; a node has one file with its own."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")
    from lightning_fedssl.deployment.node import Node, make_client_app
    from lightning_fedssl.deployment.server import fit_on_grid

    from .helpers import FakeGrid

    raw, whole, expected = ToyData(validation=0), ToyData(validation=0, **keys), toy_semifl(**model)
    toy_trainer(tmp_path / "simulation", logger=False).fit(expected, whole)
    raw.setup()
    save_spec(SPEC, tmp_path / "data.json")
    module = module_of_spec(tmp_path / "data.json")

    def app_of(client: int) -> Any:
        part = raw.local_data(client, 1)
        arrays = {"labeled": part.images[part.labeled], "labels": part.labels, "unlabeled": part.images[part.unlabeled]}
        values: dict[str, Any] = {name: t.numpy() for name, t in arrays.items()}
        np.savez(tmp_path / f"{client}.npz", **values)

        def make_node(node_config: Any, run_config: Any) -> Node:
            data = module("nowhere", num_clients=4, num_labels=12, server_batch_size=5, client_batch_size=5, **keys)
            own, folder = OwnData(data, tmp_path / f"{client}.npz", client), tmp_path / f"node {client}"
            trainer = toy_trainer(folder)
            return Node(trainer, trainer.fabric, toy_semifl(**model), data, own, folder)

        return make_client_app(make_node)

    algorithm, data = toy_semifl(**model), ServerToy(validation=0, **keys)
    grid: Any = FakeGrid({100 + client: app_of(client) for client in range(4)})
    fit_on_grid(grid, {}, (toy_trainer(tmp_path / "server", logger=False), algorithm, data))
    assert_same(weights(algorithm), weights(expected))
    assert data.client_sizes == {k: (0, len(part.unlabeled)) for k, part in enumerate(whole.split.clients)}
    with pytest.raises((IndexError, RuntimeError)):
        data.local_data(0, 1).plain(data.local_data(0, 1).unlabeled)


def test_the_server_counts_images_that_only_nodes_have() -> None:
    """Of a client that connects later, nothing is known yet."""
    data = ServerToy(validation=0, num_clients=4, label_location="clients")
    data.client_sizes = {0: (5, 10), 1: (4, 0), 2: (0, 0)}
    data.setup()
    assert data.statistics.sizes.tolist() == [15, 4, 0, 0]
    assert data.clients_without_images() == [2]


def test_labelled_images_alone_are_refused_where_the_method_uses_none(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"labeled": SAMPLES, "labels": np.array([0, 1])}
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match="labelled images alone"):
        OwnData(ToyData(), tmp_path / "own.npz", 0, toy_semifl())
    OwnData(ToyData(), tmp_path / "own.npz", 0, FedAvg(network=lambda **sizes: torch.nn.Linear(1, 1)))
    np.savez(tmp_path / "own.npz", **arrays, unlabeled=SAMPLES)
    OwnData(ToyData(), tmp_path / "own.npz", 0, toy_semifl())


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_image_files_of_a_node(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    images = images_of(torch.tensor([0, 2, 1]), 5)
    for folder, number in (("labeled/a", 0), ("labeled/c", 1), ("unlabeled/x", 2)):
        (tmp_path / "own" / folder).mkdir(parents=True)
        Image.fromarray(images[number, 0].numpy()).save(tmp_path / "own" / folder / "1.png")
    (tmp_path / "own" / "unlabeled" / "2.heic").write_bytes(b"")
    table = "label,file\n NA,own/unlabeled/x/1.png\na, own/labeled/a/1.png\n c,own/labeled/c/1.png\n"
    (tmp_path / "own.csv").write_text(table)
    own = OwnData(ToyData(), tmp_path / ("own" if kind == "folder" else "own.csv"), 2).local_data(3, torch.float32)
    assert own.labels.tolist() == [0, 2]
    assert torch.equal(own.images[own.labeled], images[:2])
    assert torch.equal(own.images[own.unlabeled], images[2:])
    assert (own.party, own.round) == (2, 3)
    assert ("the node's data: own; left out: .heic (1)" in caplog.text) == (kind == "folder")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "do not exist: give a folder, a .csv or"),
        ({"x.txt": ""}, "have no image"),
        ({"labeled/d/1.png": ""}, "has a class 'd'; the classes are a, b, c"),
        ({"x": np.zeros(3)}, "has an array 'x'"),
        ({"unlabeled": np.zeros((2, 1, 9, 9), dtype=np.uint8)}, r"has samples of the shapes \[\(1, 9, 9\)\]"),
        ({"unlabeled": SAMPLES / 255.0}, "unlabeled is float64; the app takes pixels from 0 to 255 as uint8"),
        ({"labeled": SAMPLES, "labels": np.array([0.5, 1.0])}, "labels is float64"),
        ({"labeled": SAMPLES, "labels": np.array([0])}, "and 1 labels of 2 samples"),
        ({"labeled": SAMPLES, "labels": np.array([0, 3])}, "label"),
    ],
)
def test_files_and_arrays_of_a_node_that_do_not_fit_are_refused(
    tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    own = tmp_path / "own"
    for name, text in content.items():
        if isinstance(text, str):
            (own / name).parent.mkdir(parents=True)
            (own / name).write_text(text)
        else:
            own = tmp_path / "own.npz"
            np.savez(own, **content)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        OwnData(ToyData(), own, 0)


def own_numbers(path: Path, in_shape: tuple[int, ...] = SPEC.in_shape) -> OwnData:
    """A node's data in an app whose samples are no 8-bit pixels."""
    save_spec(replace(SPEC, pixels=False, in_shape=in_shape), path.parent / "data.json")
    module = module_of_spec(path.parent / "data.json")
    return OwnData(module("nowhere", weak="none", strong="none", num_clients=4), path, 0)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.full((2, 1, 8, 8), np.nan), "2 of 2 samples hold NaN or infinite values"),
        (SAMPLES, "unlabeled is uint8; the app takes numbers that are not 8-bit pixels"),
        (SAMPLES.astype(str), "unlabeled is <U3; the app takes numbers"),
    ],
)
def test_arrays_of_a_node_that_are_no_numbers_of_the_app_are_refused(
    tmp_path: Path, samples: Any, message: str
) -> None:
    np.savez(tmp_path / "own.npz", unlabeled=samples)
    with pytest.raises(ValueError, match=re.escape(message)):
        own_numbers(tmp_path / "own.npz")
    (tmp_path / "own").mkdir()
    with pytest.raises(ValueError, match=r"for numbers that are not pixels: give an \.npz file"):
        own_numbers(tmp_path / "own")


@pytest.mark.parametrize(
    ("kind", "shape"), [("uint16", (1, 8, 8)), ("float64", (1, 8, 8)), ("int64", (5,)), ("uint8", (5,))]
)
def test_arrays_of_a_node_are_converted_as_those_of_the_server(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    samples: Any = np.random.default_rng(0).integers(0, 256, (6, *shape)).astype(kind)
    labels: Any = np.arange(6) % 3
    np.savez(tmp_path / "server.npz", train=samples, train_labels=labels, test=samples, test_labels=labels)
    expected = Arrays(str(tmp_path / "server.npz")).load().train.images
    swapped: Any = samples.astype(samples.dtype.newbyteorder())
    for unlabeled in (samples, swapped):
        np.savez(tmp_path / "own.npz", labeled=np.zeros(0), unlabeled=unlabeled)
        own = own_numbers(tmp_path / "own.npz", shape).local_data(1, torch.float32)
        assert torch.equal(own.images, expected)


def test_rows_of_a_table_at_a_node_are_read_by_the_servers_medians_and_categories(tmp_path: Path) -> None:
    head, rows = "size;kind;label", ["1,5;a;no", "2,5;b;yes"] * 5
    (tmp_path / "server.csv").write_text("\n".join([head, *rows]))
    source = Table(str(tmp_path / "server.csv"))
    save_spec(source.load().spec, tmp_path / "spec.json")
    (tmp_path / "own.csv").write_text("kind;label;size\nb;;1,5\na;yes;\n")
    module = module_of_spec(tmp_path / "spec.json")("nowhere", weak="none", strong="none", num_clients=4)
    own = OwnData(module, tmp_path / "own.csv", 0).local_data(1, torch.float32)
    assert own.labels.tolist() == [source.class_names.index("yes")]
    assert own.images.tolist() == [[2.0, 1, 0], [1.5, 0, 1]]
    (tmp_path / "own.csv").write_text("kind;label;size\nb;maybe;1,5\n")
    with pytest.raises(ValueError, match="class 'maybe' in the column 'label'"):
        OwnData(module, tmp_path / "own.csv", 0)
