from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fedssl.callbacks.answer import Answer, Candidate, Name, decide, difference


def right(accuracy: float, count: int, repeats: int = 1) -> Tensor:
    return (torch.arange(count) < accuracy * count).repeat(repeats, 1)


def model(name: Name, left_out: Tensor | None = None, validated: Tensor | None = None) -> Candidate:
    return Candidate(name, torch.zeros(1), left_out, validated)


@pytest.mark.parametrize(
    ("ours", "theirs", "count", "chosen"),
    [
        (1.0, 0.0, 1, "linear"),  # one sample is no evidence
        (0.9, 0.8, 20, "linear"),
        (0.9, 0.8, 200, "with clients"),
        (0.8, 0.9, 200, "linear"),
        (0.8, 0.8, 10_000, "linear"),
    ],
)
@pytest.mark.parametrize("by", ["left_out", "validated"])
def test_another_model_takes_the_place_of_the_linear_answer_only_by_evidence(
    ours: float, theirs: float, count: int, chosen: str, by: str
) -> None:
    one, other = (right(accuracy, count)[0 if by == "validated" else slice(None)] for accuracy in (ours, theirs))
    found, reason = decide([model("linear", **{by: other}), model("with clients", **{by: one})])
    assert found.name == chosen
    assert str(count) in reason


def test_without_evidence_the_linear_answer_stays_whatever_is_expected() -> None:
    hopeful = model("with clients")._replace(expected=0.5)
    assert decide([model("linear"), hopeful])[0].name == "linear"
    assert decide([model("linear"), hopeful], stated_shares=True)[0].name == "with clients"
    against = [model("linear", validated=right(0.9, 500)[0]), hopeful._replace(validated=right(0.7, 500)[0])]
    assert decide(against, stated_shares=True)[0].name == "linear"


def test_the_error_of_a_difference_is_paired_and_never_0() -> None:
    gain, error = difference(right(0.8, 100)[0], right(0.7, 100)[0])
    assert gain == pytest.approx(0.1)
    assert error == pytest.approx(((11 / 101 - 0.01) / 100) ** 0.5)
    assert difference(right(0.8, 100)[0], right(0.8, 100)[0])[1] > 0


def answer(accuracies: dict[Name, float], chosen: Name = "linear", count: int = 200) -> Answer:
    made = [Candidate(name, 1 - right(share, count)[0].long()) for name, share in accuracies.items()]
    picked = next(each for each in made if each.name == chosen)
    return Answer(made, picked, "ridge regression", "why", torch.zeros(count, dtype=torch.long), "row", "export X")


def test_an_open_question_says_how_many_samples_would_answer_it() -> None:
    told = answer({"largest class": 0.3, "linear": 0.8, "with clients": 0.82})
    assert told.open_question.endswith("about 200 rows would tell")
    assert told.lines()[-1] == "next: export X"
    assert not answer({"linear": 0.5, "with clients": 0.8}).open_question
    below = answer({"largest class": 0.8, "linear": 0.5, "with clients": 0.4})
    assert "class_shares" in below.lines()[-1]
    assert "class_shares" not in below._replace(stated=True).advice
    assert all(len(line) <= 100 for made in (told, below) for line in made.lines())
