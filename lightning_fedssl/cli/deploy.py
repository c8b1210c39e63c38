"""The ``deploy`` command: writes a Flower app that trains a configuration on machines of their own."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_fedssl import __version__
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.deployment.node import Node, refuse_undeployable
from lightning_fedssl.deployment.node_data import PartitionOfDataSet

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from lightning_fedssl.deployment.flower.server import Parts

USAGE = "lightning-fedssl deploy init FOLDER [--config FILE]... [--KEY VALUE]..."

DESCRIPTION = """\
Writes a Flower app into a new folder: the configuration with every default filled in, a ServerApp, a ClientApp and the
pyproject.toml that Flower reads. Then Flower's own commands start the server and the nodes; docs/deployment.md shows
them. The options are those of fit.

  lightning-fedssl deploy init my_app --config semifl_digits.yaml
  lightning-fedssl deploy init my_app --config semifl_digits.yaml --data.num_clients 3 --trainer.clients_per_round 3
"""

MISSING = 'Flower is not installed; run: pip install "lightning-fedssl[flower]", or in a checkout ".[flower]"'

_APP = "fedssl_app"

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{method} on nodes of their own, with lightning-fedssl {version}"
license = "Apache-2.0"
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
resume = true           # go on from the last checkpoint if the last run has rounds left
"""

_MODULE = '''\
"""The {side}App of this app."""

from pathlib import Path

from lightning_fedssl.cli.deploy import {function}

app = {function}(Path(__file__).with_name("config.yaml"))
'''


def main(arguments: Sequence[str]) -> int:
    """Run ``deploy``.

    Args:
        arguments: What follows the command's name.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If the configuration cannot be deployed.
        FileExistsError: If the folder has files.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-fedssl deploy", usage=USAGE, description=DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("action", choices=["init"], help="Write the app.")
    parser.add_argument("folder", type=Path, help="The folder of the app; it is made.")
    options, of_fit = parser.parse_known_args(list(arguments))
    files = write_app(options.folder, of_fit)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for path in files:
        console.print(f"written: {path}")
    console.print(f"next: flwr run {options.folder} SUPERLINK --stream (docs/deployment.md has all the commands)")
    if find_spec("flwr") is None:
        console.print(f"note: {MISSING}")
    return 0


def write_app(folder: Path, options: Sequence[str]) -> list[Path]:
    """Write an app.

    Args:
        folder: The folder; it is made.
        options: Options of ``fit``.

    Returns:
        The files.

    Raises:
        ValueError: If the method cannot be deployed.
        FileExistsError: If the folder has files.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} has files: give a new folder for the app")
    cli = _read(options)
    refuse_undeployable(cli.model)
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "app"
    app = folder / _APP
    app.mkdir(parents=True)
    texts = {
        folder / "pyproject.toml": _PYPROJECT.format(
            name=name, method=type(cli.model).__name__, version=__version__, app=_APP
        ),
        app / "__init__.py": f'"""A Flower app of lightning-fedssl {__version__}."""\n',
        app / "server_app.py": _MODULE.format(side="Server", function="server_app"),
        app / "client_app.py": _MODULE.format(side="Client", function="client_app"),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    cli.parser.save(cli.config, app / "config.yaml", skip_none=False, multifile=False)
    return [*texts, app / "config.yaml"]


def server_app(config: Path) -> ServerApp:
    """The ServerApp of a configuration, for the app that :func:`write_app` writes.

    Args:
        config: The file.
    """
    from lightning_fedssl.deployment.flower.server import make_server_app

    def make_parts(run_config: Mapping[str, Any]) -> Parts:
        cli = _read_app(config, run_config)
        return cli.trainer, cli.model, cli.datamodule  # type: ignore[return-value]

    return make_server_app(make_parts)


def client_app(config: Path) -> ClientApp:
    """The ClientApp of a configuration, for the app that :func:`write_app` writes.

    Args:
        config: The file.
    """
    from lightning_fedssl.deployment.flower.client import make_client_app

    def make_node(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> Node:
        root = [f"--data.root={node_config['data-root']}"] if "data-root" in node_config else []
        cli = _read_app(config, run_config, root)
        data = cli.datamodule
        clients = clients_of(node_config, data.num_clients)
        data.prepare_data()
        data.setup()
        folder = Path(str(node_config.get("state-dir", "fedssl-state")))
        return Node(cli.trainer, cli.model, data, PartitionOfDataSet(data, clients), folder)  # type: ignore[arg-type]

    return make_client_app(make_node)


def clients_of(node_config: Mapping[str, Any], num_clients: int) -> list[int]:
    """The clients of a node: ``clients="0,3"``, or those of ``partition-id`` among ``num-partitions`` nodes.

    Args:
        node_config: Flower's node configuration.
        num_clients: The number of all clients.

    Raises:
        ValueError: If neither is given, or they are no numbers.
    """
    if "clients" in node_config:
        try:
            return [int(part) for part in str(node_config["clients"]).split(",")]
        except ValueError as error:
            raise ValueError(
                f"the node's clients are {node_config['clients']!r}: give numbers with commas, as in clients='0,3'"
            ) from error
    if "partition-id" not in node_config:
        raise ValueError("the node does not know its clients: give --node-config 'clients=\"0,3\"' to flower-supernode")
    nodes = int(node_config.get("num-partitions", num_clients))
    return list(range(int(node_config["partition-id"]), num_clients, nodes))


def _read_app(config: Path, run_config: Mapping[str, Any], more: Sequence[str] = ()) -> FederatedCLI:
    return _read(["--config", str(config), *shlex.split(str(run_config.get("options", ""))), *more])


def _read(options: Sequence[str]) -> FederatedCLI:
    with quiet():
        return FederatedCLI(args=list(options), run=False)
