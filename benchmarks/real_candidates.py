"""The settings that are compared on the development tasks of ``real_tasks.py``, as keys on top of a preset."""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]

WEIGHTS = "LITE0"
"""Stands for the file of the pretrained network."""

ALL_LABELS: Keys = {"data.validation": 0}
FIXED: Keys = {"model.adaptive_threshold": False}
LINEAR: Keys = {"model.network.init_args.hidden": []}
HEAD: Keys = {
    "model.init_head": "labels", "model.optimizer.init_args.lr": 0.03, "model.optimizer.init_args.weight_decay": 0.1,
    "model.optimizer.init_args.momentum": 0, "model.optimizer.init_args.nesterov": False, "trainer.max_rounds": 50,
    "data.server_batch_size": 100_000,
}  # fmt: skip
SELF_TRAINING: Keys = {"model": "SelfTraining", **LINEAR, **HEAD, "data.weak": "none", "data.strong": "none"}
FEW_STEPS: Keys = {"model.client_epochs": 1, "model.server_steps": 25, "trainer.max_rounds": 25}
VIEWS: Keys = {"data.weak": "flip_crop", "data.strong": "fixmatch", "data.server_batch_size": 10}
FIXMATCH: Keys = {"model": "FixMatch", "model.client_steps": 10, "model.label_mode": "eval"}
FL2: Keys = {"model": "FL2", "model.rho": 0, **FIXED}
PRETRAINED: Keys = {"data.backbone.init_args.weights": WEIGHTS}

CANDIDATES: dict[str, dict[str, tuple[str, Keys]]] = {
    "tables": {
        "preset": ("presets/table.yaml", {}),
        "FL2": ("presets/table.yaml", {"model.adaptive_threshold": True}),
        "self-training, linear": ("presets/table.yaml", SELF_TRAINING),
    },
    "series": {
        "preset": ("presets/signals.yaml", {}),
        "FL2, fixed threshold, on kernels": (
            "presets/signals.yaml", {**FL2, **FEW_STEPS, "data.server_batch_size": 10}
        ),
    },
    "images": {
        "preset": ("presets/pretrained_images.yaml", PRETRAINED),
        "FixMatch on features of views": (
            "presets/pretrained_images.yaml",
            {**PRETRAINED, **FIXMATCH, **FEW_STEPS, **VIEWS},
        ),
        "FL2, fixed threshold, on features of views": (
            "presets/pretrained_images.yaml", {**PRETRAINED, **FL2, **FEW_STEPS, **VIEWS}
        ),
        "from scratch: FL2": ("presets/images.yaml", ALL_LABELS),
        "from scratch: FL2, fixed threshold": ("presets/images.yaml", {**ALL_LABELS, **FIXED}),
    },
}  # fmt: skip
"""By kind and name: the preset, and keys on top of it."""
