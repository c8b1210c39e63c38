from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lightning_fedssl.cli import FederatedCLI
from lightning_fedssl.cli.deploy import main, make_node, make_parts
from lightning_fedssl.data.class_shares import ROUGH, SiteShares
from lightning_fedssl.deployment.own_data import ServerData
from tests.toy import images_of

SMALL = ["--config", "semifl_digits.yaml", "--data.num_clients=3", "--trainer.clients_per_round=2"]


def save_images(folder: Path, labels: list[int], seed: int) -> None:
    """Write toy images below a folder for each class, or into the folder itself if the labels are hidden."""
    for number, (image, label) in enumerate(zip(images_of(torch.tensor(labels), seed), labels, strict=True)):
        place = folder if folder.name == "unlabeled" else folder / "abc"[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place / f"{number:03}.png")


def test_init_writes_an_app_with_the_whole_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my app!", *SMALL]) == 0
    config = yaml.safe_load((tmp_path / "my app!" / "fedssl_app" / "config.yaml").read_text())
    assert (config["data"]["num_clients"], config["trainer"]["clients_per_round"]) == (3, 2)
    project = (tmp_path / "my app!" / "pyproject.toml").read_text()
    assert 'serverapp = "fedssl_app.server_app:app"' in project
    assert 'name = "my-app"' in project
    assert "next: flwr run 'my app!' SUPERLINK" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="has files"):
        main(["init", "my app!", *SMALL])


def test_init_copies_the_file_of_a_partition_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server and nodes run in folders of their own, where a relative path leads nowhere."""
    monkeypatch.chdir(tmp_path)
    drawn = FederatedCLI(args=SMALL, run=False).datamodule
    drawn.setup()
    drawn.split.save(tmp_path / "p.json")
    given = ["--data.partition=FromFile", "--data.partition.path=p.json"]
    assert main(["init", "app", *SMALL, *given]) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "p.json").unlink()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, _, data = make_parts(tmp_path / "app" / "fedssl_app" / "config.yaml", {})
    data.setup()
    assert data.split.hash == drawn.split.hash
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"p\.json"):
        main(["init", "other", *SMALL, *given])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "semisfl_digits.yaml"], "SemiSFL exchanges features"),
        ([*SMALL, "--data.task=Regression"], r"data\.task: \w+ cannot train on Regression; .*MeanTeacher"),
        (
            [*SMALL, "--trainer.callbacks+=FederatedCheckpoint", "--trainer.callbacks.every_n_rounds=5"],
            "every_n_rounds is 5",
        ),
    ],
)
def test_init_refuses_what_only_the_simulation_can_run(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(["init", str(tmp_path / "app"), *options])
    assert not (tmp_path / "app").exists()


def test_init_without_a_folder_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["init", "--config", "semifl_digits.yaml"])
    assert "FOLDER is missing" in capsys.readouterr().err


@pytest.mark.parametrize("node_config", [{}, {"client": 3}, {"client": -1}])
def test_a_node_whose_client_does_not_exist_is_refused(tmp_path: Path, node_config: dict[str, Any]) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")
    main(["init", str(tmp_path / "app"), *SMALL])
    with pytest.raises(ValueError, match="give --node-config 'client=0' with a number below 3"):
        make_node(tmp_path / "app" / "fedssl_app" / "config.yaml", node_config, {})


def test_an_app_whose_nodes_have_folders_of_their_own(tmp_path: Path) -> None:
    """From the command to the last round, with the functions that Flower's processes call."""
    pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")
    from lightning_fedssl.deployment.node import make_client_app
    from lightning_fedssl.deployment.server import fit_on_grid
    from tests.deployment.helpers import FakeGrid

    save_images(tmp_path / "server" / "train", [0, 1, 2] * 6, 0)
    save_images(tmp_path / "server" / "test", [0, 1, 2] * 4, 1)
    options = ["--data.dataset=image_folder", f"--data.root={tmp_path / 'server'}", "--data.image_size=8"]
    options += ["--data.num_labels=all", "--data.num_clients=2", "--trainer.clients_per_round=2"]
    options += [
        "--data.class_shares={of: nodes}",
        "--trainer.max_rounds=2",
        f"--trainer.default_root_dir={tmp_path / 'run'}",
        "--model.threshold=0.3",
    ]
    assert main(["init", str(tmp_path / "app"), "--own_data", "--config", "fixmatch_digits.yaml", *options]) == 0
    config, apps = tmp_path / "app" / "fedssl_app" / "config.yaml", {}
    for client in range(2):
        own = tmp_path / f"client {client}"
        save_images(own / "unlabeled", [0, 1, 2] * 5, 2 + client)
        node_config = {
            "client": client,
            "data": str(own),
            "state-dir": str(tmp_path),
            "class-shares": "{b: about half}",
        }
        apps[100 + client] = make_client_app(lambda *_, given=node_config: make_node(config, given, {}))
    assert make_node(config, node_config, {}).shares == SiteShares((0.25, 0.5, 0.25), ROUGH)
    with pytest.raises(ValueError, match="class-shares: the app"):
        make_node(config, node_config, {"options": "--data.class_shares null"})
    with pytest.raises(ValueError, match='in an app with --own_data also data="FOLDER"'):
        make_node(config, {"client": 0}, {})
    trainer, algorithm, data = make_parts(config, {"options": "--trainer.enable_progress_bar false"})
    assert isinstance(data, ServerData)
    grid: Any = FakeGrid(apps)
    fit_on_grid(grid, {"round-deadline": 10, "connect-timeout": 10}, (trainer, algorithm, data))
    assert (trainer.round_index, data.client_sizes) == (2, {0: (0, 15), 1: (0, 15)})
    assert float(trainer.callback_metrics["client/trained"]) == 2
    assert {message.metadata.message_type for message in grid.sent} >= {"train.client", "query.moments"}
    assert "of unknown class: 30 images" in data.statistics.summary()


@pytest.mark.parametrize("kind", ["Arrays", "Table"])
def test_a_node_with_own_data_reads_no_file_of_the_server(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")
    monkeypatch.chdir(tmp_path)
    x, y = np.arange(80, dtype=np.float32).reshape(40, 2), np.arange(40) % 2
    np.savez("own.npz", train=x, train_labels=y, test=x, test_labels=y)
    Path("own.csv").write_text("a,b,label\n" + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(x, y, strict=True)))
    np.savez("node.npz", unlabeled=x)
    file = "path=own.npz" if kind == "Arrays" else "csv_file=own.csv"
    options = ["--data.num_clients=2", f"--data.dataset={kind}", f"--data.dataset.{file}"]
    assert main(["init", "app", "--own_data", "--config=presets/table.yaml", *options]) == 0
    for name in ("own.npz", "own.csv"):
        Path(name).unlink()
    node = make_node(Path("app/fedssl_app/config.yaml"), {"client": 0, "data": "node.npz"}, {})
    assert node.data.local_data(1, torch.float32).images.shape == (40, 2)
