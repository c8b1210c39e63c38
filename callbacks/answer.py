"""The answer of a run: what was tried, which model is handed over, why, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Name = Literal["largest class", "linear", "labels alone", "with clients", "trees"]
"""Always the largest class of the labels; the best linear answer; the run's network, trained on the
labels alone; the run's model; extra trees on the labels."""

EXPECTED_ERROR = 0.03
"""The deviation of the gain by the clients' samples between real tasks."""

EXPECTED_LOSS = -0.02
"""What a model other than the best linear answer is expected to gain before any evidence: a loss,
as on real tables and series."""

EXPECTED_WITH_SHARES = 0.05
"""What the clients' samples are expected to gain where sites state their class shares."""


class Candidate(NamedTuple):
    """Something that a run has tried.

    Attributes:
        name: What it is called, one name everywhere.
        tested: The classes that it predicts for the test samples, ``(tests,)``: they are shown, and
            play no part in the choice.
        left_out: Whether it was right on the server's labels that were left out, in each
            cross-validation, ``(repeats, labels)``
            (:func:`~lightning_fedssl.models.head.cross_validate`); None if it was not
            cross-validated.
        validated: Whether it is right on the validation samples, ``(samples,)``; None without any.
        exported: Whether it is a network, which ``export`` can write.
        expected: What it is expected to gain over a simpler candidate before any evidence.
    """

    name: Name
    tested: Tensor
    left_out: Tensor | None = None
    validated: Tensor | None = None
    exported: bool = True
    expected: float = EXPECTED_LOSS


def decide(candidates: Sequence[Candidate], stated_shares: bool = False) -> tuple[Candidate, str]:
    """The candidate that is handed over, and the reason in a few words.

    This is the only place where a model is chosen: what it returns is ``chosen`` in the last lines,
    on the page and in ``result.json``, and what ``export``, ``deploy`` and ``predict`` take.

    The first candidate that can be exported is the incumbent: the best linear answer, where there
    is one. Each later one takes its place only if there is evidence, and with it an estimated gain
    above 0 (:func:`estimate_gain`). Evidence is: labels that both left out in a cross-validation;
    validation samples; and, for the model with the clients' samples, class shares that sites have
    stated. Test samples play no part.

    Args:
        candidates: The incumbent first.
        stated_shares: Whether sites have stated how frequent their classes are, and the model with
            the clients' samples was trained with that: it is then expected to gain
            :data:`EXPECTED_WITH_SHARES`.
    """
    chosen, *others = [candidate for candidate in candidates if candidate.exported]
    reason = "nothing else can be exported"
    for other in others:
        shares = stated_shares and other.name == "with clients"
        gain, evidence = estimate_gain(
            other, chosen, EXPECTED_WITH_SHARES if shares else other.expected
        )
        evidence = ["sites stated their shares"] * shares + evidence
        takes_over = bool(evidence) and gain > 0
        expectation = f"expected {100 * gain:+.1f} points ({', '.join(evidence)})"
        reason = expectation if takes_over else f"{other.name} {expectation}"
        if not evidence:
            reason = f"{other.name}: no evidence without validation or class shares"
        chosen = other if takes_over else chosen
    return chosen, reason


def estimate_gain(one: Candidate, other: Candidate, expected: float) -> tuple[float, list[str]]:
    """What a candidate gains over another: the expected gain, corrected by what was measured.

    Both are weighted by their precision, so a few samples change little.

    Args:
        one: A candidate.
        other: A simpler one.
        expected: The gain before any evidence.

    Returns:
        The estimated difference of the accuracies, and the evidence in words.
    """
    total, precision = expected / EXPECTED_ERROR**2, EXPECTED_ERROR**-2
    evidence = []
    pairs = {
        "labels left out": (one.left_out, other.left_out),
        "validation samples": (one.validated, other.validated),
    }
    for what, (ours, theirs) in pairs.items():
        if ours is not None and theirs is not None and ours.numel() and theirs.numel():
            gain, error = difference(ours, theirs)
            precision += error**-2
            total += gain * error**-2
            evidence.append(f"{ours.shape[-1]} {what}")
    return total / precision, evidence


def difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The difference of two accuracies on the same samples, and its standard error.

    One more sample on which they differ keeps the error above 0 where they agree.

    Args:
        one: Whether the one is right, ``(samples,)`` or ``(repeats, samples)``.
        other: Whether the other is, likewise.
    """
    gains = (one.double() - other.double()).reshape(-1, one.shape[-1]).mean(0)
    count = len(gains)
    gain = float(gains.mean())
    variance = float(gains.square().sum() + 1) / (count + 1) - gain**2
    return gain, math.sqrt(max(variance, 1 / (count + 1)) / count)


class Answer(NamedTuple):
    """The end of a run: made once, printed, on the page, in ``result.json``, and what ``export``
    takes.

    Attributes:
        candidates: All that was tried, in the order in which it is shown.
        chosen: The one that is handed over.
        linear: Which kind of regression the best linear answer is; empty if there is none.
        reason: Why, in a few words.
        truth: The true classes of the test samples.
        noun: What a sample is called.
        command: What exports it.
        stated: Whether sites have stated their class shares.
    """

    candidates: Sequence[Candidate]
    chosen: Candidate
    linear: str
    reason: str
    truth: Tensor
    noun: str
    command: str
    stated: bool = False

    def accuracy(self, candidate: Candidate) -> float:
        """The share of the test samples that a candidate classifies correctly."""
        return float((candidate.tested == self.truth).double().mean())

    def examples(self, count: int = 12) -> list[list[int]]:
        """Test samples with their true class and that of the chosen model, errors first.

        Args:
            count: How many at most.
        """
        right = self.chosen.tested == self.truth
        rows = right.long().argsort(stable=True)[:count]
        return torch.stack([rows, self.truth[rows], self.chosen.tested[rows]], 1).tolist()

    def lead(self, one: Candidate) -> tuple[float, float]:
        """How much a candidate is ahead of the chosen one on the test samples, and the standard
        error.
        """
        return difference(one.tested == self.truth, self.chosen.tested == self.truth)

    @property
    def open_question(self) -> str:
        """What the test samples cannot decide, and how many would; empty if they can."""
        compared = "linear" if self.chosen.name == "with clients" else "with clients"
        for other in self.candidates:
            gain, error = self.lead(other)
            if other.name == compared and 0.002 < abs(gain) < 2 * error:
                needed = len(self.truth) * (2 * error / gain) ** 2
                return (
                    f"{other.name} {100 * gain:+.1f} points on {len(self.truth)} test {self.noun}s "
                    f"may be chance; about {float(f'{needed:.1g}'):,.0f} {self.noun}s would tell"
                )
        return ""

    @property
    def advice(self) -> str:
        """The one thing to do."""
        largest = self.candidates[0]
        gain, error = self.lead(largest)
        best = max(map(self.accuracy, self.candidates))
        if largest.name == "largest class" and gain > 2 * error and self.accuracy(largest) == best:
            ask = "" if self.stated else "give data.class_shares, or "
            return f"all is below the largest class: {ask}label {self.noun}s at random"
        return self.command

    def lines(self) -> list[str]:
        """The last lines of the run, at most 100 characters each, but for the path in a command."""
        shown = [f"{each.name} {100 * self.accuracy(each):.1f}" for each in self.candidates]
        kind = f" ({self.linear})" if self.chosen.name == "linear" else ""
        lines = [
            f"test, %: {', '.join(shown)}",
            f"chosen: {self.chosen.name}{kind}; {self.reason}",
            self.open_question,
            f"next: {self.advice}",
        ]
        return list(filter(None, lines))

    def values(self) -> dict[str, Any]:
        """The same for ``result.json``."""
        return {
            "chosen": self.chosen.name,
            "linear": self.linear or None,
            "reason": self.reason,
            "open_question": self.open_question or None,
            "next": self.advice,
            "candidates": [
                {
                    "name": each.name,
                    "test": self.accuracy(each),
                    "left_out": _share(each.left_out),
                    "validation": _share(each.validated),
                }
                for each in self.candidates
            ],
        }


def _share(right: Tensor | None) -> float | None:
    return float(right.double().mean()) if right is not None and right.numel() else None


def accuracy_error(accuracy: float, count: int) -> float:
    """The standard error of a measured accuracy; of two more samples, one right and one wrong, so
    that it is not 0 where all are right.

    Args:
        accuracy: From 0 to 1.
        count: Samples, at least 1.
    """
    share = (accuracy * count + 1) / (count + 2)
    return math.sqrt(share * (1 - share) / count)
