"""The trained model for other programs: files, formats, Lightning's loader, and what a checkpoint leaves out."""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fedssl import Experiment
from lightning_fedssl.algorithms import FedAvg, SemiFL
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.cli import main
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.export import export, load_network, network_of
from lightning_fedssl.export.model_card import model_card
from lightning_fedssl.functional.schedules import Cosine
from lightning_fedssl.models import CNN, MLP
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.storage.named_value import NotNamedError, named_value, named_values, object_of
from tests.algorithms.helpers import METHODS
from tests.toy import ToyData, assert_same, images_of, toy_semifl, toy_trainer
from tests.trainer.helpers import StopAfter


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[SemiFL, Path]:
    """A trained SemiFL, and the folder of its checkpoints."""
    model = toy_semifl()
    trainer = toy_trainer(tmp_path_factory.mktemp("run"), max_rounds=2)
    trainer.fit(model, ToyData())
    return model, Path(str(trainer.log_dir)) / "checkpoints"


def evaluated(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Logits of the model that a run evaluates."""
    logits: torch.Tensor = torch.func.functional_call(model.eval(), model.evaluated_model(), (images,))
    return logits.detach()


def some_images() -> torch.Tensor:
    return images_of(torch.arange(7) % 3, 5).float() / 255


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images - 0.5) / 0.25


def test_fit_writes_the_model_it_tested(run: tuple[SemiFL, Path]) -> None:
    model, folder = run
    description = json.loads((folder / "model.json").read_text())
    assert description["network"] == {
        "class_path": "lightning_fedssl.models.cnn.CNN",
        "init_args": {"width": 4, "norm": "static_batch"},
        "num_classes": 3,
        "in_shape": [1, 8, 8],
    }
    assert description["class_names"] == ["a", "b", "c"]
    assert description["normalization"] == {"mean": [0.5], "std": [0.25]}
    assert description["resize"] == {"function": "PIL.ImageOps.fit", "filter": "BILINEAR"}
    assert description["dtype"] == description["trained_dtype"] == "float32"
    assert description["rounds"] == 2
    assert description["metric_rounds"] == {"val": 2, "test": 2}
    assert description["metrics"]["test/accuracy"] == float(model.trainer.callback_metrics["test/accuracy"])
    assert "2106.01432" in description["citation"]
    own = CNN(width=4, norm="static_batch", num_classes=3, in_shape=(1, 8, 8))
    own.load_state_dict(load_file(folder / "model.safetensors"))
    images = normalized(some_images())
    assert torch.equal(own.eval()(images), evaluated(model, images))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_loads_by_lightning_and_exports(tmp_path: Path, name: str) -> None:
    make, data = METHODS[name]
    model = make()
    trainer = toy_trainer(tmp_path, max_rounds=1, callbacks=[FederatedCheckpoint(every_n_rounds=9)])
    trainer.fit(model, data())
    path = Path(str(trainer.log_dir)) / "checkpoints/last.ckpt"
    images = normalized(some_images())
    expected = evaluated(model, images)
    has_path = checkpoint_file.load(path)["model"]["network"]["class_path"]
    arguments = {} if has_path else {"network": model.network_factory}
    loaded = type(model).load_from_checkpoint(path, trust=["tests"], **arguments).eval()
    assert torch.equal(loaded(images), expected)
    configured = loaded.configured_network().eval()
    torch.testing.assert_close(configured(images), expected)
    written = load_file(path.with_name("model.safetensors"))
    assert_same(written, dict(configured.state_dict()))
    if not arguments:
        fresh, _ = load_network(path.parent, trust=["tests"])
        assert fresh.state_dict().keys() == written.keys()


def test_a_loaded_model_is_tested_like_the_trained_one(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    model, folder = run
    loaded = SemiFL.load_from_checkpoint(folder / "last.ckpt")
    (metrics,) = toy_trainer(tmp_path).test(loaded, ToyData())
    assert metrics["test/accuracy"] == float(model.trainer.callback_metrics["test/accuracy"])
    assert isinstance(loaded.schedule, Cosine)
    assert loaded.threshold == 0.4


def test_torch_export_needs_neither_the_package_nor_the_class(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    model, folder = run
    checkpoint = str(folder / "last.ckpt")
    assert main(["export", "--ckpt_path", checkpoint, "--format", "torch_export", "--output", str(tmp_path)]) == 0
    images = some_images()
    torch.save(images, tmp_path / "images.pt")
    script = textwrap.dedent("""
        import sys, torch
        network = torch.export.load("model.pt2").module()
        torch.save(network(torch.load("images.pt")), "logits.pt")
        assert not any(name.startswith("lightning") for name in sys.modules)
    """)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), evaluated(model, normalized(images)))


@pytest.mark.parametrize(
    ("format", "name"), [("safetensors", "model.safetensors"), ("torch_export", "model.pt2"), ("onnx", "model.onnx")]
)
def test_a_full_disk_leaves_the_older_file(
    tmp_path: Path, run: tuple[SemiFL, Path], format: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of this process may have 1,000 bytes meanwhile."""
    if format == "onnx":
        pytest.importorskip("onnxscript")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # bytecode that ends early would break later imports
    network, description = network_of(run[1] / "last.ckpt")
    (tmp_path / name).write_text("older")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large"):
            export(network, description, tmp_path, format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "older"


def test_hugging_faces_mixin_loads_a_saved_model(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class HubCNN(CNN, hub.PyTorchModelHubMixin):  # type: ignore[misc, name-defined]
        """The network, with ``from_pretrained`` and ``push_to_hub``."""

    model = toy_semifl(network=partial(CNN, width=3, norm="batch"))
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(model, ToyData())
    trainer.save_model(tmp_path / "model")
    loaded = HubCNN.from_pretrained(tmp_path / "model")
    assert len(loaded.convs[0].weight) == 3
    images = normalized(some_images())
    assert torch.equal(loaded(images), evaluated(model, images))


def test_a_folder_for_the_hub_has_a_card(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    assert main(["export", "--ckpt_path", str(run[1] / "last.ckpt"), "--output", str(tmp_path), "--format", "hub"]) == 0
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"model.safetensors", "model.json", "config.json", "README.md", "model.pt2"}
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: pytorch\n")
    for format in ("hub", "torch_export"):  # the settings may name files
        export(*network_of(run[1] / "last.ckpt"), tmp_path / format, format)
        assert "settings" not in json.loads((tmp_path / format / "model.json").read_text())
    assert f"| val/accuracy | {load_network(tmp_path)[1]['metrics']['val/accuracy']:.4f} |" in card
    assert all(words in card for words in ("2106.01432", "torch.rand(1, 1, 8, 8)"))


def test_a_metric_without_a_value_is_null(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    """NaN is no JSON: other programs would refuse the file."""
    network, description = network_of(run[1] / "last.ckpt")
    metrics = {"test/accuracy": float("nan"), "val/auroc": float("inf"), "val/loss": 0.5}
    export(network, {**description, "metrics": metrics}, tmp_path, "hub")
    text = (tmp_path / "model.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)["metrics"]
    assert found == {"test/accuracy": None, "val/auroc": None, "val/loss": 0.5}
    export(*load_network(tmp_path), tmp_path / "again", "hub")
    for folder in (tmp_path, tmp_path / "again"):
        card = (folder / "README.md").read_text()
        assert "| test/accuracy | - |\n| val/auroc | - |\n| val/loss | 0.5000 |" in card


def test_no_name_of_a_foreign_file_begins_a_line_of_the_model_card(run: tuple[SemiFL, Path]) -> None:
    description = checkpoint_file.load(run[1] / "last.ckpt")["model"]
    lines = len(model_card(description).splitlines())
    forged = "x\n---\r\n# license"
    for name in ("algorithm", "data_set", "citation", "version", "task", "outputs", "rounds"):
        description[name] = forged
    description["network"] |= {"class_path": forged}
    description["metrics"] = {f"{forged}{name}": 0.5 for name in description["metrics"]}
    text = model_card(description | {"class_names": [forged]})
    head, _, card = text.removeprefix("---").partition("\n---\n")
    assert len(card.splitlines()) <= lines
    assert "\n---" not in card
    assert [line for line in card.splitlines() if line.startswith("#")] == [card.splitlines()[1]]
    assert yaml.safe_load(head)["datasets"] == [forged]


def test_a_metric_of_an_earlier_model_names_its_round(tmp_path: Path) -> None:
    """The run is validated in round 3 and ends in round 4; resumed, it ends in round 5."""
    for stop in (4, 5):
        trainer = toy_trainer(tmp_path, max_rounds=9, check_val_every_n_rounds=3, callbacks=StopAfter(stop))
        trainer.fit(toy_semifl(), ToyData(), ckpt_path=None if stop == 4 else "last")
        description = json.loads(Path(str(trainer.log_dir), "checkpoints/model.json").read_text())
        assert (description["rounds"], description["metric_rounds"]) == (stop, {"val": 3, "test": stop})
        card = model_card(description)
        assert f"| val/accuracy (of round 3) | {description['metrics']['val/accuracy']:.4f} |" in card
        assert f"| test/accuracy | {description['metrics']['test/accuracy']:.4f} |" in card


def test_a_model_of_64_bits_is_written_in_32_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, precision="64-true")
    trainer.fit(toy_semifl(), ToyData())
    folder = Path(str(trainer.log_dir), "checkpoints")
    assert json.loads((folder / "model.json").read_text())["dtype"] == "float64"
    assert {t.dtype for name, t in load_file(folder / "model.safetensors").items() if "norm" not in name} == {
        torch.float64
    }
    assert main(["export", "--ckpt_path", str(folder / "last.ckpt"), "--output", str(tmp_path / "out")]) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == "the run trained float64 weights; they are written as float32"
    description = json.loads((tmp_path / "out/model.json").read_text())
    assert (description["trained_dtype"], description["dtype"]) == ("float64", "float32")
    written = load_file(tmp_path / "out/model.safetensors").values()
    assert {t.dtype for t in written if t.is_floating_point()} == {torch.float32}


def test_onnx_gives_the_same_logits(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    (path,) = export(*network_of(run[1] / "last.ckpt"), tmp_path, "onnx")
    images = some_images()
    (logits,) = runtime.InferenceSession(path).run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), evaluated(run[0], normalized(images)), atol=1e-5, rtol=1e-4)


def test_export_names_the_checkpoint_that_it_has_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: tuple[SemiFL, Path]
) -> None:
    best, root = run[1] / "best.ckpt", run[1].parent.parent.parent
    assert main(["export", "--default_root_dir", str(root), "--output", str(tmp_path)]) == 0
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line == f"read: {best}, SemiFL, round {checkpoint_file.load(best)['round']}"


def test_equal_weights_have_equal_bytes(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    for name in "abcdefgh":
        export(*network_of(run[1] / "last.ckpt"), tmp_path / name, "safetensors")
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in "abcdefgh"}) == 1


MARK: list[object] = []


def marking(num_classes: int = 3, **arguments: object) -> nn.Module:
    """A function that a file of somebody else names, in place of os.system."""
    MARK.append(arguments)
    return CNN(width=4, norm="static_batch", num_classes=num_classes, in_shape=(1, 8, 8))


MARKING = {"class_path": "tests.export.test_export.marking", "init_args": {}}
FOREIGN = [
    ({"network": MARKING}, "tests.export.test_export.marking"),
    ({"network": {"class_path": "torch.hub.load", "init_args": {"repo_or_dir": "x"}}}, "torch.hub.load"),
    ({"network": {"class_path": "torch.os.system", "init_args": {"command": "true"}}}, "torch.os.system"),
    ({"network": {"class_path": "lightning_fedssl.cli.FederatedCLI", "init_args": {"args": []}}}, "FederatedCLI"),
    ({"network": {"class_path": "torch.utils.model_dump.__main__.x", "init_args": {}}}, "nothing of it was run"),
    ({"network": {"class_path": "torch.nn.NoLayer", "init_args": {}}}, "cannot be imported"),
    ({"network": {"class_path": "torch.nn.ReLU", "init_args": [1]}}, "must be names with values"),
    ({"network": {"class_path": "torch.nn.ReLU", "init_args": {"inplace": MARKING}}}, "test_export.marking"),
]


def with_entries(path: Path, entries: dict[str, Any], folder: Path) -> Path:
    """The checkpoint with other hyper-parameters, and model.json with the other network."""
    checkpoint = checkpoint_file.load(path)
    checkpoint["model"]["arguments"] |= entries
    checkpoint_file.save(checkpoint, folder / "foreign.ckpt")
    for name in ("model.json", "model.safetensors"):
        (folder / name).write_bytes(path.with_name(name).read_bytes())
    description = json.loads((folder / "model.json").read_text())
    description["network"] |= entries.get("network", {})
    (folder / "model.json").write_text(json.dumps(description))
    return folder / "foreign.ckpt"


@pytest.mark.parametrize("entries", [{}, {"network": {}}, {"network": {"class_path": "torch.nn.ReLU"}}, []])
def test_a_damaged_description_is_named(tmp_path: Path, entries: object) -> None:
    (tmp_path / "model.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"model\.json is damaged"):
        load_network(tmp_path)


@pytest.mark.parametrize(("entries", "words"), FOREIGN)
def test_a_file_builds_networks_of_known_packages_alone(
    tmp_path: Path, run: tuple[SemiFL, Path], entries: dict[str, Any], words: str
) -> None:
    foreign = with_entries(run[1] / "last.ckpt", entries, tmp_path)
    for load in (network_of, SemiFL.load_from_checkpoint, lambda path: load_network(path.parent)):
        with pytest.raises(ValueError, match=words):
            load(foreign)
    assert not MARK


@pytest.mark.parametrize("entries", [{"optimizer": MARKING}, {"hparams_file": "x.yaml"}, {"weights_only": False}])
def test_other_arguments_of_a_foreign_checkpoint_are_not_used(
    tmp_path: Path, run: tuple[SemiFL, Path], entries: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError)):
        network_of(with_entries(run[1] / "last.ckpt", entries, tmp_path))
    assert not MARK


def test_what_a_trusted_module_imports_is_not_trusted(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    for name in ("json.dumps", "Path.cwd", "pytest.exit"):
        foreign = {"network": {"class_path": f"{__name__}.{name}", "init_args": {}}}
        path = with_entries(run[1] / "last.ckpt", foreign, tmp_path)
        for load in (network_of, load_network):
            with pytest.raises(ValueError, match="nothing of it was run"):
                load(path if load is network_of else path.parent, trust=[__name__])


def test_a_function_that_the_command_line_names_is_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MARK", [])
    values = {"model.network": f"{__name__}.marking", "trainer.max_rounds": 1, "trainer.default_root_dir": tmp_path}
    trainer, model, data = Experiment.from_config("semifl_digits.yaml", values)
    trainer.fit(model, data)
    path = Path(str(trainer.log_dir), "checkpoints/last.ckpt")
    assert_same(dict(network_of(path, trust=[__name__])[0].state_dict()), dict(model.network.state_dict()))
    assert isinstance(SemiFL.load_from_checkpoint(path, trust=[__name__]).network, CNN)


def test_modules_that_the_caller_trusts_are_built(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    foreign = with_entries(run[1] / "last.ckpt", {"network": MARKING}, tmp_path)
    images = normalized(some_images())
    arguments = ["export", "--ckpt_path", str(foreign), "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert main([*arguments, "--trust", "tests.export", "my_other_module"]) == 0
    for network in (
        load_network(tmp_path, trust=["tests.export.test_export"])[0],
        SemiFL.load_from_checkpoint(foreign, trust=["tests"]).eval(),
    ):
        assert torch.equal(network(images), evaluated(run[0], images))
    MARK.clear()


@pytest.mark.parametrize("name", ["subprocess.Popen", "torch.nn.ReLU"])
def test_a_checkpoint_cannot_name_a_method_that_is_none(tmp_path: Path, run: tuple[SemiFL, Path], name: str) -> None:
    checkpoint = checkpoint_file.load(run[1] / "last.ckpt")
    checkpoint["model"]["algorithm"] = name
    checkpoint_file.save(checkpoint, tmp_path / "odd.ckpt")
    with pytest.raises(ValueError, match=name):
        network_of(tmp_path / "odd.ckpt")


def test_best_leaves_the_clients_states_out_and_says_so_when_resumed(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    folder = run[1]
    best, last = (checkpoint_file.load(folder / f"{name}.ckpt") for name in ("best", "last"))
    assert best["federation"]["clients"] == best["federation"]["server_optimizer"] == {}
    assert last["federation"]["clients"]
    assert (folder / "best.ckpt").stat().st_size < (folder / "last.ckpt").stat().st_size
    with pytest.raises(ValueError, match=r"lacks the states .* give --ckpt_path last"):
        toy_trainer(tmp_path).fit(toy_semifl(), ToyData(), ckpt_path=folder / "best.ckpt")


def test_best_without_client_states_to_leave_out_can_be_resumed(tmp_path: Path) -> None:
    data = partial(ToyData, label_location="clients", num_labels="all")
    make = partial(FedAvg, network=MLP, num_classes=3, in_shape=(1, 8, 8))
    whole, parted = make(), make()
    toy_trainer(tmp_path / "whole").fit(whole, data())
    first = toy_trainer(tmp_path / "parted", callbacks=FederatedCheckpoint(monitor="client/trained"))
    first.fit(make(), data())  # the same value in each round: best is round 1
    again = toy_trainer(tmp_path / "again")
    again.fit(parted, data(), ckpt_path=Path(str(first.log_dir)) / "checkpoints/best.ckpt")
    assert_same(whole.server.model(), parted.server.model())


class Own(nn.Module):
    def __init__(self, num_classes: int, width: int = 3) -> None:
        super().__init__()


def test_values_are_named_as_in_a_configuration() -> None:
    path = "tests.export.test_export.Own"
    assert named_value(partial(Own, width=5)) == {"class_path": path, "init_args": {"width": 5}}
    assert named_value(Cosine(final=0.5))["init_args"] == {"rounds": None, "final": 0.5}
    assert named_value(images_of) == {"class_path": "tests.toy.images_of", "init_args": {}}
    assert named_values({"network": lambda: None, "tau": (1, 2)}) == {"tau": [1, 2]}
    assert vars(object_of(named_value(Cosine(final=0.5)))) == vars(Cosine(final=0.5))
    for value in (lambda: None, Own(3), partial(Own, 3)):
        with pytest.raises(NotNamedError):
            named_value(value)


def test_a_network_without_an_import_path_still_leaves_its_weights(tmp_path: Path) -> None:
    model = FedAvg(network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), num_classes=3, in_shape=(1, 8, 8))
    trainer = toy_trainer(tmp_path, max_rounds=1)
    trainer.fit(model, ToyData(label_location="clients", num_labels="all"))
    folder = Path(str(trainer.log_dir)) / "checkpoints"
    assert set(load_file(folder / "model.safetensors")) == {"1.weight", "1.bias"}
    with pytest.raises(ValueError, match="has no import path"):
        load_network(folder)
    with pytest.raises(ValueError, match=r"no import path .* use the model\.safetensors that fit wrote"):
        network_of(folder / "last.ckpt")
    loaded = FedAvg.load_from_checkpoint(folder / "last.ckpt", network=model.network_factory)
    assert_same(dict(loaded.network.state_dict()), dict(model.configured_network().state_dict()))


def test_new_images_are_predicted_with_file_and_class_names(tmp_path: Path, run: tuple[SemiFL, Path]) -> None:
    """The test images as files in folders: the same probabilities, in the order of the paths."""
    model, folder = run
    data = ToyData()
    data.setup()
    for index, image in enumerate(data._test.images):
        path = tmp_path / "new" / f"folder_{index // 40}" / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    (tmp_path / "new" / "notes.txt").write_text("no image")
    trainer = toy_trainer(tmp_path)
    (expected,) = trainer.predict(model, ToyData(), ckpt_path=folder / "last.ckpt")
    new = ToyData(predict_root=str(tmp_path / "new"), eval_batch_size=7)
    (found,) = trainer.predict(model, new, ckpt_path=folder / "last.ckpt")
    assert expected is not None
    assert found is not None
    torch.testing.assert_close(found, expected)
    with (Path(str(trainer.log_dir)) / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[41]["file"] == "folder_1/41.png"
    assert [row["class_name"] for row in rows] == ["abc"[k] for k in found.argmax(1).tolist()]
    assert [int(row["image"]) for row in rows] == list(range(60))
    assert [float(row["probability_c"]) for row in rows] == pytest.approx(found[:, 2].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), ("", "holds no image file"), ("x", r"predict_root: .*readable")]
)
def test_a_folder_without_readable_images_is_named(
    tmp_path: Path, run: tuple[SemiFL, Path], content: str | None, message: str
) -> None:
    root = tmp_path / "new"
    if content is not None:
        root.mkdir()
        (root / ("a.png" if content else "a.txt")).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        toy_trainer(tmp_path).predict(run[0], ToyData(predict_root=str(root)), ckpt_path=run[1] / "last.ckpt")
    assert not list(tmp_path.rglob("version_*"))


def test_new_image_files_are_refused_where_training_was_on_numbers(tmp_path: Path) -> None:
    """Numbers in another unit than pixels."""
    rows = torch.arange(30)
    known = TensorDataset(images_of(rows % 3, 5) / 100, rows % 3)
    data = FederatedDataModule.from_datasets(known, known, num_clients=3, num_labels=6, weak="none", strong="none")
    data.setup()
    data.predict_root = str(tmp_path)
    with pytest.raises(ValueError, match=r"predict_root: samples are numbers that are not 8-bit pixels"):
        next(data.predict_batches())
