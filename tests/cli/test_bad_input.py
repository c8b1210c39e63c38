"""Wrong input that people meet: the message has the key and the remedy, without traceback, and nothing is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.helpers import failure, write

# What is typed after ``fit --config run.yaml``, and parts of the message: the key, and the remedy where it is a name.
OPTIONS = [
    ("--trainer.max_epochs 3", "give the number of rounds as trainer.max_rounds"),
    ("--data.batch_size 16", "data.server_batch_size and data.client_batch_size"),
    ("--model.lr 0.1", "model.optimizer.lr"),
    ("--trainer.max_rounds ten", "trainer.max_rounds|ten"),
    ("--trainer.max_rounds 0", "max_rounds|0"),
    ("--trainer.clients_per_round 9", "clients_per_round|data.num_clients|5"),
    ("--trainer.accelerator tpuu", "accelerator|tpuu"),
    ("--trainer.strategy fsdp", "trainer.strategy|fsdp"),
    ("--trainer.devices 100000", "devices|100000"),
    ("--trainer.callbacks+=PseudoLabelQualty", "trainer.callbacks|did you mean PseudoLabelQuality?"),
    ("--trainer.callbacks EarlyStopping", "trainer.callbacks|monitor"),
    ("--trainer.callbacks DeviceStatsMonitor", "DeviceStatsMonitor"),
    ("--trainer.logger CSVLoger", "trainer.logger|CSVLoger"),
    ("--trainer.default_root_dir run.yaml", "run.yaml"),
    ("--trainer.updates.factor 1", "updates"),
    ("--trainer.quarantine 1", "quarantine|give updates: [{class_path: Quarantine"),
    ("--model semifl", "semifl|did you mean SemiFL?"),
    ("--model nomethod.MyMethod", "nomethod"),
    ("--model torch.nn.Linear", "model|Linear"),
    ("--model FedAvg", "FedAvg|data.label_location|clients"),
    ("--model.threshold 2", "model.threshold|2"),
    ("--model.network torchvision.models.resnet18 --model.network.weights DEFAULT", "class_path|init_args"),
    ("--trainer.updates Median", "trainer.updates|[Median]"),
    ("--model.network MPL", "network|did you mean MLP?"),
    ("--data.dataset.csv_file table.csv", "data.dataset|name a class before its options"),
    ("--model.network CNN --model.network.norm grouped", "norm|grouped|group"),
    ("--model.network torchvision.models.resnet18", "model.network|(1, 8, 8)"),
    ("--model.optimizer.lrr 0.1", "optimizer|did you mean lr?"),
    ("--model.optimizer.lr -1", "model.optimizer|learning rate"),
    ("--model.optimizer LBFGS", "model.optimizer|LBFGS"),
    ("--model.client_epochs 0", "model.client_epochs|0"),
    ("--model.server_steps 100000000000000000000", "model.server_steps|1e18"),
    ("--data.num_clients 0", "data.num_clients|0"),
    ("--data.num_clients 100000", "data.num_clients|100000"),
    ("--data.num_labels 3", "data.num_labels|10 classes"),
    ("--data.label_location clients", "data.label_location|server"),
    ("--data.dataset minst", "data.dataset|did you mean mnist?"),
    ("--data.dataset mnist", "data.root|data.download"),
    ("--data.dataset image_folder", "data.image_size"),
    ("--data.dataset BreastCancer", "data.weak|auto"),
    ("--data.task Regresion", "data.task|did you mean Regression?"),
    ("--data.alpha 0.1", "--data.partition.alpha"),
    ("--data.partition.alpha 1", "alpha"),
    ("--data.partition Dirichlet --data.partition.alpha 0", "data.partition|alpha"),
    ("--data.partition Shards --data.partition.classes_per_client 11", "classes_per_client"),
    ("--data.partition FromFile --data.partition.path no.json", "no.json"),
    ("--data.validation 1", "data.validation|1"),
    ("--ckpt_path no.ckpt", "ckpt_path|no.ckpt"),
    ("--ckpt_path last --trainer.default_root_dir no", "ckpt_path|default_root_dir"),
    ("--ckpt_path run.yaml", "ckpt_path|run.yaml"),
    ("--nothing 3", "--nothing|its options are|trainer"),
    ("--data.nothing 3", "its options are dataset|class_shares"),
    ("--model.nothing 3", "its options are|threshold"),
    ("--model unsupervised", "SemiFL|FedAvg"),
    ("--data.task.class_weights balanced", "data.task|Classification"),
    ("--trainer.gpus 2", "--trainer.accelerator gpu"),
    ("--data.partition Non-IID", "--data.partition Dirichlet"),
    ("--model FedProx", "--model FedAvg --model.prox_mu"),
]

COMMANDS = [
    ("trian", "trian|fit"),
    ("train", "did you mean fit?"),
    ("fit --config images.yaml", "did you mean lightning-fedssl fit --config presets/images.yaml?"),
    ("fit --config digits.yaml", "did you mean lightning-fedssl compare digits.yaml?"),
    ("compare run.yaml", "not a suite|lightning-fedssl fit --config run.yaml"),
    ("fit run.yaml", "--config run.yaml"),
    ("fit --config run.yaml --data.dataset t.csv --data.dataset.colum a", "Table|colum|client_column"),
    ("test --config run.yaml", "--ckpt_path best"),
    ("test --ckpt_path no.ckpt", "model|--config FILE|--ckpt_path"),
    ("--config run.yaml", "lightning-fedssl fit --config run.yaml"),
    ("fit --config semifl_digit.yaml", "fit --config semifl_digits.yaml?"),
    ("partition --data.num_client 3", "did you mean data.num_clients?"),
    ("export --format oonx", "format|onnx"),
]

FILES = {
    "twice.yaml": ("trainer: {max_rounds: 1}\ndata: {}\ntrainer: {}\n", "twice.yaml: ", "the key trainer is given"),
    "tab.yaml": ("trainer:\n\tmax_rounds: 1\n", "tab.yaml: ", "line 2"),
    "key.yaml": ("trainer: {max_round: 3}\n", "key.yaml: ", "did you mean trainer.max_rounds?"),
    "tag.yaml": ("trainer: !!python/object/apply:os.system ['touch ran']\n", "tag.yaml: ", "could not determine"),
    "text.yaml": ("hello\n", "text.yaml: ", "keys"),
    "number.yaml": ("model: 3\n", "number.yaml: model: ", "class"),
    "list.yaml": ("data: [1]\n", "data: ", "keys"),
}
"""Configurations: content, how the message begins, and words of it."""


@pytest.mark.parametrize(("typed", "words"), OPTIONS)
def test_a_wrong_option_of_fit(folder: Path, capsys: pytest.CaptureFixture[str], typed: str, words: str) -> None:
    message = failure(capsys, "fit", "--config", "run.yaml", *shlex.split(typed))
    assert [part for part in words.split("|") if part not in message] == []
    assert message.count("\n") == 1
    assert not list(folder.rglob("version_*"))


@pytest.mark.parametrize(("typed", "words"), COMMANDS)
def test_a_wrong_command(folder: Path, capsys: pytest.CaptureFixture[str], typed: str, words: str) -> None:
    message = failure(capsys, *shlex.split(typed))
    assert [part for part in words.split("|") if part not in message] == []
    assert not list(folder.rglob("version_*"))


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_configuration_file(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, start, words = FILES[name]
    write(name, content)
    message = failure(capsys, "fit", "--config", "run.yaml", "--config", name)
    assert message.startswith(start)
    assert words in message
    assert name in failure(capsys, "compare", name)
    assert not (folder / "ran").exists()
