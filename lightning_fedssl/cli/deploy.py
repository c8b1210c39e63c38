"""The ``deploy`` command: writes a Flower app that trains a configuration on machines of their own."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_fedssl import __version__
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.cli.log_output import show_log
from lightning_fedssl.cli.parser import ScriptParser
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.partition.base import FromFile
from lightning_fedssl.data.partition.federated_split import FederatedSplit
from lightning_fedssl.deployment.federation import refuse_callbacks
from lightning_fedssl.deployment.node import Node, refuse_undeployable
from lightning_fedssl.deployment.node_data import PartitionOfDataSet
from lightning_fedssl.deployment.own_data import OwnData, ServerData, module_of_spec, save_spec

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from lightning_fedssl.deployment.flower.server import Parts

USAGE = """\
lightning-fedssl deploy init FOLDER [--own_data] [--config FILE]... [--KEY VALUE]...
       lightning-fedssl deploy preload PROGRAM [OPTION]...
       lightning-fedssl deploy demo FOLDER"""

DESCRIPTION = """\
Writes a Flower app into a new folder: the configuration with every default filled in, a ServerApp, a ClientApp and the
pyproject.toml that Flower reads. Then Flower's own commands start the server and the nodes; docs/deployment.md shows
them. The options are those of fit.

With --own_data every node has data of its own, which are nowhere else, and data.dataset is what the server has: its
labelled and its test images. Without, every node loads the data set and uses its clients' part of the partition.

  lightning-fedssl deploy init my_app --config semifl_digits.yaml
  lightning-fedssl deploy init my_app --config semifl_digits.yaml --data.num_clients 3 --trainer.clients_per_round 3

preload runs a program of Flower, flower-supernode or flower-superlink, with PyTorch loaded once: otherwise every
message costs the import of PyTorch and Lightning, some seconds of a processor.

  lightning-fedssl deploy preload flower-supernode --superlink server.example.org:8000 --root-certificates ca.crt

demo trains SemiFL on the handwritten digits with a server and three nodes, as processes of this machine with TLS.
"""

DEMO = (
    "--config=semifl_digits.yaml", "--data.num_clients=3", "--trainer.clients_per_round=3", "--trainer.max_rounds=3",
    "--trainer.callbacks=[]", "--model.server_epochs=20", "--model.client_epochs=2",
)  # fmt: skip
"""The options of the demonstration: few rounds, as each message costs the start of a process."""

MISSING = 'Flower is not installed; run in a checkout of this package: pip install ".[flower]"'

_APP = "fedssl_app"
_SPEC = "data.json"
"""What a node must know of the data before it reads its own; in an app of nodes with data of their own."""

_PARTITION = "partition.json"
"""A copy of the file of ``data.partition.path``, which the server and every node read."""

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{method} on nodes of their own, with lightning-fedssl {version}"
dependencies = ["lightning-fedssl[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{app}"]

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "{app}.server_app:app"
clientapp = "{app}.client_app:app"

# flwr run . SUPERLINK --run-config 'KEY=VALUE' changes these for one run.
[tool.flwr.app.config]
options = ""            # further options of fit, such as "--trainer.max_rounds 5"
wait-for-clients = 0    # clients that must be connected before the first round; 0: all of them
answer-timeout = 3600   # seconds that a client has for an answer; after that it misses the round
connect-timeout = 3600  # seconds that the server waits for clients before it gives up
repeat-after = 60       # seconds without an answer after which the server checks whether a message was lost
resume = true           # resume the last checkpoint if that run has rounds left
"""

_MODULE = '''\
"""The {side}App of this app."""

from pathlib import Path

from lightning_fedssl.cli.deploy import {function}

app = {function}(Path(__file__).with_name("config.yaml"))
'''


def main(arguments: Sequence[str]) -> int:
    """Write an app, run a program of Flower, or run the demonstration.

    Args:
        arguments: The action and its options.

    Returns:
        The exit code: 0 for an app that is written, else that of the program or the demonstration.

    Raises:
        ValueError: If the configuration cannot be deployed.
        FileExistsError: If the folder has files.
        FileNotFoundError: If there is no such program.
        ModuleNotFoundError: If Flower is needed and not installed.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    if list(arguments[:1]) == ["preload"] and list(arguments[1:]) not in ([], ["-h"], ["--help"]):
        return run_preloaded(arguments[1:])
    parser = ScriptParser(
        prog="lightning-fedssl deploy", usage=USAGE, description=DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("action", choices=["init", "preload", "demo"], help="See above.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="The folder to write; it is made.")
    parser.add_argument("--own_data", action="store_true", help="Every node has data of its own.")
    if list(arguments) == ["preload"]:
        parser.error("preload needs a program of Flower: lightning-fedssl deploy preload PROGRAM [OPTION]...")
    options, of_fit = parser.parse_known_args(list(arguments))
    before = arguments[1 : list(arguments).index(str(options.folder), 1)] if str(options.folder) in arguments else []
    if set(before) - {"--own_data"}:
        parser.error(f"give the folder before {before[0]}: lightning-fedssl deploy {options.action} FOLDER [OPTION]...")
    if options.action == "demo" and len(arguments) > 2:
        parser.error(f"demo takes a folder and no options; leave out {' '.join(arguments[2:])}")
    if options.action == "demo":
        return run_demo(options.folder)
    files = write_app(options.folder, of_fit, options.own_data)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for path in files:
        console.print(f"written: {path}")
    app = shlex.quote(str(options.folder))
    console.print(f"next: flwr run {app} SUPERLINK --stream (docs/deployment.md has all the commands)")
    if find_spec("flwr") is None:
        console.print(f"note: {MISSING}")
    return 0


def run_preloaded(command: Sequence[str]) -> int:
    """Run a program of Flower with PyTorch loaded once for all messages.

    Args:
        command: The program and its options.

    Returns:
        The exit code of the program.

    Raises:
        ModuleNotFoundError: If Flower is not installed.
        FileNotFoundError: If there is no such program.
    """
    _require_flower()
    from lightning_fedssl.deployment.flower import preload

    return preload.run_preloaded(command)


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise ModuleNotFoundError(MISSING)


def run_demo(folder: Path) -> int:
    """Train with a server and three nodes, as processes of this machine; print the server's log.

    Args:
        folder: A new folder, for the app, the logs and the run.

    Returns:
        The exit code: 0 if the run has finished.

    Raises:
        ModuleNotFoundError: If Flower is not installed.
        FileExistsError: If the folder has files.
    """
    _require_flower()
    from lightning_fedssl.deployment.flower.local import LocalFederation

    write_app(folder / "app", DEMO)
    with LocalFederation(folder) as federation:
        for client in range(3):
            federation.start_node(f"node-{client}", {"clients": str(client)})
        federation.start_server()
        federation.submit(folder.resolve() / "app", {})
        for line in federation.follow("run"):
            sys.stdout.write(_seen_from_here(line, folder))
            sys.stdout.flush()
    text = federation.log("run").read_text(encoding="utf-8")
    sys.stdout.write(f"the logs of server and nodes are in {folder}\n")
    return 0 if re.search(r"^test/accuracy \d", text, re.MULTILINE) else 1


def _seen_from_here(line: str, folder: Path) -> str:
    """A line of the server's log, in which the run folder is relative to the server's folder."""
    return re.sub(r"(?<=run folder: )(?=[^/\s])", lambda _: f"{folder}/", line)


def write_app(folder: Path, options: Sequence[str], own_data: bool = False) -> list[Path]:
    """Write an app.

    Args:
        folder: The folder; it is made.
        options: Options of ``fit``.
        own_data: Every node has data of its own.

    Returns:
        The files.

    Raises:
        ValueError: If the method or a callback cannot be deployed.
        FileExistsError: If the folder has files.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} has files: give a new folder for the app")
    cli = _read(options)
    refuse_undeployable(cli.model)
    refuse_callbacks(cli.trainer.callbacks)  # type: ignore[attr-defined]
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "app"
    app = folder / _APP
    texts = {
        folder / "pyproject.toml": _PYPROJECT.format(
            name=name, method=type(cli.model).__name__, version=__version__, app=_APP
        ),
        app / "__init__.py": f'"""A Flower app of lightning-fedssl {__version__}."""\n',
        app / "server_app.py": _MODULE.format(side="Server", function="server_app"),
        app / "client_app.py": _MODULE.format(side="Client", function="client_app"),
    }
    with _emptied_after_an_error(folder):
        app.mkdir(parents=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        cli.parser.save(cli.config, app / "config.yaml", skip_none=False, multifile=False)
        files = [*texts, app / "config.yaml"]
        if own_data:
            save_spec(cli.datamodule.spec, app / _SPEC)
            files.append(app / _SPEC)
        elif isinstance(rule := cli.datamodule.partition, FromFile):
            FederatedSplit.load(rule.path).save(app / _PARTITION)
            files.append(app / _PARTITION)
    return files


@contextmanager
def _emptied_after_an_error(folder: Path) -> Iterator[None]:
    """An error inside the context removes what was written into a folder, and the folder if it is new."""
    existed = folder.exists()
    try:
        yield
    except BaseException:
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not existed and folder.is_dir():
            folder.rmdir()
        raise


def server_app(config: Path) -> ServerApp:
    """The ServerApp of a configuration, for the app that :func:`write_app` writes.

    Args:
        config: The file.
    """
    from lightning_fedssl.deployment.flower.server import make_server_app

    return make_server_app(partial(make_parts, config))


def client_app(config: Path, mods: list[Any] | None = None) -> ClientApp:
    """The ClientApp of a configuration, for the app that :func:`write_app` writes.

    Args:
        config: The file.
        mods: Flower's modifiers of messages.
    """
    from lightning_fedssl.deployment.flower.client import make_client_app

    return make_client_app(partial(make_node, config), mods)


def make_parts(config: Path, run_config: Mapping[str, Any]) -> Parts:
    """Trainer, algorithm and data of the server.

    Args:
        config: The app's configuration.
        run_config: Flower's run configuration.
    """
    own_data = config.with_name(_SPEC).is_file()
    cli = _read_app(config, run_config, ServerData if own_data else FederatedDataModule)
    return cli.trainer, cli.model, cli.datamodule  # type: ignore[return-value]


def make_node(config: Path, node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Node:
    """The node that trains the clients of this machine.

    Args:
        config: The app's configuration.
        node_config: Flower's node configuration.
        run_config: Flower's run configuration.
    """
    folder, spec = Path(str(node_config.get("state-dir", "fedssl-state"))), config.with_name(_SPEC)
    own_data = spec.is_file()
    root = [f"--data.root={node_config['data-root']}"] if "data-root" in node_config else []
    cli = _read_app(config, run_config, module_of_spec(spec) if own_data else FederatedDataModule, root)
    clients = clients_of(node_config, cli.datamodule.num_clients)
    data = _own_data(node_config, cli.datamodule, clients) if own_data else _part_of(cli.datamodule, clients)
    fresh_start = str(node_config.get("fresh-start", False)).lower() == "true"
    return Node(cli.trainer, cli.model, cli.datamodule, data, folder, fresh_start)  # type: ignore[arg-type]


def _part_of(datamodule: FederatedDataModule, clients: Sequence[int]) -> PartitionOfDataSet:
    datamodule.prepare_data()
    datamodule.setup()
    return PartitionOfDataSet(datamodule, clients)


def _own_data(node_config: Mapping[str, Any], datamodule: FederatedDataModule, clients: Sequence[int]) -> OwnData:
    if "data" not in node_config or len(clients) != 1:
        raise ValueError(
            'a node with data of its own has one client: give --node-config \'clients="0" data="/path"\' to '
            "flower-supernode, with the client's number and its folder, .csv or .npz file"
        )
    return OwnData(datamodule, Path(str(node_config["data"])), clients[0])


def clients_of(node_config: Mapping[str, Any], num_clients: int) -> list[int]:
    """The clients of a node: ``clients="0,3"``, or those of ``partition-id`` among ``num-partitions`` nodes.

    Args:
        node_config: Flower's node configuration.
        num_clients: The number of all clients.

    Raises:
        ValueError: If neither is given, or they are no numbers of clients.
    """
    if "clients" in node_config:
        return _listed_clients(str(node_config["clients"]), num_clients)
    if "partition-id" not in node_config:
        raise ValueError("the node does not know its clients: give --node-config 'clients=\"0,3\"' to flower-supernode")
    number = _number(node_config, "partition-id", num_clients)
    nodes = _number(node_config, "num-partitions", num_clients)
    if nodes < 1:
        raise ValueError(f"the node's num-partitions is {nodes}: give the number of nodes, 1 or more")
    if not 0 <= number < min(nodes, num_clients):
        raise ValueError(
            f"the node's partition-id is {number}, with {nodes} nodes and {num_clients} clients: no client is left for "
            f"it; number the nodes from 0 to {min(nodes, num_clients) - 1}"
        )
    return list(range(number, num_clients, nodes))


def _number(node_config: Mapping[str, Any], key: str, default: int) -> int:
    value = node_config.get(key, default)
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"the node's {key} is {value!r}: give a whole number, as in {key}=0") from error


def _listed_clients(text: str, num_clients: int) -> list[int]:
    try:
        clients = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"the node's clients are {text!r}: give numbers with commas, as in clients='0,3'") from error
    if len(set(clients)) < len(clients) or not all(0 <= client < num_clients for client in clients):
        raise ValueError(
            f"the node's clients are {text!r}: give each client once, with numbers from 0 to {num_clients - 1}"
        )
    return clients


def _read_app(
    config: Path, run_config: Mapping[str, Any], datamodule_class: type[FederatedDataModule], more: Sequence[str] = ()
) -> FederatedCLI:
    show_log()
    copy = config.with_name(_PARTITION)
    partition = [f"--data.partition.path={copy}"] if copy.is_file() else []
    options = ["--config", str(config), *partition, *shlex.split(str(run_config.get("options", ""))), *more]
    return _read(options, datamodule_class)


def _read(options: Sequence[str], datamodule_class: type[FederatedDataModule] = FederatedDataModule) -> FederatedCLI:
    with quiet():
        return FederatedCLI(args=list(options), run=False, datamodule_class=datamodule_class)
