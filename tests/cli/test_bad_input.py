"""Wrong input that people meet: the message has the key and the remedy, without traceback, and nothing is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.helpers import failure, write

# What is typed after ``fit --config run.yaml``, and words of the message.
OPTIONS = [
    ("--trainer.max_round 3", "did you mean trainer.max_rounds?"),
    ("--trainer.max_rounds ten", '"trainer.max_rounds"'),
    ("--trainer.max_rounds 0", "trainer.max_rounds is 0: give 1 or more"),
    ("--trainer.max_epochs 3", "did you mean trainer.max_rounds?"),
    ("--trainer.clients_per_round 9", "but data.num_clients is only 5: lower the first or raise the"),
    ("--trainer.accelerator tpuu", "accelerator tpuu"),
    ("--trainer.strategy fsdp", "trainer.strategy is fsdp: it splits one large model over devices"),
    ("--trainer.devices 100000", "trainer.devices is 100000"),
    ("--trainer.callbacks+=GradientDiversty", "did you mean GradientDiversity?"),
    ("--trainer.callbacks EarlyStopping", "monitor"),
    ("--trainer.callbacks DeviceStatsMonitor", "DeviceStatsMonitor needs Lightning's own training"),
    ("--trainer.logger CSVLoger", "CSVLoger"),
    ("--trainer.default_root_dir run.yaml", "trainer.default_root_dir"),
    ("--trainer.quarantine 1", "trainer.quarantine is 1.0: give a factor above 1, or null"),
    ("--model SemiFLL", "did you mean SemiFL?"),
    ("--model nomethod.MyMethod", "nomethod"),
    ("--model torch.nn.Linear", "Linear"),
    ("--model FedAvg", "FedAvg trains clients on labels: set data.label_location to clients"),
    ("--model.treshold 0.5", "did you mean threshold?"),
    ("--model.threshold 2", "model.threshold is 2.0: give a probability between 0 and 1"),
    ("--model.network MPL", "did you mean MLP?"),
    ("--model.network CNN --model.network.norm grouped", '"norm"'),
    ("--model.network torchvision.models.resnet18", "model.network: ResNet cannot take samples of shape (1, 8, 8)"),
    ("--model.optimizer.lrr 0.1", "did you mean lr?"),
    ("--model.optimizer.lr -1", "model.optimizer: Invalid learning rate: -1.0; change"),
    ("--model.optimizer LBFGS", "model.optimizer is LBFGS, which needs sparse gradients or computes the"),
    ("--model.client_epochs 0", "model.client_epochs is 0.0: give a finite number above 0"),
    ("--model.schedule Cosin", "did you mean Cosine?"),
    ("--data.num_client 3", "did you mean data.num_clients?"),
    ("--data.num_clients 0", "data.num_clients must be a whole number of at least 1, got 0"),
    ("--data.num_clients 100000", "data.num_clients: 100000 clients cannot share 160 samples; lower"),
    ("--data.num_labels 3", "data.num_labels: 3 labels cannot cover 10 classes; ask for more"),
    ("--data.label_location clients", "set data.label_location to"),
    ("--data.dataset minst", "data.dataset: 'minst' is not a known data set; did you mean mnist?"),
    ("--data.dataset mnist", "data.root: mnist was not found, or is damaged, in 'data'"),
    ("--data.dataset image_folder", "data.image_size: image_folder needs the side of its images in pixels"),
    ("--data.dataset BreastCancer", "data.weak: 'auto' is a view of 8-bit images"),
    ("--data.partition Dirichlt", "did you mean Dirichlet?"),
    ("--data.partition.alpha 1", "alpha"),
    ("--data.partition Dirichlet --data.partition.alpha 0", "alpha of Dirichlet must be a finite number above 0"),
    ("--data.partition Shards --data.partition.classes_per_client 11", "classes_per_client is 11"),
    ("--data.partition FromFile --data.partition.path no.json", "partition file 'no.json' does not exist"),
    ("--data.validation 1", "data.validation must be a fraction from 0 to below 1"),
    ("--ckpt_path no.ckpt", "ckpt_path: there is no file no.ckpt; give the path of a .ckpt"),
    ("--ckpt_path last --trainer.default_root_dir no", "ckpt_path: no run in no has a last checkpoint; set"),
    ("--ckpt_path run.yaml", "ckpt_path: run.yaml holds objects other than tensors and plain values"),
    ("--nothing 3", "--nothing"),
]

COMMANDS = [
    ("trian", "there is no command trian"),
    ("fitt --config run.yaml", "did you mean fit?"),
    ("fit run.yaml", "run.yaml"),
    ("test --config run.yaml", "test: no checkpoint given: add --ckpt_path best"),
    ("fit --config semifl_digit.yaml", "semifl_digit.yaml: there is no such file; did you mean semifl_digits.yaml?"),
    ("partition --config run.yaml --plot x.pdf", "--plot is x.pdf: give the name of a PNG file"),
    ("partition --data.num_client 3", "did you mean data.num_clients?"),
    ("export --format oonx", '"format"'),
]

FILES = {
    "twice.yaml": ("trainer: {max_rounds: 1}\ndata: {}\ntrainer: {}\n", "twice.yaml: ", "the key trainer is given"),
    "tab.yaml": ("trainer:\n\tmax_rounds: 1\n", "tab.yaml: ", "line 2"),
    "key.yaml": ("trainer: {max_round: 3}\n", "", "did you mean trainer.max_rounds?"),
    "tag.yaml": ("trainer: !!python/object/apply:os.system ['touch ran']\n", "tag.yaml: ", "could not determine"),
    "text.yaml": ("hello\n", "text.yaml: ", ""),
}
"""Configurations: content, how the message begins, and words of it."""


@pytest.mark.parametrize(("typed", "words"), OPTIONS)
def test_a_wrong_option_of_fit(folder: Path, capsys: pytest.CaptureFixture[str], typed: str, words: str) -> None:
    assert words in failure(capsys, "fit", "--config", "run.yaml", *shlex.split(typed))
    assert not list(folder.rglob("version_*"))


@pytest.mark.parametrize(("typed", "words"), COMMANDS)
def test_a_wrong_command(folder: Path, capsys: pytest.CaptureFixture[str], typed: str, words: str) -> None:
    assert words in failure(capsys, *shlex.split(typed))
    assert not list(folder.rglob("version_*"))


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_configuration_file(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, start, words = FILES[name]
    write(name, content)
    message = failure(capsys, "fit", "--config", "run.yaml", "--config", name)
    assert message.startswith(start)
    assert words in message
    assert not (folder / "ran").exists()
