"""Every method on the digits: true labels of unlabelled images change no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.cli import FederatedCLI
from tests.pretend_cuda.federations import CONFIGS as SMALL
from tests.pretend_cuda.federations import options
from tests.toy import assert_same, weights

CONFIGS = sorted(path.name for path in (Path(__file__).parent.parent / "configs").glob("*_digits.yaml"))


def trained(folder: Path, config: str, scramble: bool) -> tuple[dict[str, torch.Tensor], int]:
    """The global model after two rounds, and the number of images whose labels were scrambled after the partition."""
    settings = ["--trainer.max_rounds=2", "--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    settings += [f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false"]
    settings += ["--data.max_train_images=500", *options(SMALL[config.removesuffix("_digits.yaml")])]
    cli: Any = FederatedCLI(args=["--config", config, *settings], run=False)
    data = cli.datamodule
    data.setup()
    hidden = torch.cat([client.unlabeled for client in data.split.clients]).unique()
    if scramble:
        data._train.labels[hidden] = (data._train.labels[hidden] + 1 + hidden % 9) % 10
    cli.trainer.fit(cli.model, data)
    return weights(cli.model), len(hidden)


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_labels_change_no_weight(tmp_path: Path, config: str) -> None:
    expected, hidden = trained(tmp_path / "a", config, scramble=False)
    found, _ = trained(tmp_path / "b", config, scramble=True)
    assert_same(found, expected)
    supervised = config.startswith(("fedavg", "supervised", "easgd", "overlap", "datasharing"))  # all labels are known
    assert hidden > 100 or supervised
