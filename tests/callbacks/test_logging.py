from __future__ import annotations

from lightning_fedssl.callbacks.logging import round_line


def test_line_of_a_round() -> None:
    metrics = {"val/accuracy": 0.9312, "client/loss": 1.5, "time/round_s": 2.04, "lr": 0.1, "client/images": 1240.0}
    assert round_line(metrics) == "client loss 1.500  images of clients 1,240  validation accuracy 93.1%  time 2.0 s"
