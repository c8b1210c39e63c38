from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from lightning_fedssl.cli import FederatedCLI, main
from lightning_fedssl.cli.partition import _write_csv, client_table
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit
from lightning_fedssl.data.partition.statistics import statistics

SMALL = ["--data.num_clients", "3", "--data.num_labels", "20", "--data.max_train_images", "60"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def drawn(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    capsys.readouterr()
    assert main(["partition", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_table_and_file_count_labelled_and_unlabelled_images_of_each_class_and_of_none(tmp_path: Path) -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, -1])
    clients = [
        ClientIndices(torch.tensor([0, 3]), torch.tensor([1, 4, 5])),
        ClientIndices(labels[:0], torch.tensor([6, 8])),
    ]
    stats = statistics(FederatedSplit(0, torch.tensor([2, 7]), clients), labels, 3)
    assert stats.labeled_class_counts.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert stats.labeled.tolist() == [2, 0]
    assert [line.split() for line in client_table(stats)[:-1]] == [
        ["images", "labelled", "classes", "0", "1", "2", "unknown"],
        ["server", "2", "2", "2", "1+0", "0+0", "1+0", "0"],
        ["client", "0", "5", "2", "2", "1+1", "1+2", "0+0", "0"],
        ["client", "1", "2", "0", "1", "0", "0", "1", "1"],
    ]
    assert len({len(line) for line in client_table(stats)[:-1]}) == 1
    _write_csv(tmp_path / "clients.csv", stats)
    assert (tmp_path / "clients.csv").read_text().splitlines() == [
        "client,labeled_0,labeled_1,labeled_2,unlabeled_0,unlabeled_1,unlabeled_2,unknown",
        "0,1,1,0,1,2,0,0",
        "1,0,0,0,0,0,1,1",
    ]


def test_many_classes_have_no_columns_and_of_many_clients_the_first_are_shown() -> None:
    labels = torch.arange(30).repeat(2)
    clients = [ClientIndices(labels[:0], torch.tensor([4, 34, 7, 9, 11]))] * 22
    stats = statistics(FederatedSplit(0, labels[:0], clients), labels, 30)
    lines = [line.split() for line in client_table(stats)]
    assert lines[:2] == [["images", "labelled", "classes"], ["client", "0", "5", "0", "4"]]
    assert lines[20:] == [["client", "19", "5", "0", "4"], ["not", "shown:", "2", "more;", "--output", "writes", "all"]]


def test_it_draws_what_fit_trains_on(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(capsys, "--config", "semifl_digits.yaml", "--seed_everything", "3", "--output", "out", *SMALL)
    assert lines[0] == "data: digits, 1,442 training, 355 test images of shape (1, 8, 8)"
    assert lines[2] == "digits, 20 labels at the server, Iid()"
    assert "3 clients: 33 images, 11 each" in lines
    cli = FederatedCLI(["--config", "semifl_digits.yaml", "--seed_everything", "3", *SMALL], run=False)
    cli.datamodule.setup()
    assert json.loads(Path("out/partition.json").read_text())["hash"] == cli.datamodule.split.hash
    assert f"drawn with seed 3, hash {cli.datamodule.split.hash[:12]}" in lines
    with Path("out/clients.csv").open(newline="") as file:
        rows = [[int(value) for value in row.values()] for row in csv.DictReader(file)]
    assert [row[0] for row in rows] == [0, 1, 2]
    assert [row[11:] for row in rows] == cli.datamodule.statistics.class_counts.tolist()
    assert not any(value for row in rows for value in row[1:11])


def test_a_saved_partition_is_shown_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    first = drawn(capsys, *SMALL, "--data.partition", "Dirichlet", "--output", "out")
    again = drawn(capsys, *SMALL, "--data.partition", "FromFile", "--data.partition.path", "out/partition.json")
    assert [line for line in again if "hash" in line] == [line for line in first if "hash" in line]


def test_the_environment_sets_what_nothing_else_sets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSL_PARTITION__DATA__NUM_CLIENTS", "2")
    assert any(line.startswith("2 clients") for line in drawn(capsys))
    assert any(line.startswith("3 clients") for line in drawn(capsys, *SMALL))
