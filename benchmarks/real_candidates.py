"""The settings that are compared on the development tasks of ``real_tasks.py``, as keys on top of a preset."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]

ALL_LABELS: Keys = {"data.validation": 0}
SEMIFL: Keys = {"model": "SemiFL", "model.threshold": 0.95, "model.client_epochs": 1}
FIXMATCH: Keys = {
    "model": "FixMatch", "model.label_mode": "eval", "model.threshold": 0.95, "model.client_steps": 5,
    "model.client_epochs": 1, "model.server_steps": 25, "model.server_phase": "parallel",
}  # fmt: skip
LINEAR: Keys = {"model.network.init_args.hidden": []}
FEWER: Keys = {"trainer.max_rounds": 10}

CANDIDATES: dict[str, dict[str, tuple[str, Keys]]] = {
    "tables": {
        "FL2": ("presets/table.yaml", ALL_LABELS),
        "FL2, fixed threshold 0.95": ("presets/table.yaml", {**ALL_LABELS, "model.adaptive_threshold": False}),
        "SemiFL": ("presets/table.yaml", {**ALL_LABELS, **SEMIFL}),
        "SemiFL, linear": ("presets/table.yaml", {**ALL_LABELS, **SEMIFL, **LINEAR}),
        "SemiFL, linear, 10 rounds": ("presets/table.yaml", {**ALL_LABELS, **SEMIFL, **LINEAR, **FEWER}),
        "FixMatch": ("presets/table.yaml", {**ALL_LABELS, **FIXMATCH}),
    },
    "series": {"preset": ("presets/signals.yaml", {})},
    "images": {"preset": ("presets/images.yaml", {})},
}
"""By kind and name: the preset, and keys on top of it."""
