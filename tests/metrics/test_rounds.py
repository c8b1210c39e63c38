"""Weighted means of scalars: rejected clients do not count, and ranks do not change the bits."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_fedssl.metrics.rounds import MetricCollector, means_of


def test_a_rejected_client_s_scalars_do_not_count() -> None:
    collector = MetricCollector()
    for client, loss in ((0, 1.0), (1, math.nan), (2, 3.0)):
        collector.update("client/loss", loss, 2, client)
    for client in range(3):
        collector.discard(client) if client == 1 else collector.commit(client)
    collector.update("server/loss", 5.0)
    assert collector.compute(lambda value: [value]) == {"client/loss": 2.0, "server/loss": 5.0}


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0)], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_of_weight_zero_does_not_count(ranks: int, zero: float | torch.Tensor) -> None:
    collector = MetricCollector(ranks)
    for name, value, weight in (("a", math.nan, zero), ("a", 3.0, 2), ("a", math.nan, zero), ("b", math.nan, zero)):
        collector.update(name, torch.tensor(value), weight, 0)
        collector.update(f"server/{name}", value, weight)
    collector.commit(0)
    assert collector.compute(lambda value: [value]) == {"a": 3.0, "server/a": 3.0}


def test_means_of_ranks_are_those_of_one_rank_bitwise() -> None:
    """Clients 2, 0, 1 log 0.1, 0.3 and 1/3 each; every rank logs the server's loss.

    The sum of client 0 and that of clients 2 and 1 do not add up to the bits of the values added one after another.
    """

    def collected(ranks: int, clients: list[int]) -> MetricCollector:
        collector = MetricCollector(ranks)
        for client in clients:
            for value in (0.1, 0.3, 1 / 3):
                collector.update("client/loss", torch.tensor(value, dtype=torch.float64), 3 + client, client)
            collector.commit(client)
        collector.update("server/loss", 0.1, 7)
        return collector

    alone = collected(1, [2, 0, 1]).compute(lambda value: [value])
    (one, _), (other, _) = (collected(1, clients).sums()["client/loss"] for clients in ([2, 1], [0]))
    assert (one + other) / (3 * 3 + 3 * 4 + 3 * 5) != alone["client/loss"]
    three = [collected(3, clients).take() for clients in ([1, 2], [0], [])]
    assert means_of(three, order=[2, 0, 1]) == alone
    assert three[0].sums == {"server/loss": (0.1 * 7, 7.0)}
