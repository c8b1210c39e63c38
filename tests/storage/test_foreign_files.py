"""Files of somebody else: on no way is anything run, imported or called that they name."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.cli import main
from lightning_fedssl.comparison.results import rounds
from lightning_fedssl.export import load_network
from lightning_fedssl.functional.schedules import Cosine
from lightning_fedssl.storage import checkpoint_file
from tests.toy import labeled_clients, toy, toy_fedavg, toy_trainer

COMMAND = ("os.mkdir", {"path": "RAN"})
CALLED = ("evil.Net", {"num_classes": 3})  # a module in the working folder
LIGHTNING = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}


def mapping(path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


def as_json(path: str, arguments: dict[str, Any]) -> str:
    return json.dumps(mapping(path, arguments))


def as_yaml(path: str, arguments: dict[str, Any]) -> str:
    return f"class_path: {path}\ninit_args: {arguments}"


SPELLINGS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "mapping": mapping,
    "JSON": as_json,
    "YAML": as_yaml,
    "name": lambda path, arguments: path,
    "list": lambda path, arguments: [mapping(path, arguments)],
    "list of texts": lambda path, arguments: [as_json(path, arguments)],
    "nested": lambda path, arguments: {"any": {"thing": mapping(path, arguments)}},
    "init_args": lambda path, arguments: mapping("torch.nn.ReLU", {"inplace": mapping(path, arguments)}),
    "text in init_args": lambda path, arguments: mapping("torch.nn.TransformerEncoder", {"encoder_layer": path}),
}
ENTRIES = ("network", "optimizer", "schedule", "task", "client_epochs", "_instantiator", "_class_path", "unknown")


def everywhere(value: Any, foreign: Any) -> Any:
    """Plain values with each text replaced, and each mapping given one entry more."""
    if isinstance(value, dict):
        return {name: everywhere(part, foreign) for name, part in value.items()} | {"foreign": foreign}
    return foreign if isinstance(value, str) else value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a trained FedAvg, whose checkpoint a deployment's server may resume, too."""
    trainer = toy_trainer(tmp_path_factory.mktemp("run"), max_rounds=1)
    trainer.fit(toy_fedavg(schedule=Cosine()), labeled_clients())
    checkpoints = Path(str(trainer.log_dir), "checkpoints")
    saved = checkpoint_file.load(checkpoints / "last.ckpt")
    saved["federation"]["extra"]["deployment"] = {}
    checkpoint_file.save(saved, checkpoints / "last.ckpt")
    return checkpoints


def foreign_checkpoints(saved: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The checkpoint with a command or a class in one entry or another, in each spelling."""
    model = saved["model"]
    arguments_of = model["arguments"]
    for spelled, (path, arguments) in itertools.product(SPELLINGS.values(), (COMMAND, CALLED)):
        value = spelled(path, arguments)
        for entry in ENTRIES:
            yield "arguments", {**saved, "model": {**model, "arguments": {**arguments_of, entry: value}}}
        # All that Lightning's own loader would read, and every other place.
        given = LIGHTNING | {"network": value}
        yield "arguments", {**saved, "model": {**model, "arguments": arguments_of | given}}
        yield "other", {**saved, "hparams": given, "module_arguments": given, "hparams_name": "network"}
        for part in ("model", "callbacks"):
            yield "other", {**saved, part: everywhere(saved[part], value)}


def exported(path: Path) -> None:
    out = path.parent / "exported"
    if main(["export", "--ckpt_path", str(path), "--format", "safetensors", "--output", str(out)]):
        raise ValueError("refused")


def described(path: Path) -> None:
    """Load the folder's ``model.json``, which names what the checkpoint names."""
    checkpoint = torch.load(path, weights_only=True)
    network = {**checkpoint["model"]["network"]}
    if isinstance(own := checkpoint["model"]["arguments"].get("network"), dict):
        network |= own
    else:
        network["init_args"] = {**network["init_args"], "norm": own}
    description = {**checkpoint["model"], "network": network}
    path.with_name("model.json").write_text(json.dumps(description))
    load_network(path.parent)


def evaluated(command: str) -> Callable[[Path], object]:
    def evaluate(path: Path) -> None:
        trainer = toy_trainer(path.parent, max_rounds=1, logger=False)
        getattr(trainer, command)(toy_fedavg(schedule=Cosine()), labeled_clients(), ckpt_path=path)

    return evaluate


def compared(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    version = path.parent / "lightning_logs/version_0"
    version.mkdir(parents=True, exist_ok=True)
    cell = json.dumps(str(content["model"]["arguments"]))
    (version / "metrics.csv").write_text(f"step,{cell}\n1,{cell}\n{cell},1\n")
    rounds(path.parent)


def deployed(path: Path) -> None:
    server = pytest.importorskip("lightning_fedssl.deployment.server")
    model = toy_fedavg()
    server.unfinished(toy_trainer(path.parent.parent.parent.parent, max_rounds=1), model)


def started(path: Path) -> None:
    toy(FedAvg, init_from=path).configure_model()


def on_the_command_line(path: Path) -> None:
    """What the parser would do with the checkpoint; the data do not fit it."""
    arguments = ["--config", "fedavg_digits.yaml", "--data.max_train_images", "100", "--ckpt_path", str(path)]
    assert main(["test", *arguments, "--trainer.logger", "false"]) == 2


WAYS: dict[str, Callable[[Path], object]] = {
    "export": exported,
    "load_from_checkpoint": FedAvg.load_from_checkpoint,
    "load_network": described,
    "init_from": started,
    "test": evaluated("test"),
    "predict": evaluated("predict"),
    "resume": evaluated("fit"),
    "compare": compared,
    "deploy": deployed,
    "command line": on_the_command_line,
}
BUILD = ("export", "load_from_checkpoint", "load_network")
"""Ways that build what a file names; on the others one file of several is tried."""


@pytest.mark.parametrize("way", WAYS)
def test_a_foreign_file_runs_nothing(way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text("open('RAN', 'w')\nNet = print\n")
    place = tmp_path / "run/lightning_logs/version_0/checkpoints"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    saved = checkpoint_file.load(folder / "last.ckpt")
    torch.save(saved, place / "last.ckpt")
    WAYS[way](place / "last.ckpt")  # the file as it was
    step = 1 if way in BUILD else 61 if way == "command line" else 7
    for part, content in itertools.islice(foreign_checkpoints(saved), 0, None, step):
        torch.save(content, place / "last.ckpt")
        refused = False
        try:
            WAYS[way](place / "last.ckpt")
        except ValueError:
            refused = True
        assert refused or way not in BUILD[:2] or part == "other", content[part]
        assert not (tmp_path / "RAN").exists(), content
    assert "evil" not in sys.modules
