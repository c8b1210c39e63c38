"""The tasks that measure what the presets are worth."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

NAMES = ("tissue", "textures", "shapes", "spectrograms", "bearings", "heartbeats", "patients", "sensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_a_function_of_name_and_seed_and_has_all_classes_and_clients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
    make_task = importlib.import_module("own_tasks").make_task
    task, again, other = (make_task(name, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(task.arrays[part], again.arrays[part]) for part in task.arrays)
    assert not np.array_equal(task.arrays["train"], other.arrays["train"])
    for part in ("train", "test"):
        classes = np.unique(task.arrays[f"{part}_labels"])
        assert classes.tolist() == list(range(len(classes)))
    assert len(np.unique(task.arrays["client_ids"])) == task.keys["data.num_clients"]
