"""What each method does, found by running it: ``python -m lightning_fedssl.feature_matrix`` writes docs/methods.md.

Every method trains two rounds of its smallest configuration, and what is told of it is what was seen: the bytes of each
transfer, what the client store holds, whether the clients of a step give the same gradients together as alone.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from lightning.pytorch import seed_everything

import lightning_fedssl
from lightning_fedssl import algorithms
from lightning_fedssl.algorithm import Direction, FederatedAlgorithm
from lightning_fedssl.federated_cli import FederatedCLI
from lightning_fedssl.hooks import FederatedCallback
from lightning_fedssl.local_training import probe
from lightning_fedssl.models import StaticBatchNorm2d

if TYPE_CHECKING:
    from lightning_fedssl.trainer import FederatedTrainer

LabelLocation = Literal["server", "clients"]

SEAMS = (
    "round", "broadcast", "on_client_start", "training_step", "on_client_end", "accumulate", "aggregate",
    "on_server_start", "server_training_step", "evaluated_model",
)  # fmt: skip
"""The methods that a paper may override, in the order of a round."""

SMALL = (
    "--trainer.max_rounds=2", "--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.clients_at_once=1",
    "--trainer.enable_progress_bar=false", "--trainer.check_val_every_n_rounds=2", "--data.max_train_images=300",
    "--data.max_test_images=50",
)  # fmt: skip
"""What makes a configuration of the digits a run of seconds."""

CONFIDENT = ("threshold", "tau")
"""Arguments that keep untrained clients from training; they are set to 0."""

HEAD = """\
# The methods and what they ask for

Every row was found by running the method for two rounds of the configuration named below the table, on CPU: transfers
as they were reported, state as it was stored, and one step of three clients made together and alone. Multiples of x are
those of the network's own weights (x 1: as many bytes as the weights have). Seams are the methods of
`FederatedAlgorithm` that a paper overrides.
"""

FOOT = """\
`python -m lightning_fedssl.feature_matrix` writes this file; a test compares it with the code."""


@dataclass
class Recorder(FederatedCallback):
    """Sees what is transferred, and tries before the first clients train whether they can train together."""

    down: dict[str, int] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    together: str = "no client trains"

    def on_transfer(
        self,
        trainer: FederatedTrainer,
        algorithm: FederatedAlgorithm,
        client: int,
        direction: Direction,
        sizes: Mapping[str, int],
    ) -> None:
        """Keep the largest size of every tensor that crosses."""
        seen = self.down if direction == "down" else self.up
        for name, size in sizes.items():
            seen[name] = max(size, seen.get(name, 0))

    def on_client_phase_start(self, trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> None:
        """Make one step of a few clients alone and together."""
        clients = [trainer.local_data(client) for client in trainer.cohort]
        try:
            if probe.try_together(algorithm, clients):
                self.together = "yes"
        except probe.CannotTrainTogetherError as reason:
            self.together = f"no: {reason}"


@dataclass(frozen=True)
class Features:
    """What is told of a method.

    Attributes:
        name: The class.
        config: The configuration it ran.
        title: The first sentence of its file.
        papers: arXiv numbers in its file's first paragraphs.
        labels: Where the labelled images may be.
        brings: Callbacks that it brings along.
        statistics: The kind of normalisation of its configuration's network.
        down: What a client receives: sizes in bytes by name.
        up: What a client sends.
        weights: Bytes of the network's weights.
        clients_keep: Kinds of state that clients keep between rounds.
        server_keeps: Kinds of state that the server keeps beside the model.
        together: Whether clients can train in one step over stacked weights.
        seams: The methods of the base that it overrides.
    """

    name: str
    config: str
    title: str
    papers: tuple[str, ...]
    labels: tuple[str, ...]
    brings: tuple[str, ...]
    statistics: str
    down: dict[str, float]
    up: dict[str, float]
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


def _class_of(path: Path) -> str:
    model = yaml.safe_load(path.read_text(encoding="utf-8")).get("model", {})
    return str(model.get("class_path", "")).rpartition(".")[2]


def features(method: type[FederatedAlgorithm]) -> Features:
    """Run a method and tell what was seen.

    Args:
        method: Its class; it needs a configuration of the package for the digits.

    Raises:
        ValueError: If there is none.
    """
    path = smallest_config(method)
    if path is None:
        raise ValueError(f"{method.__name__} has no configuration: add configs/<method>_digits.yaml")
    cli, seen = _run(path, method)
    algorithm = cli.model
    doc = inspect.getdoc(inspect.getmodule(method)) or ""
    modules = list(algorithm.network.modules())
    size = sum(p.numel() * p.element_size() for p in algorithm.server.parameters.values())
    kept = {
        name.partition(".")[0] for client in range(cli.datamodule.num_clients) for name in algorithm.clients.of(client)
    }
    return Features(
        name=method.__name__,
        config=path.name,
        title=doc.split("\n\n")[0].replace("\n", " ").rstrip("."),
        papers=tuple(dict.fromkeys(re.findall(r"arXiv:? ?(\d{4}\.\d{4,5})", doc))),
        labels=tuple(_locations(algorithm)),
        brings=tuple(sorted(type(callback).__name__ for callback in _brought(algorithm))),
        statistics="static batch norm" if any(isinstance(m, StaticBatchNorm2d) for m in modules) else "",
        down=_shares(seen.down, algorithm, size),
        up=_shares(seen.up, algorithm, size),
        clients_keep=tuple(sorted(kept)),
        server_keeps=tuple(sorted([*(["momentum"] if algorithm.server.momentum else []), *algorithm.server.extra])),
        together=seen.together,
        seams=tuple(seam for seam in SEAMS if getattr(method, seam) is not getattr(FederatedAlgorithm, seam)),
    )


def _run(path: Path, method: type[FederatedAlgorithm]) -> tuple[FederatedCLI, Recorder]:
    seen = Recorder()
    options = [*SMALL, *(f"--model.{name}=0" for name in CONFIDENT if name in _parameters(method))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python")
        cli = FederatedCLI(["--config", str(path), *options], run=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = cli.trainer
        trainer.default_root_dir = folder
        trainer._given_callbacks = (*trainer._given_callbacks, seen)
        trainer.fit(cli.model, cli.datamodule)
    return cli, seen


def _parameters(method: type) -> set[str]:
    """Names of a constructor's arguments, those it passes on included."""
    return {name for c in method.__mro__ for name in inspect.signature(c).parameters}


def _brought(algorithm: FederatedAlgorithm) -> list[Any]:
    brought = algorithm.configure_callbacks()
    return list(brought) if isinstance(brought, (list, tuple)) else [brought]


def _locations(algorithm: FederatedAlgorithm) -> Iterator[str]:
    """Where the method lets the labels be, by its own check of data that have them there."""
    from lightning_fedssl.data.datamodule import FederatedDataModule

    for location in get_args(LabelLocation):
        data = FederatedDataModule(num_clients=4, num_labels=100, label_location=location)
        data.setup()
        try:
            algorithm.check_data(data)
        except ValueError:
            continue
        yield location


def _shares(sizes: Mapping[str, int], algorithm: FederatedAlgorithm, weights: int) -> dict[str, float]:
    """Sizes by kind, as multiples of the network's weights."""
    shares: dict[str, float] = {}
    for name, size in sizes.items():
        kind = _kind(name, algorithm)
        shares[kind] = shares.get(kind, 0.0) + size / weights
    return shares


def _kind(name: str, algorithm: FederatedAlgorithm) -> str:
    if name in algorithm.server.parameters:
        return "weights"
    if name in algorithm.server.buffers:
        return "buffers"
    return name.removeprefix("payload.").partition(".")[0].replace("_", " ")


# The page.


def page(found: list[Features]) -> str:
    """The Markdown page.

    Args:
        found: What was seen of each method.
    """
    tables = [
        _table(
            ["method", "labels at", "client receives", "client sends", "client keeps", "server keeps"],
            [[f"`{f.name}`", " or ".join(f.labels), _told(f.down), _told(f.up), _list(f.clients_keep),
              _list(f.server_keeps)] for f in found],
        ),
        _table(
            ["method", "clients in one step", "brings along", "seams overridden"],
            [[f"`{f.name}`", f.together, _list(f.brings, code=True), _list(f.seams, code=True)] for f in found],
        ),
        _table(
            ["method", "what its file says", "source", "configuration"],
            [[f"`{f.name}`", f.title, ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in f.papers),
              f"`configs/{f.config}`"] for f in found],
        ),
    ]  # fmt: skip
    return "\n".join([HEAD, "\n\n".join(tables), "", FOOT, ""])


def _told(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} x {_multiple(share)}" for kind, share in shares.items()) or "nothing"


def _multiple(share: float) -> str:
    return f"{share:.2f}".rstrip("0").rstrip(".") if share >= 0.005 else "0.00"


def _list(names: tuple[str, ...], code: bool = False) -> str:
    return ", ".join(f"`{name}`" if code else name.replace("_", " ") for name in names) or "nothing"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def target() -> Path:
    """The file: docs/methods.md of the checkout."""
    return Path(__file__).resolve().parent.parent / "docs" / "methods.md"


def main() -> int:
    """Write the page, or with ``--print`` print it."""
    seed_everything(0, verbose=False)
    text = page([features(method) for method in methods()])
    if "--print" in sys.argv[1:]:
        sys.stdout.write(text)
    else:
        target().write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
