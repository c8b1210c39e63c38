"""FedMatch: its rules by hand, its invariants, its traffic."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl import sampling
from lightning_fedssl.algorithms import FedMatch, fedmatch
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.models import CNN, ResNet9
from lightning_fedssl.state import ClientUpdate, ServerState
from tests.algorithms.helpers import fitted, mixed_clients, plain_sgd, ready, toy_fedmatch, toy_fixmatch
from tests.toy import ToyData, assert_same, toy_fedavg, toy_round, toy_trainer, weights

# The rules, by hand.


class One(nn.Module):
    """Two logits from a single weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).mean(1, keepdim=True)
        return torch.cat([self.w * mean, 0 * mean], dim=1)


def one_weight(**kwargs: Any) -> FedMatch:
    algorithm = FedMatch(network=One, num_classes=2, in_shape=(1, 1, 1), **kwargs)
    algorithm.network = fedmatch.Decomposed(One(), variance_scaling=False)
    algorithm.server = ServerState.from_module(algorithm)
    algorithm.current_round = toy_round()
    return algorithm


def test_step_of_psi_without_a_kept_image_by_hand() -> None:
    """With sigma 1 and psi 0.2 the gradient is 1e-4 - 2 * 10 * (1 - 0.2) = -15.9999; the learning rate is 1e-3."""
    algorithm = one_weight(threshold=1.0)
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=1e-3)
    sigma, psi = (algorithm.get_parameter(f"network.{name}.w") for name in ("sigma", "psi"))
    assert psi.item() == 0.2
    u = torch.ones(4, 1, 1, 1, dtype=torch.float64)
    loss = algorithm.training_step({"u": u, "u_strong": u}, 0)
    assert loss is not None
    loss.backward()
    optimizer.step()
    assert psi.item() == pytest.approx(0.2159999, abs=1e-14)
    assert sigma.item() == 1.0
    assert sigma.grad is None


def test_step_of_sigma_leaves_psi_alone() -> None:
    algorithm, data = ready(toy_fedmatch(), mixed_clients())
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(0)
    loss = algorithm.training_step(batch, 0)
    assert loss is not None
    torch.testing.assert_close(loss, 10 * F.cross_entropy(algorithm(batch["x"]), batch["y"]))
    loss.backward()
    assert all((p.grad is None) == ("psi" in name) for name, p in algorithm.named_parameters())


def test_unsupervised_loss_is_the_sum_of_its_terms() -> None:
    algorithm, data = ready(
        toy_fedmatch(consistency_weight=0.5, agreement_weight=0.25, l1_weight=0.03), mixed_clients()
    )
    algorithm.helper_models = {0: [{n: 1.5 * p.detach() for n, p in algorithm.named_parameters() if "psi" in n}]}
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(1)
    p = algorithm(batch["u"]).softmax(dim=1)
    algorithm.threshold = float(p.detach().max(dim=1).values.sort().values[1:3].mean())
    kept = p.max(dim=1).values >= algorithm.threshold
    assert 0 < int(kept.sum()) < len(kept)
    sigma, psi = algorithm.network.parts()
    helper = algorithm.network.logits(batch["u"], sigma, {n: 1.5 * q for n, q in psi.items()}).softmax(dim=1)
    torch.testing.assert_close(batch["helpers"][:, 0], helper)
    kl = (helper * (helper / p).log()).sum(dim=1)[kept].mean()
    votes = F.one_hot(p.argmax(dim=1), 3) + F.one_hot(helper.argmax(dim=1), 3)
    strong = F.cross_entropy(algorithm(batch["u_strong"])[kept], votes.argmax(dim=1)[kept])
    l1 = sum(own.abs().sum() for own in psi.values())
    l2 = sum(((sigma[name] - own) ** 2).sum() for name, own in psi.items())
    loss = algorithm.training_step(batch, 1)
    torch.testing.assert_close(loss, 0.5 * kl + 0.25 * strong + 0.03 * l1 + 0.1 * l2)
    assert loss is not None
    loss.backward()
    assert all((p.grad is None) == ("sigma" in name) for name, p in algorithm.named_parameters())


def test_an_unsure_image_changes_no_mean() -> None:
    algorithm, data = ready(toy_fedmatch(), mixed_clients())
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(1)
    p = algorithm(batch["u"]).softmax(dim=1).max(dim=1).values.detach()
    algorithm.threshold = float(p.sort().values[-2])
    least = int(p.argmin())
    more = {name: torch.cat([t, t[least : least + 1]]) for name, t in batch.items()}
    torch.testing.assert_close(algorithm.training_step(batch, 1), algorithm.training_step(more, 1))


def test_divergence_from_helpers_by_hand() -> None:
    """KL((1/2, 1/2), (1/4, 3/4)) = log(2) / 2 + log(2/3) / 2 = 0.1438; the second image is masked."""
    local = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log().requires_grad_()
    helpers = torch.full((2, 2, 2), 0.5).requires_grad_()
    value = fedmatch.helper_divergence(local, helpers, torch.tensor([True, False]))
    assert value.item() == pytest.approx(0.1438, abs=5e-5)
    assert 0.01 * value.item() == pytest.approx(0.001438, abs=5e-7)
    assert fedmatch.helper_divergence(local, helpers, torch.tensor([False, False])).item() == 0
    certain = torch.tensor([[[1.0, 0.0]]])
    assert fedmatch.helper_divergence(local[:1], certain, torch.tensor([True])).item() == pytest.approx(math.log(4))


def test_decomposition() -> None:
    """Truncation at two deviations scales the deviation by 0.8796, so values are at most 2 / 0.8796 times it."""
    torch.manual_seed(0)
    network = fedmatch.Decomposed(ResNet9(norm="none", bias=False))
    sigmas, psis = network.parts()
    pairs = [(sigmas[name], psi) for name, psi in psis.items()]
    assert len(pairs) == 9
    assert sum(sigma.numel() for sigma, _ in pairs) == 6_568_640
    assert all(torch.equal(psi, 0.2 * sigma) and psi.data_ptr() != sigma.data_ptr() for sigma, psi in pairs)
    for sigma, _ in pairs:
        fan_in = sigma[0].numel()
        assert float(sigma.detach().std()) == pytest.approx(fan_in**-0.5, rel=0.03)
        assert float(sigma.abs().max()) < 2.01 * fan_in**-0.5 / 0.8796
    plain = CNN(width=4, norm="batch", num_classes=3, in_shape=(1, 8, 8)).eval()
    kept = fedmatch.Decomposed(deepcopy(plain), 1.0, variance_scaling=False)
    assert not any("norm" in name for name, _ in kept.psi.named_parameters())
    with torch.no_grad():
        sigmas, psis = kept.parts()
        for name, psi in psis.items():
            psi.copy_(sigmas[name].mul_(0.75) / 3)
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(kept.eval()(x), plain(x))


# Thresholds and what is sent.


def test_thresholds_are_strict() -> None:
    """Changes 0.25, 0.26, 0.3, 0.125, 0.125: two exceed 0.25. With a threshold the last new values count as 0."""
    values = torch.tensor([0.5, -0.5, 0.50001, -0.6, 0.0])
    assert fedmatch.hard_threshold(values, 0.5).tolist() == pytest.approx([0, 0, 0.50001, -0.6, 0])
    assert torch.equal(fedmatch.hard_threshold(values, 0.0), values)
    old = torch.tensor([1.0, 1.0, 1.0, 0.25, 0.0])
    new = torch.tensor([1.25, 1.26, 0.7, 0.125, 0.125])
    assert fedmatch.keep_changes(new, old, 0.25).tolist() == pytest.approx([1.0, 1.26, 0.7, 0.25, 0.0])
    assert fedmatch.keep_changes(new, old, 0.2, threshold=0.125)[3:].tolist() == [0.125, 0.0]
    assert torch.equal(fedmatch.keep_changes(new, old, 0.0), new)


def test_sizes_of_sparse_tensors() -> None:
    dense = torch.zeros(10, 100)
    assert fedmatch.sparse_sizes("w", 1000, dense) == {"w": 4000}
    assert fedmatch.sparse_sizes("w", 500, dense) == {"w": 2000, "w.positions": 125}
    assert fedmatch.sparse_sizes("w", 3, dense) == {"w": 12, "w.positions": 12}


@pytest.mark.parametrize("location", ["clients", "server"])
def test_small_changes_are_not_sent_and_only_trained_parts_are(location: Any) -> None:
    """Entries move by 0.009 or 0.011 with a threshold of 0.01; a sent entry has 4 bytes."""
    data = mixed_clients() if location == "clients" else ToyData()
    algorithm, _ = ready(toy_fedmatch(lr_patience=None, delta_threshold=0.01), data)
    moved = {n: p + torch.where(torch.rand_like(p) < 0.5, 0.009, 0.011) for n, p in algorithm.server.parameters.items()}
    update = algorithm.on_client_end(ClientUpdate(0, moved, {}, 9, 2))
    assert any("sigma" in name for name in update.parameters) == (location == "clients")
    entries = 0
    for name, p in update.parameters.items():
        before = algorithm.server.parameters[name]
        stayed = p == before
        assert torch.equal(p[~stayed], moved[name][~stayed])
        assert ((moved[name] - before).abs()[stayed] < 0.0101).all()
        assert ((moved[name] - before).abs()[~stayed] > 0.0099).all()
        entries += int((~stayed).sum())
    sizes = algorithm.upload_sizes(update)
    assert sum(size for name, size in sizes.items() if not name.endswith("positions")) == 4 * entries


def test_only_entries_that_moved_by_more_than_the_threshold_are_announced_again() -> None:
    algorithm = one_weight(delta_threshold=0.25)
    for number, values in enumerate(([0.0, 0.0, 0.0], [0.0, 0.25, 0.5], [0.25, 0.5, 0.5]), start=1):
        algorithm.current_round = toy_round(index=number)
        algorithm.announce({"w": torch.tensor(values)})
    announced, since = (state["w"].tolist() for state in algorithm.server.extra.values())
    assert (announced, since) == ([0.0, 0.5, 0.5], [0, 3, 2])


class Ledger(FederatedCallback):
    """The paper's cost, by round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self.bytes: list[dict[str, int]] = []

    def on_transfer(self, trainer: Any, algorithm: Any, client: int, direction: Any, sizes: Any) -> None:
        self.bytes.append({"round": trainer.round_index, "down": direction == "down", "sum": sum(sizes.values())})

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.rounds.append(dict(metrics))


@pytest.mark.parametrize("location", ["clients", "server"])
def test_costs_begin_with_two_dense_sets_and_fall_where_little_moves(tmp_path: Path, location: Any) -> None:
    data = mixed_clients() if location == "clients" else ToyData()
    ledger = Ledger()
    algorithm = toy_fedmatch(delta_threshold=0.003, helpers=0)
    trainer = toy_trainer(tmp_path, callbacks=ledger, clients_per_round=4, channels_last=location == "server")
    trainer.fit(algorithm, data)
    down = [r["communication/download_share"] for r in ledger.rounds]
    up = [r["communication/upload_share"] for r in ledger.rounds]
    assert down[0] == 2
    assert all(0 < share < 2 for share in down[1:])
    assert all(0 < share < (2 if location == "clients" else 1) for share in up)
    dense = 4 * sum(psi.numel() for psi in algorithm.network.psi.values())
    assert 0.9 < ledger.rounds[-1]["server/psi_share"] <= 1
    validation = 0 if algorithm.lr_patience is None else 12 * (8 * 8 + 8)  # 12 images of 8 x 8 pixels and their labels
    received = {t: [e["sum"] for e in ledger.bytes if e["round"] == t and e["down"]] for t in (1, 2)}
    assert received[1] == [2 * dense + validation] * 4
    assert max(received[2]) < 2 * dense


def test_without_thresholds_averaging_is_dense(tmp_path: Path) -> None:
    """One client, one round: the global model has the client's weights after training."""
    algorithm = toy_fedmatch(delta_threshold=0.0, l1_threshold=0.0, lr_patience=None)
    data = mixed_clients(num_clients=1)
    fitted(tmp_path, algorithm, data, max_rounds=1)
    alone, _ = ready(toy_fedmatch(lr_patience=None), data)
    alone.double()
    optimizer = plain_sgd(alone.parameters())
    for step, batch in enumerate(alone.on_client_start(data.local_data(0, 1, torch.float64))):
        optimizer.zero_grad()
        loss = alone.training_step(batch, step)
        assert loss is not None
        loss.backward()
        optimizer.step()
    for name, p in alone.named_parameters():
        torch.testing.assert_close(weights(algorithm)[name], p.detach(), rtol=0, atol=1e-12)
    assert_same(algorithm.evaluated_model(), weights(algorithm))


def test_psi_is_thresholded_where_it_is_evaluated_and_at_the_server() -> None:
    algorithm, data = ready(toy_fedmatch(l1_threshold=0.05), ToyData())
    evaluated = algorithm.evaluated_model()
    for name, p in algorithm.server.parameters.items():
        expected = torch.where(p.abs() > 0.05, p, 0) if "psi" in name else p
        assert torch.equal(evaluated[name], expected)
    batch = algorithm.on_server_start(data.local_data(sampling.SERVER, 1)).batch(0)
    loss = algorithm.server_training_step(batch, 0)
    assert loss is not None
    loss.backward()
    assert all((p.grad is None) == ("psi" in name) for name, p in algorithm.named_parameters())
    with torch.no_grad():
        for name, p in algorithm.named_parameters():
            p.copy_(evaluated[name])
    torch.testing.assert_close(loss, 10 * F.cross_entropy(algorithm(batch["x"]), batch["y"]))


# Helpers.


class Deliveries(FederatedCallback):
    def __init__(self) -> None:
        self.seen: dict[int, dict[int, int]] = {}
        self.known: dict[int, list[int]] = {}

    def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
        self.seen[trainer.round_index] = {k: len(h) for k, h in algorithm.helper_models.items()}
        self.known[trainer.round_index] = algorithm.clients.with_state("embedding")


def test_helpers_come_every_tenth_round_to_clients_seen_before(tmp_path: Path) -> None:
    watch, algorithm = Deliveries(), toy_fedmatch(helper_interval=3)
    toy_trainer(tmp_path, callbacks=watch, max_rounds=7, clients_per_round=2).fit(algorithm, mixed_clients())
    for round_, helped in watch.seen.items():
        if round_ % 3:
            assert helped == {}
        else:
            drawn = sampling.cohort(0, round_, 4, 2)
            assert helped == {k: 2 for k in drawn if k in watch.known[round_]}
    assert FedMatch(network=One).helper_interval == 10


def test_helpers_are_the_nearest_others() -> None:
    """The distance of two embeddings (p, 1 - p) is sqrt(2) times that of the two p: 0.1, 0.9, 0.15, 0.3, 0.15."""
    algorithm = toy_fedmatch()
    for client, p in {0: 0.1, 1: 0.9, 2: 0.15, 3: 0.3, 4: 0.15}.items():
        algorithm.clients.put(client, "embedding", {"p": torch.tensor([p, 1 - p])})
        algorithm.clients.put(client, "psi", {"number": torch.tensor(client)})
    chosen = algorithm.choose_helpers([0, 1, 2, 9])
    numbers = {client: [int(psi["number"]) for psi in helpers] for client, helpers in chosen.items()}
    assert numbers == {0: [2, 4], 1: [3, 2], 2: [4, 0]}


def test_equal_models_have_equal_embeddings_and_the_noise_image_is_a_function_of_the_seed() -> None:
    (a, _), (b, _) = ready(toy_fedmatch(), mixed_clients()), ready(toy_fedmatch(), mixed_clients())
    torch.manual_seed(5)
    assert torch.equal(a.probe(), b.probe())
    assert a.probe().shape == (1, 1, 8, 8)
    assert 0 <= float(a.probe().min()) < 0.2 < 0.8 < float(a.probe().max()) <= 1
    assert torch.equal(a.embed({}), b.embed({}))
    assert a.embed({}).sum().item() == pytest.approx(1)
    more = {n: 2 * p for n, p in a.server.parameters.items() if "psi" in n}
    assert not torch.allclose(a.embed(more), a.embed({}))


def test_an_embedding_is_of_the_uploaded_norm_layers_and_not_of_those_trained_last() -> None:
    algorithm, _ = ready(toy_fedmatch(network=partial(CNN, width=4, norm="batch")), mixed_clients())
    uploaded = {name: t + 0.1 for name, t in algorithm.server.model().items() if t.is_floating_point()}
    before = algorithm.embed(uploaded)
    for t in (*algorithm.parameters(), *algorithm.buffers()):
        t.data = t.data * 3
    assert torch.equal(algorithm.embed(uploaded), before)
    assert not torch.equal(algorithm.embed({n: t for n, t in uploaded.items() if "running" not in n}), before)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="convolutions have one layout without oneDNN")
def test_an_embedding_does_not_depend_on_the_memory_layout_of_the_update() -> None:
    """The updates of another rank have lost the layout channels-last, in which convolutions have other bits."""
    algorithm, _ = ready(toy_fedmatch(network=partial(CNN, width=16)), mixed_clients())
    model = algorithm.server.model()
    apart = {n: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for n, t in model.items()}
    assert apart["network.sigma.convs.1.weight"].stride() != model["network.sigma.convs.1.weight"].stride()
    assert torch.equal(algorithm.embed(apart), algorithm.embed(model))


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_norm_layers_belong_to_sigma_so_unlabelled_images_do_not_train_them(tmp_path: Path, norm: Any) -> None:
    """Labels at the clients, with weight 0: only the steps on unlabelled images have a gradient."""
    algorithm = toy_fedmatch(
        network=partial(CNN, width=4, norm=norm), labeled_weight=0.0, lr_patience=None, delta_threshold=0.0,
        l1_weight=0.0,
    )  # fmt: skip
    start: dict[str, Tensor] = {}

    class Start(FederatedCallback):
        def on_train_start(self, trainer: Any, algorithm: Any) -> None:
            start.update({name: p.clone() for name, p in algorithm.server.parameters.items()})

    toy_trainer(tmp_path, logger=False, callbacks=[Start()]).fit(algorithm, mixed_clients())
    moved = {name for name, p in algorithm.server.parameters.items() if not torch.allclose(p, start[name], atol=1e-7)}
    assert any("sigma.norms" in name for name in start)
    assert moved
    assert not [name for name in moved if "sigma" in name]


# The learning rate.


def test_rate_falls_by_three_when_the_validation_loss_does_not() -> None:
    """With patience 2: losses 0.9 and 0.95 are no progress on 0.9, and 0.8 and 0.8 are none on 0.8."""
    state: dict[str, Tensor] = {}
    factors = []
    for loss in (1.0, 0.9, 0.9, 0.95, 0.8, 0.8, 0.8):
        state = fedmatch.update_rate(state, loss, patience=2)
        factors.append(float(state["factor"]))
    assert factors == pytest.approx([1, 1, 1, 1 / 3, 1 / 3, 1 / 3, 1 / 9])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_factor_of_a_rate_has_the_precision_of_the_batch(dtype: torch.dtype) -> None:
    made = fedmatch.add_rate({"x": torch.zeros(2, 1, dtype=dtype)}, {"factor": torch.tensor(1 / 3, dtype=torch.double)})
    assert torch.equal(made["rate"], torch.full((2,), 1 / 3, dtype=dtype))


def test_rate_is_a_factor_of_the_step() -> None:
    algorithm, data = ready(toy_fedmatch(), mixed_clients())
    rate = {"factor": torch.tensor(1 / 3), "lowest": torch.tensor(1.0), "waited": torch.tensor(0.0)}
    plain = algorithm.on_client_start(data.local_data(0, 1))
    algorithm.clients.put(0, "rate", rate)
    slow = algorithm.on_client_start(data.local_data(0, 1))
    for step in (0, 1):
        a, b = (algorithm.training_step(work.batch(step), step) for work in (plain, slow))
        assert a is not None
        torch.testing.assert_close(b, a / 3)


@pytest.mark.parametrize("location", ["clients", "server"])
def test_rates_are_kept_by_each_party(tmp_path: Path, location: Any) -> None:
    algorithm = toy_fedmatch(lr_patience=1, optimizer=partial(torch.optim.SGD, lr=1e-9))
    data = mixed_clients() if location == "clients" else ToyData()
    toy_trainer(tmp_path, max_rounds=3, clients_per_round=4).fit(algorithm, data)
    assert algorithm.clients.with_state("rate") == [0, 1, 2, 3]
    assert ("rate" in algorithm.server.extra) == (location == "server")


class Watched(CNN):
    """Notes in which mode it makes predictions for 12 images, as many as there are for validation."""

    modes: list[bool] = []  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 12:
            self.modes.append(self.training)
        return super().forward(x)


def test_rates_follow_the_loss_of_a_model_in_evaluation_mode(tmp_path: Path) -> None:
    algorithm = toy_fedmatch(lr_patience=1, network=partial(Watched, width=4), helpers=0)
    toy_trainer(tmp_path, max_rounds=1, check_val_every_n_rounds=2).fit(algorithm, mixed_clients())
    assert Watched.modes
    assert not any(Watched.modes)


# Whole runs.


def test_labels_at_the_server_train_sigma_there_alone(tmp_path: Path) -> None:
    class Sigma(FederatedCallback):
        states: list[dict[str, Tensor]] = []  # noqa: RUF012

        def on_client_phase_start(self, trainer: Any, algorithm: Any) -> None:
            self.states.append({n: p.clone() for n, p in algorithm.server.parameters.items()})

        def on_global_model(self, trainer: Any, algorithm: Any) -> None:
            before, after = self.states[-1], algorithm.server.parameters
            assert all(torch.equal(p, before[n]) == ("sigma" in n) for n, p in after.items())

    algorithm, watch = toy_fedmatch(), Sigma()
    toy_trainer(tmp_path, callbacks=watch).fit(algorithm, ToyData())
    assert len(watch.states) == 3
    first, second = watch.states[0], watch.states[1]
    assert not torch.equal(first["network.sigma.classifier.bias"], second["network.sigma.classifier.bias"])


def test_clients_count_alike_whatever_their_sizes() -> None:
    algorithm, _ = ready(toy_fedmatch(helpers=0), mixed_clients())
    p = algorithm.server.parameters
    updates = [ClientUpdate(k, {n: t + k for n, t in p.items()}, {}, 10**k, 1) for k in (0, 1)]
    expected = {n: t + 0.5 for n, t in p.items()}
    algorithm.aggregate(algorithm.accumulate(updates))
    for name, t in algorithm.server.parameters.items():
        torch.testing.assert_close(t, expected[name])


def test_without_psi_it_is_fedavg_on_the_labels(tmp_path: Path) -> None:
    class Sigma(FedMatch):
        """psi stays at 0."""

        def _unsupervised_loss(self, batch: Any) -> Tensor:
            return 0 * fedmatch.decomposition_penalty(*self.network.parts(), 1.0, 1.0)

    none: dict[str, Any] = {"psi_scale": 0.0, "delta_threshold": 0.0, "lr_patience": None, "variance_scaling": False}
    options = dict(toy_fedmatch(labeled_weight=1.0, **none).hparams)
    data = mixed_clients(partition=None, weak="none", client_batch_size=1)  # whole batches at every client
    ours = fitted(tmp_path, Sigma(**options), data)
    plain = toy_fedavg(optimizer=plain_sgd, client_weighting="uniform", network=partial(CNN, width=4, norm="none"))
    for name, value in fitted(tmp_path, plain, mixed_clients(weak="none", client_batch_size=1)).items():
        torch.testing.assert_close(ours[name.replace("network.", "network.sigma.")], value, rtol=0, atol=1e-10)
    assert all(not t.any() for name, t in ours.items() if "psi" in name)


def test_without_helpers_and_penalties_psi_trains_as_fixmatch_does() -> None:
    algorithm, data = ready(
        toy_fedmatch(l1_weight=0.0, l2_weight=0.0, agreement_weight=1.0, threshold=0.0), mixed_clients()
    )
    batch = algorithm.on_client_start(data.local_data(0, 1)).batch(1)
    fixmatch = toy_fixmatch(threshold=0.0)
    fixmatch.network = algorithm.network
    theirs = fixmatch.training_step({"x_weak": batch["u"], "x_strong": batch["u_strong"]}, 0)
    torch.testing.assert_close(algorithm.training_step(batch, 1), theirs)


def test_steps_alternate_and_unlabelled_images_are_cut_into_as_many_batches() -> None:
    algorithm, data = ready(toy_fedmatch(), mixed_clients(num_labels=60))
    local = data.local_data(0, 1)
    kinds = ["x" if "x" in batch else "u" for batch in algorithm.on_client_start(local)]
    steps = round(len(local.labeled) / 5)
    assert kinds[: 2 * steps - 2] == ["x", "u"] * (steps - 1)
    assert kinds.count("x") == steps
    seen = sum(len(batch.get("u", ())) for batch in algorithm.on_client_start(local))
    assert seen == len(local.unlabeled)
    unlabeled, other = ready(toy_fedmatch(), ToyData())
    batches = list(unlabeled.on_client_start(other.local_data(0, 1)))
    assert [len(batch["u"]) for batch in batches][:-1] == [5] * (len(batches) - 1)


@pytest.mark.parametrize(
    ("images", "batch_size", "steps", "taken"),
    [
        (440, 100, 4, 400),
        (550, 100, 6, 550),
        (62, 10, 6, 60),
        (3, 10, 1, 3),
        (50, 10, 5, 50),
        (25, 10, 2, 20),
        (12, 10, 1, 10),
    ],
)
def test_an_epoch_has_as_many_steps_as_in_the_authors_code(
    images: int, batch_size: int, steps: int, taken: int
) -> None:
    """``num_steps = round(len(x_unlabeled) / bsize_u)``, and a step takes the next slice of the images."""
    algorithm, data = ready(toy_fedmatch(), mixed_clients())
    own = data.local_data(0, 1)
    places = torch.arange(images) % len(own.labeled)
    rows = own.labeled[places]
    local = replace(own, unlabeled=rows, labeled=rows[:0], batch_size=batch_size)
    work = algorithm.on_client_start(local)
    sizes = [len(batch["u"]) for batch in work]
    assert (len(sizes), sum(sizes)) == (steps, taken)
    assert work.num_samples == images
    labeled = replace(local, labeled=rows, labels=own.labels[places], unlabeled=own.unlabeled)
    assert sum("y" in batch for batch in algorithm.on_client_start(labeled)) == steps
