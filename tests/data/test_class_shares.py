from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fedssl import sampling
from lightning_fedssl.data import Dirichlet
from lightning_fedssl.data.class_shares import FLOOR, ROUGH, SiteShares, counted_sureness, read_row
from lightning_fedssl.updates import CentralDP
from tests.algorithms.helpers import METHODS, STATED, toy_fixmatch, toy_self_training
from tests.toy import ToyData, toy_fedavg, toy_trainer

NAMES = ["yes", "no"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"yes": 0.2, "no": 0.8}, ((0.2, 0.8), 1.0)),
        ({"yes": "20 %"}, ((0.2, 0.8), 1.0)),
        ({"no": "1/4"}, ((0.75, 0.25), 1.0)),
        ({"yes": "two thirds", "no": "a third"}, ((2 / 3, 1 / 3), 1.0)),
        ({"yes": "about a fifth"}, ((0.2, 0.8), ROUGH)),
        ({"yes": "~20%", "no": 0.7}, ((2 / 9, 7 / 9), ROUGH)),
        ({"yes": 12, "no": 38}, ((12.5 / 51, 38.5 / 51), counted_sureness(50, 2))),
        ({"yes": 1, "no": 0}, ((1 / (1 + FLOOR / 2), FLOOR / 2 / (1 + FLOOR / 2)), 1.0)),
    ],
)
def test_a_site_states_shares_texts_or_counts(row: dict[str, Any], expected: tuple[Any, float]) -> None:
    shares, sureness = read_row(row, NAMES)
    assert shares == pytest.approx(expected[0])
    assert sureness == pytest.approx(expected[1])
    assert counted_sureness(20, 2) < counted_sureness(50, 2) < 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"d": 0.5, "a": 0.5}, "d is not a class; there are a, b, c"),
        ({"a": 0.5, "b": 0.1, "c": 0.1}, "together"),
        ({"a": 0.5, "b": 0.5, "c": "much"}, "'much'; give a share"),
        ({"a": 0.5, "b": 0.5, "c": -0.1}, "give a share"),
        ({"9": {"a": 1}}, "together"),
        ({"9": {"a": 1, "b": 0, "c": 0}}, "9 is not a site; there are 0, 1, 2, 3"),
        ({"of": "sites", "round": 0.2}, "class_shares.round: there are"),
        ({"of": "sites", "rounded": 0}, "rounded is 0"),
        ({"of": "sites", "counted": 2.5}, "counted is 2.5"),
        ({"of": "sites", "rounded": 0.2, "counted": 20}, "leave it out"),
        ({"of": {"a": 1, "b": 0, "c": 0}, "counted": 20}, "leave it out"),
        ([0.2, 0.8], "give a mapping"),
        ("nowhere.csv", "does not exist"),
    ],
)
def test_what_is_no_statement_is_refused(given: Any, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="class_shares") as error:
        ToyData(class_shares=given).setup()
    assert message in str(error.value)


def test_a_file_has_a_row_for_each_site(tmp_path: Path) -> None:
    (tmp_path / "shares.csv").write_text("site,a,b,c,town\n2,0.5,0.25,0.25,x\n0,about half,,,y\n")
    data = ToyData(class_shares=str(tmp_path / "shares.csv"))
    data.setup()
    assert data.shares == {2: SiteShares((0.5, 0.25, 0.25)), 0: SiteShares((0.5, 0.25, 0.25), ROUGH)}
    assert data.local_data(0, 1).shares == data.shares[0]
    assert data.local_data(1, 1).shares is None is data.local_data(sampling.SERVER, 1).shares


def counts_of(data: ToyData, client: int) -> np.ndarray[Any, Any]:
    return data.true_labels(data.split.clients[client].unlabeled).bincount(minlength=3).numpy()


def test_only_sites_of_a_simulation_open_the_door_to_hidden_labels() -> None:
    """The one way from hidden labels to a party: its three numbers, if it is asked for by name."""
    for given in (None, {"a": 0.5, "b": 0.3, "c": 0.2}, STATED, {"of": "sites"}):
        stated = []
        for scramble in (False, True):
            data = ToyData(class_shares=given, partition=Dirichlet(0.5))
            data.setup()
            if scramble:
                hidden = torch.cat([client.unlabeled for client in data.split.clients])
                labels = data._train.labels.clone()
                labels[hidden] = 1
                data._train = replace(data._train, labels=labels)
                data._read_shares()
            stated.append(data.shares)
        assert (stated[0] == stated[1]) == (given != {"of": "sites"})


def test_simulated_sites_state_their_true_shares_or_inexact_ones() -> None:
    found = {}
    errors: dict[str, dict[str, float]] = {
        "exact": {},
        "rounded": {"rounded": 0.2},
        "off": {"off_by": 1.6},
        "counted": {"counted": 9},
    }
    for name, more in errors.items():
        data = ToyData(class_shares={"of": "sites", **more}, partition=Dirichlet(0.5))
        data.setup()
        found[name] = data.shares
        assert data.stated is not None
        assert data.stated.text.startswith("sites stated their shares (the partition's own, ")
        assert data.reading.facts["class shares"] == data.stated.text
    for client, exact in found["exact"].items():
        true = counts_of(data, client) / counts_of(data, client).sum()
        floored = np.maximum(true, FLOOR / 3)
        np.testing.assert_allclose(exact.shares, floored / floored.sum())
        rounded = np.maximum(np.round(true / 0.2) * 0.2, 0.05)
        np.testing.assert_allclose(found["rounded"][client].shares, rounded / rounded.sum())
        assert found["off"][client].shares != exact.shares
        assert found["counted"][client].sureness == counted_sureness(min(9, counts_of(data, client).sum()), 3)
    assert (
        {one.sureness for one in found["rounded"].values()}
        == {ROUGH}
        == {one.sureness for one in found["off"].values()}
    )


def test_who_cannot_use_or_protect_shares_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FedAvg does not use what sites know"):
        toy_trainer(tmp_path).fit(toy_fedavg(), ToyData(class_shares=STATED, label_location="clients"))
    method, build = METHODS["fl2_labels"]
    with pytest.raises(ValueError, match="one class each"):
        toy_trainer(tmp_path).fit(method(), build(class_shares=STATED))
    for public in (False, True):
        rules = [CentralDP(delta=1e-2, noise_multiplier=1.0)]
        trainer = toy_trainer(tmp_path, updates=rules, max_rounds=1)
        method = toy_fixmatch(client_weighting="uniform")
        data = ToyData(class_shares={"of": STATED, "public": public})
        if public:
            trainer.fit(method, data)
        else:
            with pytest.raises(ValueError, match="public: true"):
                trainer.fit(method, data)


def test_each_site_sends_its_shares_once_and_the_result_says_so(tmp_path: Path) -> None:
    sent = []
    for given in (None, {"of": "sites"}):
        trainer = toy_trainer(tmp_path, max_rounds=3, clients_per_round=4)
        trainer.fit(toy_self_training(), ToyData(class_shares=given))
        sent.append(trainer.total_bytes)
        text = Path(str(trainer.log_dir), "result.json").read_text(encoding="utf-8")
        assert ("sites stated their shares" in text) == (given is not None)
    assert sent[1] - sent[0] == 4 * 3 * 8
