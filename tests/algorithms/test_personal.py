"""Weights that stay at their client: who has them, who gets them, and what is evaluated."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.callbacks import ClientEvaluation, StaticBatchNorm
from lightning_fedssl.data import ClassSkew
from lightning_fedssl.models import CNN
from lightning_fedssl.updates import CentralDP
from tests.algorithms.helpers import (
    METHODS,
    toy_fedmatch,
    toy_fedswitch,
    toy_proxyfl,
    toy_rgd,
    toy_semi_sfl,
    toy_supervised,
)
from tests.models.helpers import again
from tests.toy import (
    ToyData,
    Transfers,
    assert_same,
    forked,
    labeled_clients,
    toy_fedavg,
    toy_semifl,
    toy_trainer,
    weights,
)
from tests.trainer.helpers import StopAfter, logged

REFUSED = ("fedmatch", "fedswitch", "semi_sfl", "supervised", "fedrgd", "data_", "easgd", "overlap", "proxyfl")
POSSIBLE = [name for name in METHODS if not name.startswith(REFUSED) and name != "fed_shvr_dropout"]
HEAD = {"network.classifier.weight", "network.classifier.bias"}


def own_parts(algorithm: Any) -> dict[str, torch.Tensor]:
    """What each client, and the server, keeps."""
    kept = {f"{c}.{n}": t for c in algorithm.clients.with_state("personal") for n, t in algorithm.own_part(c).items()}
    return {**kept, **algorithm.server.personal}


@pytest.mark.parametrize("method", POSSIBLE)
def test_what_is_personal_differs_between_clients_and_is_not_sent_with_every_method(
    tmp_path: Path, method: str
) -> None:
    make, data = METHODS[method]
    results = []
    for at_once in (1, 3):
        model, transfers = again(make(), personal="classifier"), Transfers()
        options: dict[str, Any] = {"precision": "64-true", "clients_at_once": at_once, "logger": False}
        toy_trainer(tmp_path, callbacks=[transfers, StaticBatchNorm()], max_rounds=2, **options).fit(model, data())
        assert set(model.personal) == model.server.personal.keys() == HEAD
        results.append({**weights(model), **own_parts(model)})
    clients = model.clients.with_state("personal")
    heads = [model.own_part(client)["network.classifier.weight"] for client in clients]
    assert len(clients) > 1
    assert not torch.equal(heads[0], heads[1])
    assert not HEAD & model.server.model().keys()
    sent = [(client, way) for _, client, way, sizes in transfers.seen if HEAD & sizes.keys()]
    assert len(set(sent)) == len(sent), "a client gets the server's part once"
    assert {way for _, way in sent} == ({"down"} if data().label_location == "server" else set())
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name], t, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (partial(toy_fedavg, norm="batch", personal=["norms*"]), labeled_clients),
        (partial(toy_semifl, personal=["classifier", "!classifier.bias"]), ToyData),
    ],
)
def test_a_run_resumes_and_is_that_of_two_ranks_with_the_same_bits(tmp_path: Path, make: Any, data: Any) -> None:
    whole, first, second, ranks = (make() for _ in range(4))
    toy_trainer(tmp_path / "whole").fit(whole, data())
    toy_trainer(tmp_path / "parts", callbacks=StopAfter(1)).fit(first, data())
    toy_trainer(tmp_path / "parts").fit(second, data(), ckpt_path="last")
    two = toy_trainer(tmp_path / "ranks", callbacks=ClientEvaluation(), **forked(2))
    two.fit(ranks, data())
    assert_same({**weights(second), **own_parts(second)}, {**weights(whole), **own_parts(whole)})
    assert_same({**weights(ranks), **ranks.server.personal}, {**weights(whole), **whole.server.personal})
    one = toy_trainer(tmp_path / "one", callbacks=ClientEvaluation())
    one.fit(make(), data())
    name = "client_test/personal_accuracy_worst_tenth"
    assert two.callback_metrics[name] == one.callback_metrics[name]


def test_an_evaluation_of_a_checkpoint_has_the_clients_own_weights_or_says_that_it_lacks_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, own = partial(toy_fedavg, personal="classifier"), "client_test/personal_accuracy_mean"
    trainer = toy_trainer(tmp_path, callbacks=ClientEvaluation())
    trainer.fit(make(), labeled_clients())
    for name, is_whole in (("last", True), ("best", False)):
        tested = toy_trainer(tmp_path, callbacks=ClientEvaluation())
        (metrics,) = tested.test(make(), labeled_clients(), ckpt_path=name)
        assert metrics.get(own) == (trainer.callback_metrics[own] if is_whole else None)
        assert ("lacks the states (clients' own weights" in caplog.text) != is_whole


def test_one_client_trains_as_in_federated_averaging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shared and own part together are the weights of FedAvg, which sends both."""
    plain = toy_fedavg(client_weighting="uniform")
    own = again(plain, personal=["convs.0", "classifier"])
    for model in (plain, own):
        toy_trainer(tmp_path, clients_per_round=1, logger=False).fit(model, labeled_clients(num_clients=1))
    assert_same({**weights(own), **own.own_part(0)}, weights(plain))
    assert "clients' own models: mean " in capsys.readouterr().out


def test_clients_of_one_class_each_are_right_with_a_head_of_their_own(tmp_path: Path) -> None:
    """A client's own accuracy is that of the shared layers with its own head; the worst tenth is one of three."""
    data, callback = labeled_clients(num_clients=3, partition=ClassSkew(r=1.0)), ClientEvaluation()
    model = toy_fedavg(personal="classifier", client_epochs=5)
    trainer = toy_trainer(tmp_path, max_rounds=3, clients_per_round=3, callbacks=callback)
    trainer.fit(model, data)
    assert trainer.callback_metrics["client_test/personal_accuracy_mean"] == 1
    assert trainer.callback_metrics["client_test/personal_accuracy_worst_tenth"] == 1
    assert trainer.callback_metrics["client_test/accuracy_mean"] == pytest.approx(1 / 3, abs=0.1)
    assert [row[:1] for row in callback.history[3].reshape(-1, 1).tolist()] == [[1.0]] * 3


def test_central_privacy_clips_and_noises_what_is_shared_alone(tmp_path: Path) -> None:
    """A head that stays at its client costs nothing: all is as if it were frozen, if its rate is 0."""

    def rates(tensors: Any) -> torch.optim.Optimizer:
        groups = [{"params": [w], "lr": 0.0 if w.shape[0] == 3 else 0.1} for w in tensors]
        return torch.optim.SGD(groups, lr=0.1)

    runs = []
    for option in ("personal", "freeze"):
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")
        model = toy_fedavg(client_weighting="uniform", optimizer=rates, **{option: "classifier"})
        trainer = toy_trainer(tmp_path / option, updates=[CentralDP(delta=1e-3, noise_multiplier=1.0, clip=0.05)])
        trainer.fit(model, labeled_clients())
        last = logged(trainer)[trainer.round_index]
        figures = {name: last[name] for name in last if name.startswith(("privacy/", "communication/"))}
        runs.append(({name: t for name, t in weights(model).items() if name not in HEAD}, figures))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert len(figures) > 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(again, toy_semi_sfl()), r"model\.personal .*classifier.*: SemiSFL trains one network with its"),
        (partial(again, toy_fedmatch()), r"FedMatch sends clients the whole models of others: leave it out"),
        (partial(again, toy_fedswitch()), r"FedSwitch sends a teacher, which has all weights"),
        (partial(again, toy_supervised()), r"Supervised trains at the server alone"),
        (partial(again, toy_proxyfl()), r"ProxyFL tunes proxies by the clients' classifiers"),
        (partial(again, toy_rgd()), r"FedRGD keeps the momentum of its clients at the server"),
    ],
)
def test_a_method_that_cannot_have_it_says_why(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(personal="classifier")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"personal": "*"}, r"\* leaves no weight to share"),
        ({"personal": ["!classifier"]}, r"!classifier keeps nothing"),
        ({"personal": "classifier", "freeze": "classifier"}, r"classifier keeps nothing"),
    ],
)
def test_patterns_that_leave_nothing_are_refused(patterns: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.personal: {message}"):
        toy_fedavg(**patterns).configure_model()


def test_personal_statistics_of_all_are_refused(tmp_path: Path) -> None:
    model = toy_fedavg(personal="norms*", network=partial(CNN, width=4, norm="static_batch"))
    with pytest.raises(ValueError, match=r"network\.norms\.0\.running_mean is measured on all clients' images"):
        toy_trainer(tmp_path).fit(model, labeled_clients())
