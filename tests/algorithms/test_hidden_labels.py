"""Every method: true labels of unlabelled images change no weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.algorithms.helpers import METHODS
from tests.toy import assert_same, toy_trainer, weights

SUPERVISED = ("fedavg", "supervised", "easgd", "overlap_sgd", "data_sharing")


@pytest.mark.parametrize("method", METHODS)
def test_hidden_labels_change_no_weight(tmp_path: Path, method: str) -> None:
    make, build = METHODS[method]
    results = []
    for scramble in (False, True):
        algorithm, data = make(), build()
        data.setup("fit")
        hidden = torch.cat([client.unlabeled for client in data.split.clients]).unique()
        assert len(hidden) > 10 or method.startswith(SUPERVISED)
        if scramble:
            train: Any = data._train
            labels = train.labels.clone()
            labels[hidden] = (labels[hidden] + 1) % 3
            data._train = replace(train, labels=labels)
        toy_trainer(tmp_path / str(scramble), max_rounds=2, logger=False).fit(algorithm, data)
        results.append(weights(algorithm))
    assert_same(*results)
