from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.diagnostics.gradient_diversity import sum_gradients
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from lightning_fedssl.algorithms import FedRGD
from lightning_fedssl.algorithms.common.cohort_slots import SlotAlgorithm, group_sizes
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.functional.pseudo_labels import pseudo_label
from lightning_fedssl.functional.schedules import FractionalCosine
from lightning_fedssl.state import ClientUpdate, ServerState
from lightning_fedssl.task import Task
from tests.algorithms.helpers import (
    CONFIDENT_TASKS,
    Given,
    HandData,
    hand_gradient,
    loss_of,
    outcomes,
    ready,
    started,
    toy_rgd,
)
from tests.toy import Line, ToyData, assert_same, data_of, toy_of, toy_round, toy_trainer


def start_round(algorithm: SlotAlgorithm, cohort: list[int], round_index: int = 1) -> None:
    """Start a round without a trainer: the clients of this cohort take their slots."""
    algorithm.current_round = toy_round(cohort=cohort, clients_per_round=len(cohort), index=round_index)
    algorithm.on_round_start()


def with_cohort(cohort: list[int], w: float = 10.0, **kwargs: Any) -> FedRGD:
    """FedRGD in its first round: a Line with w at the server, and a slot for every client of the cohort."""
    algorithm = FedRGD(network=lambda: Line(w, w), num_classes=2, in_shape=(1, 4, 4), **kwargs)
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm)
    start_round(algorithm, cohort)
    algorithm._servers = [algorithm.server.model()]
    return algorithm


def returned(algorithm: FedRGD, values: dict[int, float]) -> None:
    """The end of a round in which these weights came back."""
    updates = [
        ClientUpdate(c, {name: torch.full((1,), v) for name in algorithm.server.parameters}, {}, 7 * c + 1, 1)
        for c, v in values.items()
    ]
    algorithm.aggregate(algorithm.accumulate(updates))


def received(algorithm: FedRGD, client: int) -> float:
    return float(algorithm.broadcast(client)["network.w"])


@pytest.mark.parametrize(
    ("groups", "sizes", "server"),
    [(1, [10], 1 / 11), (2, [5, 5], 2 / 12), (5, [2] * 5, 5 / 15), ([10, 10, 10, 10, 7], None, 0.0977)],
)
def test_weights_of_server_and_users(groups: Any, sizes: list[int] | None, server: float) -> None:
    """The average is linear in what comes back: its weights are found by unit values."""
    sizes = sizes or groups
    clients = list(range(sum(sizes)))
    found = []
    for chosen in [-1, *clients]:
        algorithm = with_cohort(clients, float(chosen == -1), groups=groups, regroup="slots")
        returned(algorithm, {c: float(c == chosen) for c in clients})
        found.append(float(algorithm.server.parameters["network.w"]))
    assert found[0] == pytest.approx(server, abs=5e-5)
    expected = [1 / (len(sizes) * (size + 1)) for size in sizes for _ in range(size)]
    assert found[1:] == pytest.approx(expected)
    assert sum(found) == pytest.approx(1)


@pytest.mark.parametrize(("votes", "share"), [(1, 2 / 12), (5, 1 / 2), (0.5, 1 / 11)])
def test_server_votes_set_the_servers_share(votes: float, share: float) -> None:
    """S = 2 groups of 5: the server has votes / (5 + votes) of each mean."""
    algorithm = with_cohort(list(range(10)), 1.0, groups=2, server_votes=votes)
    returned(algorithm, dict.fromkeys(range(10), 0.0))
    assert float(algorithm.server.parameters["network.w"]) == pytest.approx(share)


def test_with_slots_a_user_starts_from_the_group_of_its_slot() -> None:
    """Group means (10 + 1 + 2) / 3 and (10 + 3 + 4) / 3; clients of later rounds take the slots in order."""
    algorithm = with_cohort([5, 3, 8, 1], groups=2, regroup="slots")
    returned(algorithm, {5: 1.0, 3: 2.0, 8: 3.0, 1: 4.0})
    start_round(algorithm, [9, 8, 0, 5], 2)
    assert [received(algorithm, c) for c in (9, 8, 0, 5)] == pytest.approx([13 / 3, 13 / 3, 17 / 3, 17 / 3])
    assert [algorithm.state_owner(c) for c in (9, 8, 0, 5)] == [0, 1, 2, 3]


def test_with_regrouping_a_user_starts_from_the_group_that_it_was_in() -> None:
    """And counts in the mean of the group into which it is drawn now; a new user starts from one of the means."""
    algorithm = with_cohort([5, 3, 8, 1], groups=2)
    was_in = {c: algorithm.group_of(c) for c in (5, 3, 8, 1)}
    returned(algorithm, {5: 1.0, 3: 2.0, 8: 3.0, 1: 4.0})
    values = {5: 1.0, 3: 2.0, 8: 3.0, 1: 4.0}
    means = [(10 + sum(values[c] for c in values if was_in[c] == group)) / 3 for group in range(2)]
    start_round(algorithm, [9, 8, 1, 5], 2)
    assert [received(algorithm, c) for c in (8, 1, 5)] == pytest.approx([means[was_in[c]] for c in (8, 1, 5)])
    assert received(algorithm, 9) in [pytest.approx(mean) for mean in means]
    now_in, server = {c: algorithm.group_of(c) for c in (9, 8, 1, 5)}, float(algorithm.server.parameters["network.w"])
    returned(algorithm, {9: 1.0, 8: 2.0, 1: 3.0, 5: 4.0})
    values = {9: 1.0, 8: 2.0, 1: 3.0, 5: 4.0}
    for group, mean in enumerate(algorithm.group_means()):
        expected = (server + sum(values[c] for c in values if now_in[c] == group)) / 3
        assert float(mean["network.w"]) == pytest.approx(expected)


def test_a_group_whose_users_do_not_return_is_its_server() -> None:
    """Group means (10 + 1 + 1) / 3 and 10."""
    algorithm = with_cohort([0, 1, 2, 3], groups=2, regroup="slots")
    returned(algorithm, {0: 1.0, 1: 1.0})
    assert received(algorithm, 2) == pytest.approx(10)
    assert float(algorithm.server.parameters["network.w"]) == pytest.approx((12 / 3 + 10) / 2)


def test_without_a_server_groups_average_users_and_one_of_each_starts_from_the_average() -> None:
    """Users 0, 1 | 2, 3 | 4, 5: means 0.5, 2.5, 4.5, average 2.5, from which the slots 0, 2 and 5 start."""
    algorithm = with_cohort([0, 1, 2, 3, 4, 5], groups=3, regroup="slots")
    algorithm.server_takes_part, algorithm._servers = False, []
    returned(algorithm, {c: float(c) for c in range(6)})
    assert float(algorithm.server.parameters["network.w"]) == pytest.approx(2.5)
    assert [received(algorithm, c) for c in range(6)] == pytest.approx([2.5, 0.5, 2.5, 2.5, 4.5, 2.5])


def test_in_rounds_of_the_server_alone_users_do_not_train_and_the_average_is_the_server(tmp_path: Path) -> None:
    algorithm = toy_rgd(server_only_rounds=2)
    trainer = toy_trainer(tmp_path, max_rounds=2, clients_per_round=4)
    trainer.fit(algorithm, ToyData(num_clients=6))
    for mean in algorithm.group_means():
        for name, value in algorithm._servers[0].items():
            if name in algorithm.server.parameters:
                torch.testing.assert_close(mean[name], value, rtol=0, atol=0)
    assert "client/loss" not in trainer.callback_metrics


def test_with_weight_0_users_return_what_they_received_but_for_weight_decay(tmp_path: Path) -> None:
    algorithm, sent = toy_rgd(consistency_weight=0.0, keep_client_optimizer=False), Sent()
    algorithm.optimizer = partial(torch.optim.SGD, lr=0.1)
    back: list[dict[str, Tensor]] = []

    class Returned(FederatedCallback):
        def on_client_end(self, trainer: Any, algorithm: Any, update: Any) -> None:
            back.append({name: t.clone() for name, t in update.parameters.items()})

    toy_trainer(tmp_path, max_rounds=1, clients_per_round=4, callbacks=[sent, Returned()]).fit(algorithm, ToyData())
    for start, end in zip(sent.rounds[0].values(), back, strict=True):
        assert_same(start, end)


@pytest.mark.parametrize("groups", [5, [3, 2]])
def test_groups_that_do_not_fit_are_refused(groups: int | list[int]) -> None:
    assert group_sizes(3, 8) == [3, 3, 2]
    with pytest.raises(ValueError, match=r"model\.groups is .*trainer\.clients_per_round, 4"):
        group_sizes(groups, 4)


# Losses.


def test_views_pass_together_and_no_gradient_flows_through_the_label() -> None:
    algorithm = toy_rgd(threshold=0.36)
    batch = started(algorithm, ToyData())[0].batch(0)
    logits = algorithm(torch.cat([batch["x_weak"], batch["x_strong"]]))
    labels = pseudo_label(logits[:5], 0.36)
    assert labels.mask.sum() > 0
    expected = F.cross_entropy(logits[5:][labels.mask], labels.labels[labels.mask], reduction="sum") / 5
    loss = algorithm.training_step(batch, 0)
    assert loss is not None
    torch.testing.assert_close(loss, expected)

    class Two(torch.nn.Module):
        """A weight for the weak half of a batch and one for the strong half."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            half = len(x) // 2
            level = x.flatten(1).mean(1, keepdim=True)
            return torch.cat([level[:half] * self.a * torch.tensor([9.0, 1, 1]), level[half:] * self.b])

    algorithm.network = Two()
    loss = algorithm.training_step(batch, 0)
    assert loss is not None
    loss.backward()
    assert algorithm.network.a.grad is None or not algorithm.network.a.grad.any()
    assert algorithm.network.b.grad is not None
    assert algorithm.network.b.grad.any()


def test_self_training_labels_in_evaluation_mode_and_trains_the_same_view() -> None:
    algorithm = toy_rgd(objective="self_training", threshold=0.0)
    batch = started(algorithm, ToyData(label_location="clients", partition=Given()), client=1)[0].batch(0)
    assert batch.keys() == {"x_weak"}
    algorithm.eval()
    with torch.no_grad():
        labels = algorithm(batch["x_weak"]).argmax(1)
    algorithm.train()
    expected = F.cross_entropy(algorithm(batch["x_weak"]), labels)
    torch.testing.assert_close(algorithm.training_step(batch, 0), expected)
    assert algorithm.training


@pytest.mark.parametrize("task", CONFIDENT_TASKS)
def test_loss_and_diversity_of_labelled_clients_by_hand(task: Task) -> None:
    """Cross-entropy of the labels, and of the confident entries divided by the number of all."""
    algorithm, data = ready(toy_of(FedRGD, task), data_of(task, label_location="clients", num_labels=60))
    algorithm.double()
    found: list[Tensor] = []
    by_hand: list[Tensor] = []
    for client in range(3):
        batch = algorithm.on_client_start(data.local_data(client, 1, torch.float64)).batch(0)
        x, weak, strong = (outcomes(task, algorithm(batch[name])) for name in ("x", "x_weak", "x_strong"))
        confidence, labels = weak.detach().exp().max(-1)
        algorithm.threshold = float(confidence.mean())
        sure = confidence >= algorithm.threshold
        loss = loss_of(x, batch["y"]).mean() + (loss_of(strong, labels) * sure).mean()
        computed = algorithm.training_step(batch, 0)
        assert computed is not None
        assert computed.item() == pytest.approx(loss.item(), abs=1e-12)
        for gradients, value in ((found, computed), (by_hand, loss)):
            gradients.append(parameters_to_vector(torch.autograd.grad(value, [*algorithm.parameters()])))
    g = torch.stack(by_hand)
    diversity = float(g.square().sum() / g.sum(0).square().sum())
    assert sum_gradients(found).diversity() == pytest.approx(diversity, abs=1e-12)


def test_t_full_batches_that_start_anew_when_the_images_run_out() -> None:
    data = ToyData(num_clients=8)
    data.setup()
    local = data.local_data(0, 1)
    assert 10 < len(local.unlabeled) < 15
    algorithm = toy_rgd(local_steps=7)
    batches = list(algorithm.on_client_start(local))
    assert [len(batch["x_weak"]) for batch in batches] == [5] * 7
    again = list(algorithm.on_client_start(local))
    assert all(torch.equal(a["x_strong"], b["x_strong"]) for a, b in zip(batches, again, strict=True))
    server = list(algorithm.on_server_start(data.local_data(-1, 1)))
    assert [len(batch["y"]) for batch in server] == [5] * 7
    algorithm.replica = 1
    other = list(algorithm.on_server_start(data.local_data(-1, 1)))
    assert not all(torch.equal(a["x"], b["x"]) for a, b in zip(server, other, strict=True))


# Whole rounds.


def hand_step(w: float, b: float, lr: float, pairs: list[tuple[float, int]]) -> tuple[float, float]:
    gradients = [hand_gradient(w, b, x, y) for x, y in pairs]
    return w - lr * sum(g[0] for g in gradients) / len(pairs), b - lr * sum(g[1] for g in gradients) / len(pairs)


@pytest.mark.parametrize(("groups", "regroup"), [(1, "each_round"), (2, "slots"), (2, "each_round")])
def test_rounds_worked_out_by_hand(tmp_path: Path, groups: int, regroup: Any) -> None:
    """Two users with an image each, two steps; in two groups each user restarts from the mean of its last group."""
    data, lr, rounds = HandData(), 0.2, 5
    algorithm = FedRGD(
        network=lambda: Line(0.5, 0.1),
        optimizer=partial(torch.optim.SGD, lr=lr),
        schedule=FractionalCosine(0.5),
        threshold=0.0,
        local_steps=2,
        groups=groups,
        regroup=regroup,
        num_classes=2,
        in_shape=(1, 4, 4),
    )
    seen: list[tuple[list[int], list[int], list[int]]] = []

    class Divisions(FederatedCallback):
        def on_aggregate(self, trainer: Any, algorithm: Any) -> None:
            seen.append((trainer.cohort, algorithm.group_of_slot, algorithm.start_of_slot))

    trainer = toy_trainer(
        tmp_path, max_rounds=rounds, clients_per_round=2, precision="64-true", logger=False, callbacks=Divisions()
    )
    trainer.fit(algorithm, data)

    first = (0.5, float(torch.tensor(0.1)))
    means, average, before = [first] * groups, first, dict[int, int]()
    for t, (cohort, group_of_slot, start_of_slot) in enumerate(seen):
        if regroup == "slots" or groups == 1:
            group_of_slot = start_of_slot = [slot % groups for slot in range(2)]
        server = average
        rates = [lr * math.cos(math.pi / 2 * (t + step / 2) / rounds) for step in range(2)]
        labeled = [(data.mean_input(i), i % 2) for i in data.split.server_labeled.tolist()]
        for eta in rates:
            server = hand_step(*server, eta, labeled)
        groups_of_round: list[list[tuple[float, float]]] = [[server] for _ in range(groups)]
        for slot, client in enumerate(cohort):
            x = data.mean_input(int(data.split.clients[client].unlabeled[0]))
            start = before.get(client, start_of_slot[slot]) if regroup == "each_round" else start_of_slot[slot]
            w, b = means[start]
            for eta in rates:
                w, b = hand_step(w, b, eta, [(x, int(b > w * x))])
            groups_of_round[group_of_slot[slot]].append((w, b))
        before = dict(zip(cohort, group_of_slot, strict=True))
        means = [(sum(m[0] for m in g) / len(g), sum(m[1] for m in g) / len(g)) for g in groups_of_round]
        average = (sum(m[0] for m in means) / groups, sum(m[1] for m in means) / groups)
    assert algorithm.server.parameters["network.w"].item() == pytest.approx(average[0], abs=1e-12)
    assert algorithm.server.parameters["network.b"].item() == pytest.approx(average[1], abs=1e-12)
    for group, (w, _) in enumerate(means):
        assert algorithm.server.extra[f"group {group}"]["network.w"].item() == pytest.approx(w, abs=1e-12)
    if groups == 2:
        swapped = [group_of_slot != [0, 1] for _, group_of_slot, _ in seen]
        assert any(swapped) == (regroup == "each_round")


class Sent(FederatedCallback):
    """Copies what every client starts from."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, dict[str, Tensor]]] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.rounds.append({})

    def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: Any) -> None:
        self.rounds[-1][algorithm.slot_of[data.party]] = {n: t.clone() for n, t in algorithm.named_parameters()}


@pytest.mark.parametrize("replicas", ["one", "per_group"])
def test_group_members_start_bit_equal_and_the_server_is_the_mean_of_the_groups(tmp_path: Path, replicas: Any) -> None:
    algorithm, sent = toy_rgd(server_replicas=replicas, regroup="slots"), Sent()
    toy_trainer(tmp_path, clients_per_round=4, callbacks=sent).fit(algorithm, ToyData(num_clients=6))
    for number, slots in enumerate(sent.rounds):
        assert_same(slots[0], slots[1])
        assert_same(slots[2], slots[3])
        differs = any(not torch.equal(slots[0][name], slots[2][name]) for name in slots[0])
        assert differs == (number > 0)
    extra = algorithm.server.extra
    for name, value in algorithm.server.parameters.items():
        torch.testing.assert_close(value, (extra["group 0"][name] + extra["group 1"][name]) / 2)


def test_replicas_train_apart_with_momentum_of_their_own(tmp_path: Path) -> None:
    algorithm = toy_rgd(server_replicas="per_group")
    toy_trainer(tmp_path, clients_per_round=4).fit(algorithm, ToyData())
    a, b = (algorithm.server.extra[f"optimizer {r}"] for r in range(2))
    assert a.keys() == b.keys()
    assert any(not torch.equal(a[name], b[name]) for name in a)
    assert_same(algorithm.server.extra["buffers 0"], algorithm.server.buffers)
    first, second = algorithm._servers
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_slots_keep_momentum_and_statistics_whoever_sits_in_them(tmp_path: Path) -> None:
    algorithm = toy_rgd()
    toy_trainer(tmp_path, clients_per_round=4).fit(algorithm, ToyData(num_clients=12))
    assert sorted(algorithm.clients.state_dict()) == [0, 1, 2, 3]
    kept = [algorithm.clients.get(slot, "buffers") for slot in range(4)]
    assert kept[0].keys() == set(algorithm.uploaded_buffers())
    name = "network.norms.0.running_mean"
    assert all(not torch.equal(kept[0][name], other[name]) for other in (*kept[1:], algorithm.server.buffers))
    client = next(c for c, slot in algorithm.slot_of.items() if slot == 2)
    assert torch.equal(algorithm.broadcast(client)[name], kept[2][name])
    averaging = toy_rgd(bn_buffers="average", keep_client_optimizer=False)
    toy_trainer(tmp_path, clients_per_round=4).fit(averaging, ToyData(num_clients=12))
    assert len(averaging.clients) == 0
    means = [averaging.server.extra[f"group {g}"][name] for g in range(2)]
    torch.testing.assert_close(averaging.server.buffers[name], (means[0] + means[1]) / 2)


@pytest.mark.parametrize("objective", ["supervised", "self_training"])
def test_bridge_users_receive_averaged_statistics(tmp_path: Path, objective: str) -> None:
    """Without a server, fixed groups and averaged statistics: each user starts from its group's, or from w_avg's."""
    algorithm = toy_rgd(regroup="slots", objective=objective, bn_buffers="average")
    toy_trainer(tmp_path, clients_per_round=4, logger=False).fit(
        algorithm, ToyData(label_location="clients", num_labels=60)
    )
    name = "network.norms.0.running_var"
    assert algorithm._bridges() == {0, 3}
    for client, slot in algorithm.slot_of.items():
        group = algorithm.group_means()[algorithm.start_of_slot[slot]]
        expected = algorithm.server.buffers if slot in (0, 3) else group
        assert torch.equal(algorithm.broadcast(client)[name], expected[name])
    assert float(algorithm.server.buffers[name].mean()) < 0.95  # initially 1


@pytest.mark.parametrize(("buffers", "alike"), [("average", True), ("slot", False)])
def test_replicas_of_the_server_start_from_averaged_statistics_or_their_own(
    tmp_path: Path, buffers: str, alike: bool
) -> None:
    algorithm = toy_rgd(server_replicas="per_group", bn_buffers=buffers)
    toy_trainer(tmp_path, clients_per_round=4, logger=False).fit(algorithm, ToyData())
    first, second = (algorithm.replica_buffers(replica)["network.norms.0.running_var"] for replica in range(2))
    assert torch.equal(first, second) == alike
    assert torch.equal(first, algorithm.server.buffers["network.norms.0.running_var"])
