"""What the sites of a federation know of their classes: the key ``data.class_shares``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.data.datasets import shortened
from lightning_fedssl.data.partition.federated_split import ClientIndices
from lightning_fedssl.data.sources.base import read_csv
from lightning_fedssl.data.sources.reading import MISSING, Reading
from lightning_fedssl.functional.class_shares import doubted_shares, shift_to_shares

KEY = "data.class_shares"

FLOOR = 0.05
"""The smallest share, divided by the number of classes: that a class never occurs is a claim which
nobody can make."""

ROUGH = 0.4
"""The sureness of shares that somebody has estimated (``about a fifth``), or that are rounded."""

DOUBT = 5.0
"""Samples a class of which a site that has counted them is half sure: with a tenth of 50 samples, a
share is off by a factor of 1.5, as an estimate is."""

_SITE = "site"
_OPTIONS = ("of", "rough", "rounded", "off_by", "counted", "public")
_SIMULATED = {
    "rounded": ("rounded to", 0, 1),
    "off_by": ("off by a factor of", 1, math.inf),
    "counted": ("samples counted:", 1, 1e18),
}
"""What makes shares of sites inexact: a text, above what the value is, and the largest."""
_ABOUT = re.compile(r"(about|around|roughly|circa|ca\.?|~)\s*")
_COUNTS = {"": 1, "a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4}
_PARTS = {
    "half": 2, "third": 3, "quarter": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10,
    "twentieth": 20, "hundredth": 100,
}  # fmt: skip
_FRACTION = re.compile(rf"({'|'.join(filter(None, _COUNTS))})?\s*({'|'.join(_PARTS)})s?")


class SiteShares(NamedTuple):
    """How frequent the classes are at a site.

    Attributes:
        shares: Of each class, above 0, of sum 1.
        sureness: From above 0 to 1, which says that they are exact
            (:func:`~lightning_fedssl.functional.class_shares.doubted_shares`).
    """

    shares: tuple[float, ...]
    sureness: float = 1.0


class ClassShares:
    """What ``data.class_shares`` says.

    Args:
        given: The key's value: a mapping from classes to shares, for the whole federation, which is
            rough for a site; one from sites to such mappings; a CSV file with the column ``site``
            and one for each class; or a mapping of options, of which ``of`` is one of these,
            ``sites`` to take the true shares of the partition, openly, or ``nodes`` where each node
            of a deployment states its own and sends them to nobody. ``rough: true`` says that all
            are estimated; ``public: true`` that they are not secret. With ``of: sites``, ``rounded:
            0.2`` rounds them, ``off_by: 1.6`` multiplies each by a random factor of about this
            size, and ``counted: 50`` counts them on so many samples of a site.
        class_names: The classes, in the order of the labels.

    Attributes:
        of_sites: Whether they are taken from the partition.
        of_nodes: Whether the nodes of a deployment state them.
        public: Whether they are not secret.
        text: What a run says of them.

    Raises:
        ValueError: If the value does not fit; the message says what to give.
        FileNotFoundError: If there is no such file.
    """

    def __init__(self, given: Any, class_names: Sequence[str]) -> None:
        self._names = [*class_names]
        options = given if isinstance(given, Mapping) and "of" in given else {"of": given}
        self._options = {name: options.get(name) for name in _OPTIONS}
        if unknown := sorted(options.keys() - {*_OPTIONS}):
            raise ValueError(f"{KEY}.{unknown[0]}: there are {', '.join(_OPTIONS)}")
        stated = options["of"]
        self.of_sites, self.of_nodes = stated == "sites", stated == "nodes"
        self.public = bool(options.get("public"))
        simulated = [name for name in _SIMULATED if self._options[name] is not None]
        if len(simulated) > self.of_sites:
            raise ValueError(
                f"{KEY}.{simulated[-1]}: one of {', '.join(_SIMULATED)} makes shares of sites "
                "inexact, with of: sites; leave it out"
            )
        self.text = "sites stated their shares"
        self._rows: dict[str, SiteShares] = {}
        self._of_all: SiteShares | None = None
        if self.of_sites:
            how = "exact"
            for name in simulated:
                text, low, high = _SIMULATED[name]
                if not low < options[name] <= high or (name == "counted" and options[name] % 1):
                    raise ValueError(
                        f"{KEY}.{name} is {options[name]}; give a share up to 1 to round to, a "
                        "factor above 1, or a number of samples"
                    )
                how = f"{text} {options[name]:g}"
            self.text += f" (the partition's own, {how})"
        elif self.of_nodes:
            self.text = "nodes know their shares"
        elif isinstance(stated, Mapping) and all(isinstance(r, Mapping) for r in stated.values()):
            for site, row in stated.items():
                self._rows[str(site)] = self._row(row, f"of site {site}: ")
        elif isinstance(stated, Mapping):
            row = self._row(stated)
            self._of_all = row._replace(sureness=min(row.sureness, ROUGH))
            self.text = "the shares of the whole federation were stated"
        elif isinstance(stated, (str, Path)):
            for line in read_csv(stated, [_SITE], Reading(KEY)):
                cells = {name: line[name] for name in self._names if name in line}
                place = f"{str(stated)!r}, row {line.number}: "
                self._rows[line[_SITE]] = self._row(cells, place)
        else:
            raise ValueError(
                f"{KEY} is {shortened(given)}; give a mapping from classes to shares, a CSV file "
                "with the column site and one for each class, or {of: sites} in a simulation"
            )

    def _row(self, values: Mapping[Any, Any], where: str = "") -> SiteShares:
        return read_row(values, self._names, bool(self._options["rough"]), where)

    def of_clients(
        self,
        clients: int,
        client_names: Sequence[str],
        true_counts: Callable[[int], NDArray[np.int64]],
        seed: int,
    ) -> dict[int, SiteShares]:
        """The shares of each client that has stated some.

        Args:
            clients: The number of clients.
            client_names: Their names; the numbers if there are none.
            true_counts: Counts the true classes of a client's samples without a label
                ``(classes,)``; called with ``of: sites`` alone.
            seed: Of the simulated errors.

        Raises:
            ValueError: If a site that is stated is none of the clients.
        """
        if self.of_sites:
            counts = {client: true_counts(client) for client in range(clients)}
            return {
                client: self._simulated(count, sampling.rng(seed, "class shares", client))
                for client, count in counts.items()
                if count.sum()
            }
        if self._of_all is not None:
            return dict.fromkeys(range(clients), self._of_all)
        names = client_names or [*map(str, range(clients))]
        numbers = dict(zip(names, range(clients), strict=False))
        if unknown := sorted(self._rows.keys() - numbers.keys()):
            raise ValueError(
                f"{KEY}: {shortened(unknown[0])} is not a site; there are "
                f"{shortened(', '.join(names))}"
            )
        return {numbers[site]: shares for site, shares in self._rows.items()}

    def _simulated(self, counts: NDArray[np.int64], rng: np.random.Generator) -> SiteShares:
        """What a site with these samples would state."""
        rounded, off_by, counted = (self._options[name] for name in _SIMULATED)
        true = counts / counts.sum()
        if rounded is not None:
            # A rounded 0 stands for shares from 0 to half a step.
            stated = np.maximum(np.round(true / rounded) * rounded, rounded / 4)
            exact = rounded <= 1 / (2 * len(true))
            return _made(stated, 1.0 if exact else ROUGH)
        if off_by is not None:
            factors = np.exp(rng.normal(0, math.log(off_by), len(true)))
            return _made(np.maximum(true, FLOOR / len(true)) * factors, ROUGH)
        if counted is not None:
            sample = rng.multivariate_hypergeometric(counts, min(int(counted), int(counts.sum())))
            return self._row(dict(zip(self._names, sample.tolist(), strict=True)))
        return _made(true, ROUGH if self._options["rough"] else 1.0)


def read_row(
    values: Mapping[Any, Any], class_names: Sequence[str], rough: bool = False, where: str = ""
) -> SiteShares:
    """The shares that a site states.

    Whole numbers with a sum above 1 are counts, of samples or in per cent: the larger their sum,
    the surer. Other numbers, and texts such as ``20 %``, ``1/5`` or ``a fifth``, are shares;
    ``about`` before one makes the row rough. Classes that are left out have equal parts of the
    rest.

    Args:
        values: Numbers or texts by the names of classes.
        class_names: The classes, in the order of the labels.
        rough: Whether all are estimated.
        where: What a message says of the place.

    Raises:
        ValueError: If a class is unknown, a value is not a share, or their sum is not about 1.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{KEY}: {where}{shortened(values)} is not a mapping from classes to shares, such as "
            "{yes: 0.2, no: 0.8}"
        )
    texts = {str(name): str(value).strip().lower() for name, value in values.items()}
    texts = {name: text for name, text in texts.items() if text not in _NO_VALUE}
    if unknown := sorted(texts.keys() - {*class_names}):
        raise ValueError(
            f"{KEY}: {where}{shortened(unknown[0])} is not a class; there are "
            f"{shortened(', '.join(class_names))}"
        )
    rough = rough or any(map(_ABOUT.match, texts.values()))
    share_of = {name: _number(text, f"{where}{name}") for name, text in texts.items()}
    total = math.fsum(share_of.values())
    absent = [name for name in class_names if name not in share_of]
    counted = all(text.isdecimal() for text in texts.values()) and total > 1 and not absent
    if absent and 0 < total < 1:
        share_of |= dict.fromkeys(absent, (1 - total) / len(absent))
    elif absent or not (counted or abs(total - 1) <= (0.4 if rough else 0.05)):
        raise ValueError(
            f"{KEY}: {where}the shares are {total:.3g} together; they should be 1 (or counts of "
            "samples: whole numbers, one for each class)"
        )
    shares = np.array([share_of[name] for name in class_names])
    sureness = counted_sureness(total, len(shares)) if counted else 1.0
    return _made(shares + 0.5 * counted, ROUGH if rough else sureness)


def counted_sureness(samples: float, classes: int) -> float:
    """How sure shares are that were counted on some samples.

    Args:
        samples: Their number.
        classes: The number of classes.
    """
    return samples / (samples + DOUBT * classes)


def _made(shares: NDArray[np.float64], sureness: float) -> SiteShares:
    """Shares with the floor, of sum 1."""
    shares = np.maximum(shares / shares.sum(), FLOOR / len(shares))
    return SiteShares(tuple((shares / shares.sum()).tolist()), sureness)


def drawn_to(
    predictions: Tensor, given: Mapping[str, Any], class_names: Sequence[str], one_class: bool
) -> Tensor:
    """Class probabilities drawn to the shares of the site that the samples come from.

    As few samples need not have the classes of the whole, they are drawn the less the fewer they
    are, as if the shares were counted on so many.

    Args:
        predictions: ``(samples, classes)``.
        given: What the site states; see :func:`read_row`.
        class_names: The classes, in the order of the columns.
        one_class: Whether each sample has one class.

    Raises:
        ValueError: If it does not, or ``given`` does not fit.
    """
    if not one_class:
        raise ValueError("--class_shares is for samples of one class each; leave it out")
    stated = read_row(given, class_names)
    logits = predictions.clamp_min(torch.finfo(predictions.dtype).tiny).log()
    shift = shift_to_shares(logits, doubted_shares(logits, *stated))
    return torch.softmax(logits + counted_sureness(*predictions.shape) * shift, dim=1)


def true_counts(
    labels: Tensor, clients: Sequence[ClientIndices], num_classes: int, client: int
) -> NDArray[np.int64]:
    """The true classes of a client's samples without a label, counted: ``(classes,)``.

    With :meth:`FederatedDataModule.true_labels` the only place that reads hidden labels, for ``of:
    sites`` alone.

    Args:
        labels: Of all samples of the run, -1 where nobody knows one.
        clients: What each client holds.
        num_classes: Number of classes.
        client: The client's number.

    Raises:
        ValueError: If nobody knows the classes.
    """
    client_labels = labels[clients[client].unlabeled].cpu()
    if (client_labels < 0).any():
        raise ValueError(
            f"{KEY}: of: sites needs data of which all classes are known, for a simulation; state "
            "the shares of each site, or in a deployment let its node state them (class-shares)"
        )
    return np.asarray(client_labels.bincount(minlength=num_classes).numpy(), dtype=np.int64)


_NO_VALUE = {word.lower() for word in MISSING}


def _number(text: str, where: str) -> float:
    """The share that a text states.

    Raises:
        ValueError: If it is none.
    """
    body = _ABOUT.sub("", text, count=1).strip()
    try:
        if match := _FRACTION.fullmatch(body):
            return _COUNTS[match[1] or ""] / _PARTS[match[2]]
        value = float(body[:-1]) / 100 if body.endswith("%") else float(Fraction(body))
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{KEY}: {where} is {shortened(text)!r}; give a share such as 0.2, 20 %, 1/5, a fifth "
            "or about a fifth, or a number of samples"
        )
    return value
