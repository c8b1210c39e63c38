"""Every digits configuration on the pretend CUDA device. Runs in its process: see ``tests/test_cuda_path.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretend_cuda.device import pretend_cuda
from tests.pretend_cuda.federations import CONFIGS, Result, fit

MODES: dict[str, dict[str, Any]] = {
    "sequential": {"trainer__clients_at_once": 1},
    "stacked": {"trainer__clients_at_once": "auto"},
    "graphs": {"trainer__clients_at_once": "auto", "trainer__cuda_graphs": True},
}
WITHOUT_STACKS = {"supervised", "fixmatch_pooled"}
"""One party trains in a round."""

SPLIT = {"semisfl", "fedswitchsl"}
"""Split learning, which records no graphs."""

WAITS: dict[str, int] = {
    "datasharing": 17,
    "easgd": 24,
    "fedavg": 17,
    "fedmatch": 28,
    "fedrgd": 66,
    "fedshvr": 26,
    "fedswitch": 22,
    "fedswitchsl": 22,
    "fixmatch": 18,
    "fixmatch_pooled": 14,
    "meanteacher": 19,
    "overlapsgd": 23,
    "pseudolabel": 19,
    "semifl": 24,
    "semisfl": 22,
    "supervised": 12,
    "uda": 18,
}
"""Where the host may wait for the device in a round, at most: by configuration. It may only fall."""

KERNELS: dict[str, tuple[float, ...]] = {
    "datasharing": (50, 37, 17),
    "easgd": (50, 38, 17),
    "fedavg": (47, 34, 13),
    "fedmatch": (318, 182, 96),
    "fedrgd": (400, 400, 200),
    "fedshvr": (61, 47, 7),
    "fedswitch": (239, 202, 169),
    "fedswitchsl": (104, 98, 98),
    "fixmatch": (163, 132, 106),
    "fixmatch_pooled": (229, 229, 229),
    "meanteacher": (67, 50, 7),
    "overlapsgd": (50, 38, 17),
    "pseudolabel": (45, 45, 7),
    "semifl": (223, 176, 121),
    "semisfl": (99, 93, 93),
    "supervised": (0, 0, 0),
    "uda": (171, 171, 171),
}
"""Launches for a step of one client, at most: sequential, stacked and with graphs. They may only fall."""


MEMORY = {"stacked": 2.0, "graphs": 2.5}
"""Peak memory of clients' training over the estimate, at most: networks here are so small that what surrounds the
training weighs as much. It may only fall."""


def both(name: str, mode: str, root: Path, **more: Any) -> tuple[Result, Result]:
    """A run on the CPU and on the device."""
    settings = MODES[mode] | more
    cohort = CONFIGS[name].get("trainer.clients_per_round", 3)
    on_cpu = settings | ({} if mode == "sequential" else {"trainer__clients_at_once": cohort})
    expected = fit(name, None, root / "cpu", **on_cpu)
    with pretend_cuda() as device:
        return expected, fit(name, device, root / "cuda", **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_device_computes_what_the_cpu_does(name: str, mode: str, tmp_path: Path) -> None:
    """Bit by bit in float32, without a wait inside a client's step, within the budgets."""
    expected, found = both(name, mode, tmp_path)
    last = found.rounds[-1]
    per_step = last.step_kernels / max(last.client_steps, 1)
    print(f"MEASURED {name} {mode} {last.waits.total()} {per_step:.1f} {found.needed} {found.estimate}")
    assert expected.model.keys() == found.model.keys()
    assert [key for key, t in expected.model.items() if not torch.equal(t, found.model[key])] == []
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6, nan_ok=True)
    assert +last.step_waits == {}
    if name != "supervised":
        assert all(round_.uploaded == len(found.trainer.cohort) for round_ in found.rounds)
    assert last.waits.total() <= WAITS[name], last.waits
    assert per_step <= KERNELS[name][list(MODES).index(mode)]
    if mode == "graphs" and name not in SPLIT | WITHOUT_STACKS:
        assert last.replays > 0
    if found.estimate is not None:
        assert found.needed <= MEMORY[mode] * found.estimate


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_bfloat16_runs_in_one_mode_of_each(number: int, tmp_path: Path) -> None:
    name, mode = list(CONFIGS)[number], list(MODES)[number % 3]
    with pretend_cuda() as device:
        found = fit(name, device, tmp_path, trainer__precision="bf16-mixed", **MODES[mode])
    assert +found.rounds[-1].step_waits == {}
    assert all(t.isfinite().all() for t in found.model.values() if t.is_floating_point())
    if mode == "graphs" and name not in SPLIT | WITHOUT_STACKS:
        assert found.rounds[-1].replays > 0


@pytest.mark.parametrize("mode", ["stacked", "graphs"])
def test_channels_last(mode: str, tmp_path: Path) -> None:
    expected, found = both("fixmatch", mode, tmp_path, trainer__channels_last=True)
    assert [key for key, t in expected.model.items() if not torch.equal(t, found.model[key])] == []


def test_client_states_on_the_disk(tmp_path: Path) -> None:
    expected, found = both("semifl", "graphs", tmp_path, trainer__client_store="disk")
    assert [key for key, t in expected.model.items() if not torch.equal(t, found.model[key])] == []
