"""Writes docs/methods.md, a table of what each method does, found by running it: ``python docs/build_methods_page.py``.

Every method trains two rounds of its smallest configuration. The page reports the bytes of each transfer, the contents
of the client store, and whether clients can be stacked. With each kind of normalisation the method makes one step,
which shows the networks that it supports.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from lightning.pytorch import seed_everything
from torch import nn

import lightning_fedssl
from lightning_fedssl import algorithms
from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks.communication_ledger import kind_of
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.federation import Direction
from lightning_fedssl.models import CNN, NormKind, StaticBatchNorm2d
from lightning_fedssl.models.norm import BatchNorm2d
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer_interface import TrainerInterface

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule
    from lightning_fedssl.state import ClientUpdate

LabelLocation = Literal["server", "clients"]

SEAMS = (
    "round", "on_round_start", "broadcast", "on_client_start", "training_step", "client_features",
    "joint_training_step", "on_client_end", "client_weight", "accumulate", "aggregate", "on_server_start",
    "server_training_step", "evaluated_model",
)  # fmt: skip
"""The methods that a paper may override, in the order of a round."""

SMALL = (
    "--trainer.max_rounds=2", "--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.clients_at_once=2",
    "--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_rounds=1", "--data.max_train_images=300",
    "--data.max_test_images=50",
)  # fmt: skip
"""Options that make a run of a digits configuration take seconds."""

AT_ONCE = {
    "threshold": 0,
    "tau": 0,
    "warmup_rounds": 0,
    "server_only_rounds": 0,
    "helper_interval": 1,
    "lr_patience": 1,
}
"""Options with which two rounds contain everything: clients that train, helpers, an adapted learning rate."""

NORMS = {
    StaticBatchNorm2d: "static batch",
    BatchNorm2d: "batch",
    nn.BatchNorm2d: "batch",
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer",
}

HEAD = """\
# Overview of the methods

Every row was found by running the method for two rounds of the configuration that the last table names, on a CPU:
the transfers that it reported, the state that it stored, and whether two clients can train in one step.
Thresholds were 0, so that clients train, and FedMatch's helpers and rates were due in every round.

* **Transfers** are the most that a client had in the second round, as multiples of the bytes of the weights (x 1: as
  many) or, where they are tiny, in bytes; [costs.md](costs.md) has means over longer runs under the same names. A
  client, drawn or not, is sent "weights (for statistics)" to compute batch-norm moments with; if it is then drawn for
  the same weights, it has them and is not sent them again.
* **Client state and server state** persist between rounds. "Of each client" and "of each slot" (a position in the
  cohort) is what a server stores about them.
* **Norms it supports** are those with which a small network made a step of every party's; the others are refused by
  name. Batch norm is needed where neither group norm nor none is among them. Static batch norm has its statistics from
  the callback `StaticBatchNorm`. A run with such a network adds it with `source: moments`, the images of all clients
  and of the server. `SemiFL` and `Supervised` add it with `source: server`; `semifl_digits.yaml` sets `moments`.
* **Overridden functions** are the functions of `FederatedAlgorithm` that the method overrides, in the order of a round.
"""

FOOT = """\
`python docs/build_methods_page.py` writes this file; a test compares it with the code."""


class Recorder(FederatedCallback):
    """Records what is transferred and whether clients train.

    Attributes:
        sizes: By direction and tensor, the most bytes that a client's transfers of the latest round had.
        trained: Whether a client made a step.
    """

    def __init__(self) -> None:
        self.sizes: dict[Direction, dict[str, int]] = {"down": {}, "up": {}}
        self.trained = False
        self._round: Counter[tuple[Direction, int, str]] = Counter()

    def on_transfer(
        self,
        trainer: TrainerInterface,
        algorithm: FederatedAlgorithm,
        client: int,
        direction: Direction,
        sizes: Mapping[str, int],
    ) -> None:
        """Add to a client's bytes of the round."""
        for name, size in sizes.items():
            self._round[direction, client, name] += size

    def on_client_end(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, update: ClientUpdate) -> None:
        """A client has trained."""
        self.trained = True

    def on_round_end(self, trainer: TrainerInterface, algorithm: FederatedAlgorithm, metrics: dict[str, float]) -> None:
        """Keep the largest over the clients."""
        self.sizes = {"down": {}, "up": {}}
        for (direction, _, name), size in self._round.items():
            self.sizes[direction][name] = max(size, self.sizes[direction].get(name, 0))
        self._round.clear()


class Refusals(logging.Handler):
    """Stores the warning with the reason why clients cannot be stacked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store a warning's reason."""
        self.reasons.append(record.getMessage().partition("one after another: ")[2])


@dataclass(frozen=True)
class Features:
    """What the page reports of a method.

    Attributes:
        name: The class.
        config: The configuration it ran.
        title: The first sentence of its file.
        papers: arXiv numbers in its file's first paragraphs.
        labels: Where the labelled images may be.
        brings: Callbacks that it adds.
        norms: The kinds of normalisation in its configuration's network.
        takes: The kinds of normalisation that it trains a network with.
        down: What a client receives: sizes in bytes by name.
        up: What a client sends.
        weights: Bytes of the network's weights.
        clients_keep: Kinds of state that clients keep between rounds.
        server_keeps: Kinds of state that the server stores in addition to the model, once or for each client or slot.
        together: Whether clients can train in one step over stacked weights.
        seams: The methods of the base that it overrides.
    """

    name: str
    config: str
    title: str
    papers: tuple[str, ...]
    labels: tuple[str, ...]
    brings: tuple[str, ...]
    norms: tuple[str, ...]
    takes: tuple[str, ...]
    down: dict[str, int]
    up: dict[str, int]
    weights: int
    clients_keep: tuple[str, ...]
    server_keeps: tuple[str, ...]
    together: str
    seams: tuple[str, ...]


def methods() -> list[type[FederatedAlgorithm]]:
    """The methods of the package, by name."""
    public = (getattr(algorithms, name) for name in sorted(algorithms.__all__))
    return [c for c in public if isinstance(c, type) and issubclass(c, FederatedAlgorithm)]


def smallest_config(method: type[FederatedAlgorithm]) -> Path | None:
    """The method's configuration for the digits; without one, the first of those that it has."""
    folders = [Path(folder, "configs") for folder in lightning_fedssl.__path__]
    files = sorted(path for folder in folders for path in folder.glob("*.yaml"))
    own = [path for path in files if _class_of(path) == method.__name__]
    return min(own, key=lambda path: (not path.stem.endswith("digits"), path.name), default=None)


@functools.cache
def _class_of(path: Path) -> str:
    model = yaml.safe_load(path.read_text(encoding="utf-8")).get("model", {})
    return str(model.get("class_path", "")).rpartition(".")[2]


def features(method: type[FederatedAlgorithm]) -> Features:
    """Run a method and describe it.

    Args:
        method: Its class; it needs a configuration of the package for the digits.

    Raises:
        ValueError: If there is none.
    """
    path = smallest_config(method)
    if path is None:
        raise ValueError(f"{method.__name__} has no configuration: add configs/<method>_digits.yaml")
    cli = _configured(path, method)
    takes = [kind for kind in get_args(NormKind) if _trains(copy.deepcopy(cli.model), kind, cli.datamodule)]
    seen, together = _run(cli, method)
    algorithm = cli.model
    doc = inspect.getdoc(inspect.getmodule(method)) or ""
    modules = list(algorithm.network.modules())
    kept = {
        name.partition(".")[0] for client in range(cli.datamodule.num_clients) for name in algorithm.clients.of(client)
    }
    return Features(
        name=method.__name__,
        config=path.name,
        title=doc.split("\n\n")[0].replace("\n", " ").rstrip("."),
        papers=tuple(dict.fromkeys(re.findall(r"arXiv:?\s?(\d{4}\.\d{4,5})", doc))),
        labels=tuple(_locations(algorithm, cli.datamodule.label_location)),
        brings=tuple(sorted(type(callback).__name__ for callback in _brought(algorithm))),
        norms=tuple(dict.fromkeys(name for m in modules for kind, name in NORMS.items() if type(m) is kind)),
        takes=tuple(takes),
        down=_by_kind(seen.sizes["down"], algorithm),
        up=_by_kind(seen.sizes["up"], algorithm),
        weights=sum(p.numel() * p.element_size() for p in algorithm.network.parameters()),
        clients_keep=tuple(sorted(kept - algorithm.server_keeps)),
        server_keeps=(*_of_all(algorithm), *_of_each(algorithm, kept)),
        together=together,
        seams=tuple(seam for seam in SEAMS if getattr(method, seam, None) is not getattr(_base(method), seam, None)),
    )


def _configured(path: Path, method: type[FederatedAlgorithm]) -> FederatedCLI:
    """The configuration as a short run that shows all of the method, not yet begun."""
    parameters = _parameters(method)
    options = [f"--model.{name}={value}" for name, value in AT_ONCE.items() if name in parameters]
    with quiet():
        return FederatedCLI(["--config", str(path), *SMALL, *options], run=False)


def _trains(algorithm: FederatedAlgorithm, kind: NormKind, data: FederatedDataModule) -> bool:
    """Whether a step of every party changes the weights of a network with this normalisation."""
    vars(algorithm)["network_factory"] = partial(CNN, width=4, norm=kind)
    trainer = FederatedTrainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False)
    try:
        trainer.fit(algorithm, data)
    except ValueError:
        return False
    return algorithm.server.version > 0


def _run(cli: FederatedCLI, method: type[FederatedAlgorithm]) -> tuple[Recorder, str]:
    """Train two rounds; returns the transfers, and how clients trained."""
    seen, refusals = Recorder(), Refusals()
    engine = logging.getLogger("lightning_fedssl.local_training.engine")
    engine.addHandler(refusals)
    try:
        with tempfile.TemporaryDirectory() as folder, quiet():
            trainer: Any = cli.trainer
            trainer.default_root_dir = folder
            trainer.given_callbacks.append(seen)
            trainer.fit(cli.model, cli.datamodule)
    finally:
        engine.removeHandler(refusals)
    yes = "yes, with the server" if issubclass(method, JointAlgorithm) else "yes"
    return seen, f"no: {refusals.reasons[0]}" if refusals.reasons else yes if seen.trained else "no client trains"


def _base(method: type[FederatedAlgorithm]) -> type[FederatedAlgorithm]:
    return JointAlgorithm if issubclass(method, JointAlgorithm) else FederatedAlgorithm


def _parameters(method: type) -> set[str]:
    """Names of a constructor's arguments, including those that it passes on."""
    return {name for c in method.__mro__ for name in inspect.signature(c).parameters}


def _brought(algorithm: FederatedAlgorithm) -> list[Any]:
    brought = algorithm.configure_callbacks()
    return list(brought) if isinstance(brought, (list, tuple)) else [brought]


def _locations(algorithm: FederatedAlgorithm, own: str) -> Iterator[str]:
    """Where the labels may be: their place in the run, and the other one if the method's data check accepts it."""
    from lightning_fedssl.data.datamodule import FederatedDataModule

    for location in get_args(LabelLocation):
        if location == own:
            yield location
            continue
        data = FederatedDataModule(num_clients=4, num_labels=100, label_location=location)
        data.setup()
        try:
            algorithm.check_data(data)
        except ValueError:
            continue
        yield location


def _by_kind(sizes: Mapping[str, int], algorithm: FederatedAlgorithm) -> dict[str, int]:
    """The sum of the sizes of each kind of tensor, as the ledger names kinds."""
    model, sums = set(algorithm.server.model()), Counter[str]()
    for name, size in sizes.items():
        sums[kind_of(name, model)] += size
    return dict(sums)


def _of_all(algorithm: FederatedAlgorithm) -> list[str]:
    """Kinds of state that the server stores once."""
    return sorted([*(["momentum"] if algorithm.server.momentum else []), *algorithm.server.extra])


def _of_each(algorithm: FederatedAlgorithm, kept: set[str]) -> list[str]:
    """Kinds of state that the server stores for every client, or for every cohort slot."""
    whose = "client" if type(algorithm).state_owner is FederatedAlgorithm.state_owner else "slot"
    return [f"{kind} of each {whose}" for kind in sorted(kept & algorithm.server_keeps)]


# The page.


def page(found: list[Features]) -> str:
    """The Markdown page.

    Args:
        found: The description of each method.
    """
    head: dict[str, Callable[[Features], str]] = {
        "method": lambda f: f"`{f.name}`",
        "labels at": lambda f: " or ".join(f.labels),
        "client receives": lambda f: _told(f.down, f.weights),
        "client sends": lambda f: _told(f.up, f.weights),
        "client state": lambda f: _list(f.clients_keep),
        "server state": lambda f: _list(f.server_keeps),
    }
    how: dict[str, Callable[[Features], str]] = {
        "method": head["method"],
        "clients in one step": lambda f: f.together,
        "needs batch norm": lambda f: "no" if {"group", "none"} & set(f.takes) else "yes",
        "norms it supports": lambda f: _list(f.takes),
        "callbacks it adds": lambda f: _list(f.brings, code=True),
        "overridden functions": lambda f: _list(f.seams, code=True),
    }
    where: dict[str, Callable[[Features], str]] = {
        "method": head["method"],
        "what its file says": lambda f: f.title,
        "source": lambda f: ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in f.papers),
        "configuration": lambda f: f"`configs/{f.config}`",
        "its norm": lambda f: ", ".join(f.norms) or "none",
    }
    tables = [_table(columns, found) for columns in (head, how, where)]
    if missing := [f"`{method.__name__}`" for method in methods() if smallest_config(method) is None]:
        tables.append(f"Not run, because there is no configuration: {', '.join(missing)}.")
    return "\n".join([HEAD, "\n\n".join(tables), "", FOOT, ""])


def _told(sizes: Mapping[str, int], weights: int) -> str:
    return ", ".join(f"{kind} {_multiple(size, weights)}" for kind, size in sorted(sizes.items())) or "nothing"


def _multiple(size: int, weights: int) -> str:
    return f"x {size / weights:.2f}".rstrip("0").rstrip(".") if size >= weights / 20 else f"{size:,} B"


def _list(names: tuple[str, ...], code: bool = False) -> str:
    return ", ".join(f"`{name}`" if code else name.replace("_", " ") for name in names) or "nothing"


def _table(columns: Mapping[str, Callable[[Features], str]], found: Sequence[Features]) -> str:
    rows = [[cell(features) for cell in columns.values()] for features in found]
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def target() -> Path:
    """The file: docs/methods.md of the checkout."""
    return Path(__file__).resolve().parent.parent / "docs" / "methods.md"


def main() -> int:
    """Write the page, or with ``--print`` print it."""
    seed_everything(0, verbose=False)
    text = page([features(method) for method in methods() if smallest_config(method) is not None])
    if "--print" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        target().write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
