"""CBAFed: adaptive thresholds, second classes that are rare, residual connections of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import fitted, fully_labeled, toy_cbafed
from tests.toy import labeled_clients, toy_fedavg, toy_round


def test_thresholds_and_rare_classes_by_hand() -> None:
    """Shares 0.1, 0.3 and 0.6, times 3/10; their standard deviation is sqrt(0.038 / 2) * 10/3 * 0.3."""
    algorithm = toy_cbafed(threshold=0.5, threshold_cap=0.58, rare_share=0.05)
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm, algorithm.local_modules)
    algorithm.current_round = toy_round(index=1)
    assert not {"classes.threshold", "classes.rare"} & algorithm.broadcast(0).keys()
    algorithm.current_round = toy_round(index=2)
    algorithm.server.extra["counts"] = {"0": torch.tensor([1.0, 1.0, 2.0]), "3": torch.tensor([0.0, 2.0, 4.0])}
    share = torch.tensor([0.03, 0.09, 0.18])
    std = ((share - 0.1).square().sum() / 2).sqrt()
    sent = algorithm.broadcast(0)
    torch.testing.assert_close(sent["classes.threshold"], (share + 0.5 - std).clamp(max=0.58))
    assert sent["classes.rare"].tolist() == [1, 0, 0]


def test_an_image_gets_its_class_if_confident_and_else_its_second_class_if_rare() -> None:
    algorithm: Any = toy_cbafed()
    data = fully_labeled()
    data.setup()
    algorithm.configure_model()
    local = data.local_data(3, 2)
    order = local.unlabeled[local.permutation(len(local.unlabeled), "order")]
    views = torch.cat([local.weak(part, "labeling", start=5 * i) for i, part in enumerate(order.split(5))])
    p = algorithm(views).softmax(dim=1).detach()
    top = p.topk(2).indices
    between = p.max(dim=1).values.sort().values[len(p) // 2 - 1 :][:2].mean()  # batches of another size round elsewhere
    algorithm.classes.threshold.fill_(float(between))
    confident = p.max(dim=1).values > algorithm.classes.threshold[0]
    rare = int(top[~confident, 1].mode().values)
    algorithm.classes.rare[rare] = 1
    expected = sorted([*top[confident, 0].tolist(), *[rare] * int((~confident & (top[:, 1] == rare)).sum())])
    assert 0 < confident.sum() < len(expected)
    x, labels = algorithm.label_images(local)
    assert sorted(labels.tolist()) == expected
    assert len(x) == len(labels)
    work = algorithm.on_client_start(local)
    assert work.payload["counts"].tolist() == [expected.count(k) for k in range(3)]
    assert sum(len(batch["y"]) for batch in work) == len(expected) - (len(expected) % 5 == 1)


def test_with_labels_everywhere_and_without_connections_it_is_federated_averaging(tmp_path: Path) -> None:
    plain = {"residual": False, "gradient_clip_norm": None, "keep_client_optimizer": False}
    own = fitted(tmp_path, toy_cbafed(**plain), labeled_clients())
    for name, value in fitted(tmp_path, toy_fedavg(client_epochs=2), labeled_clients()).items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=0)


def test_stacked_clients_whose_weights_are_connected_train_one_after_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def result(number: int, **kwargs: object) -> dict[str, torch.Tensor]:
        made = toy_cbafed(client_epochs=7, warmup_epochs=6, **kwargs)
        return fitted(tmp_path, made, fully_labeled(), clients_at_once=number, max_rounds=2)

    alone = result(1)
    for name, value in result(4).items():
        torch.testing.assert_close(value, alone[name], rtol=1e-7, atol=1e-8)
    assert "train one after another" in caplog.text
    other = result(1, residual=False)
    assert not torch.allclose(other["network.classifier.weight"], alone["network.classifier.weight"])
