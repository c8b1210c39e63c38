"""Every digits configuration on the emulated device computes what it computes on the CPU.

Runs in a process of its own, where the driver answers: see ``test_methods.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_fedssl.cli.lightning_cli import FederatedCLI
from lightning_fedssl.functional.recorded import Recorded
from lightning_fedssl.local_training import stack_memory
from lightning_fedssl.storage import checkpoint_file
from tests.emulated_cuda.device import DeviceError, EmulatedTensor, Graph, emulated_cuda

CONFIGS = sorted(path.stem.removesuffix("_digits") for path in Path("configs").glob("*_digits.yaml"))
CNN, MLP = {"model.network.width": 4}, {"model.network.hidden": "[16]"}
ELASTIC = {**CNN, "model.local_steps": 3}
LABELS = {**CNN, "model.threshold": 0.1}
STEPS = {**LABELS, "model.client_steps": 3, "model.server_steps": 3}
SMALL: dict[str, dict[str, Any]] = {
    "easgd": ELASTIC, "overlapsgd": ELASTIC, "fedshvr": MLP, "meanteacher": MLP,
    "pseudolabel": MLP, "fedswitch": STEPS, "fedswitchsl": STEPS, "semisfl": STEPS, "fixmatch": LABELS,
    "fedmatch": LABELS, "semifl": LABELS, "uda": LABELS,
    "fedrgd": {**ELASTIC, "model.server_only_rounds": 0, "model.network.norm_groups": 2},
}  # fmt: skip
"""Settings with which every party trains for few steps from the first round on; a small CNN for the others."""


def fit(name: str, folder: Path, **more: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The global model on the CPU and the scalars after two rounds."""
    pooled = name in ("supervised", "fixmatch_pooled")
    chosen = {
        "trainer.max_rounds": 2, "trainer.clients_per_round": 1 if pooled else 3, "trainer.logger": "false",
        "trainer.enable_progress_bar": "false", "trainer.default_root_dir": folder, "data.client_batch_size": 60,
        **SMALL.get(name, CNN), **{key.replace("__", "."): value for key, value in more.items()},
    }  # fmt: skip
    if name == "fedrgd":
        chosen["trainer.clients_per_round"] = 4
    options = [part for key, value in chosen.items() for part in (f"--{key}", str(value))]
    cli = FederatedCLI(args=["fit", "--config", f"configs/{name}_digits.yaml", *options])
    metrics = {k: float(v) for k, v in cli.trainer.callback_metrics.items() if not k.startswith("time/")}
    return {key: t.detach().cpu() for key, t in cli.model.server.model().items()}, metrics


@pytest.mark.parametrize(
    ("name", "at_once"),
    [("semifl", 1), ("semifl", 3), *((name, (1, 4)[number % 2]) for number, name in enumerate(CONFIGS))],
)
def test_the_device_computes_what_the_cpu_does(name: str, at_once: int, tmp_path: Path) -> None:
    """Bit by bit in float32; of the configurations every second one with stacked clients, on the CPU in the same rows.

    SemiFL's steps are enough to be recorded: of stacked clients each shape once for the run.
    """
    common = {"trainer__clients_at_once": at_once}
    with mock.patch.object(stack_memory, "KIND", "cpu"):
        expected = fit(name, tmp_path, trainer__accelerator="cpu", trainer__devices=1, **common)
    stored = mock.patch.object(checkpoint_file, "_PLAIN", {*checkpoint_file._PLAIN, EmulatedTensor})
    replay = mock.patch.object(Graph, "replay", autospec=True, side_effect=Graph.replay)
    record = mock.patch.object(Recorded, "_record", autospec=True, side_effect=Recorded._record)
    with emulated_cuda(), stored, replay as replayed, record as recorded:
        found = fit(name, tmp_path, trainer__accelerator="cuda", trainer__devices=1, **common)
    assert [key for key, t in expected[0].items() if not torch.equal(t, found[0][key])] == []
    assert all(t.isfinite().all() for t in found[0].values() if t.is_floating_point())
    assert found[1] == pytest.approx(expected[1], rel=1e-6, nan_ok=True)
    assert name != "semifl" or replayed.call_count > 50
    if at_once == 3:
        stacked = [call.args[1]["x_weak"].shape for call in recorded.call_args_list if "x_weak" in call.args[1]]
        assert sorted(shape[:2] for shape in stacked) == [(1, 2), (3, 60)]


def test_the_rules_of_the_device_are_enforced() -> None:
    with emulated_cuda():
        x = torch.ones(3, device="cuda")
        with pytest.raises(DeviceError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(DeviceError, match="same device"):
            torch.stack([x, torch.ones(3)])
        assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number may come from the host
        early = x.to("cpu", non_blocking=True)
        assert early.isnan().all()
        torch.cuda.synchronize()
        assert early.tolist() == [1.0, 1.0, 1.0]
    assert type(torch.ones(2)) is torch.Tensor
