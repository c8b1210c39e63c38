"""Semi-SFL and FedSwitch-SL: a round by hand, the specification's invariants, bytes, refusals."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedSwitchSL, SemiSFL
from lightning_fedssl.algorithms.common.split_learning import SplitTraining
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.data.partition.index_lists import ClientIndices
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.schedules import Constant
from lightning_fedssl.local_training import split_learning
from lightning_fedssl.local_work import infinite_shuffle
from lightning_fedssl.models import CNN, SVHNCNN, AlexNet
from lightning_fedssl.models.teacher import tensors_of  # type: ignore[attr-defined]
from lightning_fedssl.state import ServerState
from tests.algorithms.helpers import Silent, toy_fedswitch_sl, toy_semi_sfl
from tests.toy import ToyData, assert_same, sgd, toy_round, toy_trainer, weights


class Hearer(Silent):
    """Listens to the joint engine."""

    def __init__(self) -> None:
        self.transfers: list[tuple[int, str, dict[str, int]]] = []

    def transfer(self, client: int, direction: Any, sizes: Any) -> None:
        self.transfers.append((client, direction, dict(sizes)))

    def images_labeled(self, indices: Tensor, pseudo: Any) -> None:
        assert len(indices) == len(pseudo.mask)

    def client_judged(self, client: int, reason: str | None) -> None:
        raise AssertionError(f"client {client} {reason}")


def ready(algorithm: SplitTraining, data: ToyData, double: bool = True) -> Any:
    data.setup()
    algorithm.configure_model()
    algorithm.to(torch.float64 if double else torch.float32)
    algorithm.server = ServerState.from_module(algorithm)
    algorithm.current_round = toy_round()
    algorithm.federation = cast(Any, Hearer())
    return algorithm


def jointly(algorithm: SplitTraining, data: ToyData, cohort: list[int], at_once: int = 1) -> Any:
    """Stage 2 of round 1 alone; the updates of the clients, and the events that were reported."""
    hearer, fabric = Hearer(), Fabric(accelerator="cpu", devices=1)
    trainable = [p for p in algorithm.parameters() if p.requires_grad]
    of_clients, of_server = (algorithm.optimizer(trainable) for _ in range(2))
    phase = split_learning.JointPhase(
        algorithm=algorithm, optimizer=of_clients, fabric=fabric, observer=hearer, server_optimizer=of_server,
        server_data=data.local_data(sampling.SERVER, 1, torch.float64), cohort=cohort,
    )  # fmt: skip
    stacks = sampling.equal_parts([data.local_data(c, 1, torch.float64) for c in cohort], at_once)
    updates = split_learning.train_jointly(phase, stacks)
    return updates, hearer


def contrast(z: Tensor, label: int, keys: list[tuple[Tensor, int, bool]]) -> Tensor:
    """Eq. 5 of one anchor, with loops."""
    dots = [z @ key / 0.2 for key, _, _ in keys]
    log_sum = torch.logsumexp(torch.stack(dots), 0)
    terms = [log_sum - dot for dot, (_, other, sure) in zip(dots, keys, strict=True) if other == label and sure]
    return torch.stack(terms).mean() if terms else z.sum() * 0


class ByHand:
    """A round as Algorithm 1 prints it: clients in turn, one graph from image to loss, lists for queues."""

    def __init__(self, algorithm: SemiSFL, data: ToyData) -> None:
        self.algorithm, self.data = algorithm, data
        self.network: Any = copy.deepcopy(algorithm.network)
        self.head = copy.deepcopy(algorithm.head)
        self.teacher: Any = copy.deepcopy(nn.ModuleDict({"network": self.network, "head": self.head})).eval()
        self.queues: dict[str, list[tuple[Tensor, int, bool]]] = {"supervised": [], "unlabeled": []}

    def keys(self, e: Tensor, labels: Tensor, sure: Tensor) -> list[tuple[Tensor, int, bool]]:
        z = F.normalize(self.teacher["head"](e)).detach()
        return list(zip(z, labels.tolist(), sure.tolist(), strict=True))

    def push(self, queue: str, keys: list[tuple[Tensor, int, bool]]) -> None:
        self.queues[queue] = (self.queues[queue] + keys)[-self.algorithm.queue_size :]

    def stage_1(self) -> None:
        optimizer = sgd([*self.network.parameters(), *self.head.parameters()])
        work = self.algorithm.on_server_start(self.data.local_data(sampling.SERVER, 1, torch.float64))
        for t in range(1, work.num_steps + 1):
            batch = work.batch(t - 1)
            e, y = self.network.bottom(batch["x"]), batch["y"]
            keys = self.keys(self.teacher["network"].bottom(batch["x_key"]), y, torch.ones_like(y, dtype=torch.bool))
            z = F.normalize(self.head(e))
            terms = [contrast(z[i], int(y[i]), keys + self.queues["supervised"]) for i in range(len(y))]
            loss = F.cross_entropy(self.network.top(e), y) + torch.stack(terms).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.push("supervised", keys)
            rate = min(1 - 1 / (t + 1), 0.99)
            for name, module in (("network", self.network), ("head", self.head)):
                for own, other in zip(
                    self.teacher[name].state_dict().values(), module.state_dict().values(), strict=True
                ):
                    own.copy_(rate * own + (1 - rate) * other if own.is_floating_point() else other)

    def stage_2(self, cohort: list[int]) -> None:
        bottoms = [copy.deepcopy(self.network.bottom) for _ in cohort]
        optimizers = [sgd(bottom.parameters()) for bottom in bottoms]
        server = sgd([*self.network.top.parameters(), *self.head.parameters()])
        works = [self.algorithm.on_client_start(self.data.local_data(c, 1, torch.float64)) for c in cohort]
        for step in range(self.algorithm.client_steps):
            batches = [work.batch(step) for work in works]
            e_teacher = [self.teacher["network"].bottom(batch["x_weak"]) for batch in batches]
            sure, labels = torch.cat([self.teacher["network"].top(e).softmax(1) for e in e_teacher]).max(1)
            keys = self.keys(torch.cat(e_teacher), labels, sure >= self.algorithm.threshold)
            references = keys + self.queues["unlabeled"] + self.queues["supervised"]
            total, seen = torch.zeros((), dtype=torch.float64), 0
            for bottom, batch in zip(bottoms, batches, strict=True):  # Algorithm 1 line 9: clients in turn
                e = bottom(batch["x_strong"])
                z, logits = F.normalize(self.head(e)), self.network.top(e)
                for i in range(len(z)):
                    _, label, confident = keys[seen + i]
                    h = F.cross_entropy(logits[i : i + 1], labels[seen + i : seen + i + 1]) * confident
                    total = total + (h + contrast(z[i], label, references)) / len(z)
                seen += len(z)
            server.zero_grad()
            for optimizer in optimizers:
                optimizer.zero_grad()
            total.backward()  # the sum over clients of their batches' means: what each bottom needs
            for p in (*self.network.top.parameters(), *self.head.parameters()):
                p.grad = None if p.grad is None else p.grad / len(cohort)  # Eq. 7
            for optimizer in (server, *optimizers):
                optimizer.step()
            self.push("unlabeled", keys)
            if (step + 1) % self.algorithm.queue_every == 0:
                self.push("supervised", keys)
        states = [bottom.state_dict() for bottom in bottoms]
        mean = {k: sum(s[k] for s in states) / len(states) for k, t in states[0].items() if t.is_floating_point()}
        self.network.bottom.load_state_dict({**self.network.bottom.state_dict(), **mean})


def test_a_round_by_hand(tmp_path: Path) -> None:
    # Split 3: batch norm in the top would see all clients together, and Algorithm 1 processes them in turn.
    algorithm, data = toy_semi_sfl(schedule=Constant(), split=3), ToyData()
    trainer = toy_trainer(tmp_path, max_rounds=1, precision="64-true")
    expected = ByHand(ready(algorithm, data), data)
    expected.algorithm = copy.deepcopy(algorithm)
    trainer.fit(algorithm, data)
    expected.stage_1()
    expected.stage_2([*trainer.cohort])
    names = {"network": expected.network, "head": expected.head}
    for prefix, module in {**names, **{f"teacher.{n}": expected.teacher[n] for n in names}}.items():
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(
                    algorithm.server.model()[f"{prefix}.{name}"], value, rtol=0, atol=1e-10, msg=f"{prefix}.{name}"
                )
    for name in ("supervised", "unlabeled"):
        keys = algorithm.server.buffers[f"{name}_queue.keys"]
        wanted = torch.stack([key for key, _, _ in expected.queues[name]])
        torch.testing.assert_close(keys.sort(0).values, wanted.sort(0).values, rtol=0, atol=1e-10)


def hold(data: ToyData, unlabeled: list[torch.Tensor]) -> None:
    """Give every party other unlabelled images."""
    clients = [ClientIndices(old.labeled, new) for old, new in zip(data.split.clients, unlabeled, strict=True)]
    data.split = replace(data.split, clients=clients)
    data._clients = data.split.client_list


def test_a_client_s_loss_counts_as_often_as_it_has_seen_images() -> None:
    data = ToyData()
    algorithm = ready(toy_semi_sfl(client_steps=4), data)
    step = algorithm.joint_training_step
    losses = torch.tensor([1.0] * 5 + [3.0] * 5, dtype=torch.float64)  # of the images of both clients
    vars(algorithm)["joint_training_step"] = lambda *given: step(*given)._replace(image_losses=losses)
    jointly(algorithm, data, [2, 0])
    assert [tuple(map(float, logged[1:])) for logged in algorithm.logged] == [(1.0, 4 * 5, 2), (3.0, 4 * 5, 0)]


@pytest.mark.parametrize(
    "make",
    [
        toy_semi_sfl,
        toy_fedswitch_sl,
        partial(toy_semi_sfl, client_teacher_decay=0.9),
    ],
)
@pytest.mark.parametrize("at_once", [2, 4])
def test_stacked_bottoms_are_the_sequential_ones(make: Any, at_once: int) -> None:
    data = ToyData()
    one, other = (ready(make(gradient_clip_norm=0.5), data) for _ in range(2))
    alone, told = jointly(one, data, [2, 0, 3])
    together, heard = jointly(other, data, [2, 0, 3], at_once=at_once)
    for a, b in zip(alone, together, strict=True):
        assert a.client == b.client
        assert a.num_steps == b.num_steps
        for name, value in {**a.parameters, **a.buffers}.items():
            torch.testing.assert_close({**b.parameters, **b.buffers}[name], value, rtol=0, atol=1e-10)
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=1e-10)
    assert heard.transfers == told.transfers


def test_the_order_of_the_clients_does_not_matter() -> None:
    data = ToyData()
    one, other = (ready(toy_semi_sfl(client_steps=1, queue_every=9), data) for _ in range(2))
    forth = {u.client: u for u in jointly(one, data, [0, 1, 2])[0]}
    back = {u.client: u for u in jointly(other, data, [2, 0, 1])[0]}
    for client, update in forth.items():
        for name, value in update.parameters.items():
            torch.testing.assert_close(back[client].parameters[name], value, rtol=0, atol=1e-12)


def features_of(algorithm: SplitTraining, data: ToyData) -> dict[str, Tensor]:
    batch = algorithm.on_client_start(data.local_data(0, 1, torch.float64)).batch(0)
    sent = algorithm.client_features(batch, 0)
    return {name: t.detach()[None].requires_grad_(name == "student") for name, t in sent.items()}


def gradients(algorithm: SplitTraining, loss: Tensor) -> set[str]:
    algorithm.zero_grad()
    loss.backward()
    return {name for name, p in algorithm.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def test_images_below_the_threshold_give_no_h_and_still_c() -> None:
    data = ToyData()
    algorithm = ready(toy_semi_sfl(threshold=1.0), data)
    features = features_of(algorithm, data)
    loss, pseudo, _ = algorithm.joint_training_step(features, 0)
    assert pseudo is not None
    assert not pseudo.mask.any()
    assert loss.item() == 0  # an empty queue: no confident reference either
    assert not gradients(algorithm, loss)
    label = pseudo.labels[:1].repeat(1)
    algorithm.supervised_queue.push(
        type(algorithm.supervised_queue.references()).all_valid(
            F.normalize(torch.ones(1, 6, dtype=torch.float64)), label
        )
    )
    loss, *_ = algorithm.joint_training_step(features, 1)
    assert loss.item() > 0
    trained = gradients(algorithm, loss)
    assert trained
    assert all(name.startswith("head.") for name in trained)
    assert features["student"].grad is not None
    assert features["student"].grad.abs().sum() > 0


class Watch(FederatedCallback):
    """Copies the teacher and the supervised queue where the stages meet."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.checked = 0

    def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
        self.before = {n: t.clone() for n, t in algorithm.server.model().items() if n.startswith("teacher.")}

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        after = {n: t for n, t in algorithm.server.model().items() if n.startswith("teacher.")}
        assert_same(after, self.before)
        students = {t.data_ptr() for n, t in algorithm.server.model().items() if not n.startswith("teacher.")}
        assert not students & {t.data_ptr() for t in after.values()}
        assert all(
            torch.equal(t, after[f"teacher.{n}"]) for n, t in algorithm.evaluated_model().items() if "teacher" not in n
        )
        self.checked += 1


@pytest.mark.parametrize("make", [toy_semi_sfl, toy_fedswitch_sl])
def test_stage_2_leaves_the_teacher_alone(tmp_path: Path, make: Any) -> None:
    watch = Watch()
    toy_trainer(tmp_path, callbacks=watch).fit(make(), ToyData())
    assert watch.checked == 3


def test_the_code_s_queue_is_empty_after_every_step() -> None:
    data = ToyData()
    algorithm = ready(toy_semi_sfl(queue_clear="every_step", queue_every=1), data)
    assert isinstance(algorithm, SemiSFL)
    algorithm.joint_training_step(features_of(algorithm, data), 0)
    assert not algorithm.supervised_queue.filled.any()
    assert not algorithm.unlabeled_queue.filled.any()


def test_clients_go_on_where_they_stopped() -> None:
    data = ToyData()
    data.setup()
    local = data.local_data(1, 1)
    whole = infinite_shuffle(local, 0, 120)
    assert [len(set(whole[i : i + 24].tolist())) for i in range(0, 120, 24)] == [24] * 5
    assert not torch.equal(whole[:24], whole[24:48])
    parts = [infinite_shuffle(data.local_data(1, r), at, n) for r, at, n in ((1, 0, 20), (4, 20, 50), (9, 70, 50))]
    assert torch.equal(torch.cat(parts), whole)
    algorithm = ready(toy_semi_sfl(), data)
    jointly(algorithm, data, [1, 2])
    algorithm.clients.commit(1)
    assert algorithm.clients.get(1, "place")["steps"] == 4
    again = algorithm.on_client_start(data.local_data(1, 5, torch.float64)).batch(0)["index"]
    assert torch.equal(again, local.unlabeled[whole[20:25]])


def test_a_client_without_images_sits_out_and_a_small_one_fills_its_batches() -> None:
    data = ToyData()
    data.setup()
    first, second, *others = [client.unlabeled for client in data.split.clients]
    hold(data, [first[:0], second[:2], *others])
    updates, _ = jointly(ready(toy_semi_sfl(), data), data, [0, 1, 2])
    assert [update.client for update in updates] == [1, 2]
    assert updates[0].num_steps == updates[1].num_steps == 4
    by_size = toy_semi_sfl(client_weighting="samples")
    assert [by_size.client_weight(update) for update in updates] == [2, len(others[0])]


@pytest.mark.parametrize(
    ("network", "split", "features", "down", "up"),
    [(SVHNCNN, 2, 1600, 19.9, 39.3), (AlexNet, 5, 4096, 67.2, 108.6)],
)
def test_published_traffic_of_a_client_and_round(
    network: Any, split: int, features: int, down: float, up: float
) -> None:
    """50 steps of 64 images in float32; up: the bottom, and 2 features a step; down: 2 bottoms, a gradient a step."""
    algorithm = SemiSFL(network=network, split=split, num_classes=10, in_shape=(3, 32, 32))
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm)
    algorithm.current_round = toy_round()
    broadcast = algorithm.download_sizes(0, algorithm.broadcast(0))
    bottom = sum(p.nbytes for p in algorithm.network.bottom.parameters())
    assert sum(broadcast.values()) == 2 * bottom
    sent = {name: torch.zeros(64, features) for name in ("student", "teacher")}
    per_step_up, per_step_down = algorithm.step_sizes(0, sent)
    assert per_step_up == {"student features": 64 * features * 4, "teacher features": 64 * features * 4}
    assert per_step_down == {"feature gradients": 64 * features * 4}
    mebi = 2**20
    assert (2 * bottom + 50 * sum(per_step_down.values())) / mebi == pytest.approx(down, abs=0.05)
    assert (bottom + 50 * sum(per_step_up.values())) / mebi == pytest.approx(up, abs=0.05)


def fedswitch_transfers(beta: float, **kwargs: Any) -> list[tuple[int, str, dict[str, int]]]:
    data = ToyData()
    algorithm = ready(toy_fedswitch_sl(beta=beta, **kwargs), data)
    assert isinstance(algorithm, FedSwitchSL)
    hearer = Hearer()
    algorithm.federation = cast(Any, hearer)
    _, told = jointly(algorithm, data, [0, 1])
    transfers: list[tuple[int, str, dict[str, int]]] = hearer.transfers + told.transfers
    return transfers


def test_fedswitch_sends_the_teacher_only_to_clients_that_want_it() -> None:
    never, always = fedswitch_transfers(math.inf), fedswitch_transfers(0.0)
    assert not any("teacher.network" in name for _, _, sizes in never for name in sizes)
    sent = [client for client, way, sizes in always if any("teacher.network" in n for n in sizes) and way == "down"]
    assert sent == [0, 1]
    decisions = [sizes["decision features"] for _, _, sizes in always if "decision features" in sizes]
    assert decisions == [24 * 8 * 2 * 2 * 8] * 2


def test_fedswitch_logs_its_decision() -> None:
    """A mean prediction of one class alone has the divergence log 3 from uniform."""
    data = ToyData()
    algorithm = ready(toy_fedswitch_sl(beta=0.5), data)
    algorithm.federation = Hearer()
    with torch.no_grad():
        algorithm.network.whole.classifier.weight.zero_()
        algorithm.network.whole.classifier.bias.copy_(torch.tensor([200.0, 0, 0]))
    algorithm.on_client_start(data.local_data(0, 1, torch.float64))
    logged = {name: value for name, value, *_ in algorithm.logged}
    assert logged == {"client/prediction_skew": pytest.approx(math.log(3)), "client/teacher_share": 1}


def test_fedswitch_labels_by_its_source() -> None:
    data = ToyData()
    for beta, source in ((0.0, "teacher"), (math.inf, "student")):
        algorithm = ready(toy_fedswitch_sl(beta=beta, client_steps=1), data)
        with torch.no_grad():  # student and teacher that differ
            for p in algorithm.network.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(1)))
        batch = algorithm.on_client_start(data.local_data(0, 1, torch.float64)).batch(0)
        sent = {name: t.detach()[None] for name, t in algorithm.client_features(batch, 0).items()}
        _, pseudo, _ = algorithm.joint_training_step(sent, 0)
        model = algorithm.network if source == "student" else algorithm.teacher["network"]
        with torch.no_grad():
            expected = copy.deepcopy(model).eval()(batch["x_weak"]).softmax(1).max(1)
        assert pseudo is not None
        assert torch.equal(pseudo.labels, expected.indices)
        torch.testing.assert_close(pseudo.confidence, expected.values)


def test_local_teacher_moves_at_its_own_rate() -> None:
    data = ToyData()
    algorithm = ready(toy_semi_sfl(client_teacher_decay=0.99), data)
    with torch.no_grad():
        for p in algorithm.teacher_bottom.parameters():
            p.fill_(1.0)
        for p in algorithm.network.bottom.parameters():
            p.fill_(0.0)
    batch = algorithm.on_client_start(data.local_data(0, 1, torch.float64)).batch(0)
    for step in range(51):
        algorithm.client_features(batch, step)
    values = torch.cat([p.flatten() for p in algorithm.teacher_bottom.parameters()])
    torch.testing.assert_close(values, torch.full_like(values, 0.99**50))


def test_supervised_only_and_pretraining_leave_the_clients_out(tmp_path: Path) -> None:
    alone, later = toy_semi_sfl(client_steps=0), toy_semi_sfl(pretrain_rounds=3)
    for name, algorithm in (("a", alone), ("b", later)):
        trainer = toy_trainer(tmp_path / name)
        trainer.fit(algorithm, ToyData())
        assert "client/loss" not in trainer.callback_metrics
    assert_same(weights(alone), weights(later))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_schedule_sets_the_rate_of_every_joint_step(at_once: int) -> None:
    """With a rate of 0 from the second step on, clients and server are where the first step has brought them."""
    results: list[dict[str, Tensor]] = []
    for factors, steps in (([], 1), ([1.0, 0.0, 0.0, 0.0], 4)):
        plain = partial(torch.optim.SGD, lr=0.05)
        data = ToyData()
        algorithm = ready(toy_semi_sfl(optimizer=plain, client_steps=steps), data)
        algorithm.step_factors = factors
        updates, _ = jointly(algorithm, data, [0, 1, 2], at_once)
        top = {name: p.detach() for name, p in algorithm.named_parameters() if not algorithm.at_clients(name)}
        of_clients = {f"{u.client} {name}": t for u in updates for name, t in u.parameters.items()}
        results.append({name: t.clone() for name, t in {**top, **of_clients}.items()})
    assert_same(*results)


def test_eq_8_averages_the_statistics_of_batch_norm_as_it_does_weights(tmp_path: Path) -> None:
    """After two steps the teacher's bottom is ``g t + (1 - g) s`` in every tensor, s being the student's after one."""
    algorithm = toy_semi_sfl(
        network=partial(CNN, width=4, norm="batch"), client_teacher_decay=0.5, client_steps=2, server_steps=1
    )
    seen: list[tuple[State, State]] = []
    original = algorithm.client_features

    def watch(batch: Any, batch_idx: int) -> Any:
        copies = [{n: t.clone() for n, t in tensors_of(p).items()} for p in (algorithm.network.bottom, teacher())]
        features = original(batch, batch_idx)
        if batch_idx == 1:
            seen.append((copies[0], copies[1]))
            for name, moved in tensors_of(teacher()).items():
                expected = (copies[0][name] + copies[1][name]) / 2 if moved.is_floating_point() else copies[0][name]
                assert torch.allclose(moved, expected, atol=1e-7), name
        return features

    def teacher() -> nn.Module:
        return algorithm.teacher_bottom

    algorithm.client_features = watch  # type: ignore[method-assign]
    toy_trainer(tmp_path, max_rounds=1, clients_at_once=1).fit(algorithm, ToyData())
    assert seen
    assert all("norms_0.running_var" in student for student, _ in seen)
    student, teacher_before = seen[0]
    assert not torch.equal(student["norms_0.running_var"], teacher_before["norms_0.running_var"])
