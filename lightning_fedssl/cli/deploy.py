"""The ``deploy`` command: writes a Flower app that trains a configuration on
machines of their own.
"""

from __future__ import annotations

import argparse
import re
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.cli.log_output import show_log
from lightning_fedssl.cli.messages import ScriptParser
from lightning_fedssl.data.class_shares import read_row
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.partition.base import FromFile
from lightning_fedssl.data.partition.federated_split import FederatedSplit
from lightning_fedssl.deployment import Settings
from lightning_fedssl.deployment.obstacles import (
    refuse_callbacks,
    refuse_other_tasks,
    refuse_undeployable,
)
from lightning_fedssl.deployment.own_data import OwnData, ServerData, module_of_spec, save_spec
from lightning_fedssl.storage.optional import optional
from lightning_fedssl.trainer.setup import refuse_other_task
from lightning_fedssl.version import __version__

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    from lightning_fedssl.deployment.node import Node
    from lightning_fedssl.deployment.server import Parts

DESCRIPTION = """\
init writes a Flower app into a new folder: the configuration with every default filled in, a
ServerApp, a ClientApp and the pyproject.toml that Flower reads. Then Flower's own commands start
the server and the nodes; docs/deployment.md shows them. The options are those of fit.

With --own_data every node has data of its own, which are nowhere else, and data.dataset is what
the server has: its labelled and its test images. Without, every node loads the data set and uses
its client's part of the partition.

  lightning-fedssl deploy init my_app --config semifl_digits.yaml --data.num_clients 3 \\
      --trainer.clients_per_round 3

demo trains SemiFL on the handwritten digits with a server and three nodes, as processes of this
machine with TLS.
"""

DEMO = (
    "--config=semifl_digits.yaml",
    "--data.num_clients=3",
    "--trainer.clients_per_round=3",
    "--trainer.max_rounds=3",
    "--trainer.callbacks=[]",
    "--model.server_epochs=20",
    "--model.client_epochs=2",
)
"""The options of the demonstration: few rounds, as each message costs the start of a process."""

_APP = "fedssl_app"
_SPEC = "data.json"
_PARTITION = "partition.json"
"""The package of an app; in it what a node must know before it reads its own data, and the file of
a partition."""

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
min-clients = 1         # clients that must be connected before a later round, and must answer in it
round-deadline = 600    # seconds that clients have for an answer; after that they miss the round
connect-timeout = 3600  # seconds that the server waits for clients before it gives up
# bind-clients: true where nodes have keys; a client belongs to the first node that names it
bind-clients = false
resume = true           # resume the last run unless it has finished; false: begin a new one
"""

_MODULE = '''\
"""The {side}App of this app."""

from pathlib import Path

from lightning_fedssl.cli.deploy import {function}

app = {function}(Path(__file__).with_name("config.yaml"))
'''


def main(arguments: Sequence[str]) -> int:
    """Write an app, or run the demonstration.

    Args:
        arguments: The action, a new folder, and options.

    Returns:
        The exit code.
    """
    parser = ScriptParser(
        prog="lightning-fedssl deploy", description=DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("action", choices=["init", "demo"], help="See above.")
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="The folder to write; it is made."
    )
    parser.add_argument("--own_data", action="store_true", help="Every node has data of its own.")
    options, of_fit = parser.parse_known_args(list(arguments))
    if options.folder.suffix in (".yaml", ".yml"):  # of an option, as in: init --config FILE
        parser.error(f"FOLDER is missing: deploy {options.action} FOLDER, and then the options")
    if options.action == "demo":
        return run_demo(options.folder)
    write_app(options.folder, of_fit, options.own_data)
    app = shlex.quote(str(options.folder))
    print(
        f"written: {app}\nnext: flwr run {app} SUPERLINK --stream (docs/deployment.md has all the "
        "commands)"
    )
    return 0


def run_demo(folder: Path) -> int:
    """Train with a server and three nodes, as processes of this machine; print the server's log.

    Args:
        folder: A new folder, for the app, the logs and the run.

    Returns:
        The exit code: 0 if the run has finished.
    """
    optional("flwr")
    from lightning_fedssl.deployment.demo import LocalFederation

    write_app(folder / "app", DEMO)
    with LocalFederation(folder) as federation:
        federation.start_server()
        for client in range(3):
            federation.start_node(f"node-{client}", f"client={client}")
        run = federation.start(
            "run", "flwr", "run", str(folder.resolve() / "app"), "local", "--stream"
        )
        with federation.log("run").open(encoding="utf-8", errors="replace") as log:
            while run.poll() is None:
                time.sleep(0.2)
                print(log.read(), end="", flush=True)
    text = federation.log("run").read_text(encoding="utf-8", errors="replace")
    print(f"the logs of server and nodes, and the run, are in {folder}")
    return 0 if re.search(r"^test/accuracy \d", text, re.MULTILINE) else 1


def write_app(folder: Path, options: Sequence[str], own_data: bool = False) -> None:
    """Write an app.

    Args:
        folder: The folder; it is made.
        options: Options of ``fit``.
        own_data: Every node has data of its own.

    Raises:
        ValueError: If the method or a callback cannot be deployed.
        FileExistsError: If the folder has files.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} has files: give a new folder for the app")
    cli = _read(options)
    refuse_undeployable(cli.model)
    refuse_callbacks(cli.trainer.callbacks)  # type: ignore[attr-defined]
    refuse_other_task(cli.model, cli.datamodule.task)
    if own_data:
        refuse_other_tasks(cli.datamodule.task)
    if own_data and cli.datamodule.backbone is not None and cli.datamodule.normalize:
        raise ValueError(
            "data.normalize: a node with data of its own does not know mean and deviation of all "
            "features of data.backbone: give data.normalize false"
        )
    rule = None if own_data else cli.datamodule.partition
    split = FederatedSplit.load(rule.path) if isinstance(rule, FromFile) else None
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "app"
    method = type(cli.model).__name__
    app = folder / _APP
    app.mkdir(parents=True)
    project = _PYPROJECT.format(name=name, method=method, version=__version__, app=_APP)
    for path, text in {
        folder / "pyproject.toml": project,
        app / "__init__.py": f'"""A Flower app of lightning-fedssl {__version__}."""\n',
        app / "server_app.py": _MODULE.format(side="Server", function="server_app"),
        app / "client_app.py": _MODULE.format(side="Client", function="client_app"),
    }.items():
        path.write_text(text, encoding="utf-8")
    cli.parser.save(cli.config, app / "config.yaml", skip_none=False, multifile=False)
    if own_data:
        save_spec(cli.datamodule.spec, app / _SPEC)
    if split is not None:
        split.save(app / _PARTITION)


def server_app(config: Path) -> ServerApp:
    """The ServerApp of a configuration, for the app that :func:`write_app` writes.

    Args:
        config: The file.
    """
    from lightning_fedssl.deployment.server import make_server_app

    return make_server_app(partial(make_parts, config))


def client_app(config: Path, mods: list[Any] | None = None) -> ClientApp:
    """The ClientApp of a configuration, for the app that :func:`write_app` writes.

    Args:
        config: The file.
        mods: Flower's modifiers of messages.
    """
    from lightning_fedssl.deployment.node import make_client_app

    return make_client_app(partial(make_node, config), mods)


def make_parts(config: Path, run_config: Settings) -> Parts:
    """Trainer, algorithm and data of the server.

    Args:
        config: The app's configuration.
        run_config: Flower's run configuration.
    """
    own_data = config.with_name(_SPEC).is_file()
    cli = _read_app(config, run_config, ServerData if own_data else FederatedDataModule)
    return cli.trainer, cli.model, cli.datamodule  # type: ignore[return-value]


def make_node(config: Path, node_config: Settings, run_config: Settings) -> Node:
    """The node that trains the client of this machine.

    Args:
        config: The app's configuration.
        node_config: Flower's node configuration: ``client``, ``data`` with data of its own,
            ``data-root`` without, ``class-shares`` as ``{yes: 0.2, no: 0.8}``, ``state-dir`` and
            ``send-scalars``.
        run_config: Flower's run configuration.

    Raises:
        ValueError: If there is no such client.
    """
    from lightning_fedssl.deployment.node import Node, NodeData, PartOfDataSet

    spec = config.with_name(_SPEC)
    own_data = spec.is_file()
    made = FederatedDataModule
    options = []
    if "data-root" in node_config:
        options.append(f"--data.root={node_config['data-root']}")
    if own_data:
        made = module_of_spec(spec)
        options.append("--data.dataset=described")  # by class it would read the server's file
    cli = _read_app(config, run_config, made, options)
    data = cli.datamodule
    client = int(node_config.get("client", -1))
    if not 0 <= client < data.num_clients or (own_data and "data" not in node_config):
        raise ValueError(
            f"the node's configuration is {dict(node_config)}: give --node-config 'client=0' with "
            f"a number below {data.num_clients} to flower-supernode, and in an app with --own_data "
            "also "
            'data="FOLDER"'
        )
    own: NodeData
    if own_data:
        own = OwnData(data, Path(node_config["data"]), client, cli.model)
    else:
        data.prepare_data()
        data.setup()
        own = PartOfDataSet(data, client)
    folder = Path(str(node_config.get("state-dir", "fedssl-state")))
    send_scalars = bool(node_config.get("send-scalars", True))
    shares = None
    if "class-shares" in node_config:
        if data.class_shares is None:
            raise ValueError(
                "class-shares: the app's data.class_shares is not {of: nodes}, so its method may "
                "not use what this node states; leave it out"
            )
        shares = read_row(yaml.safe_load(str(node_config["class-shares"])), data.class_names)
    trainer: Any = cli.trainer
    algorithm: Any = cli.model
    return Node(
        trainer.run.settings, trainer.fabric, algorithm, data, own, folder, send_scalars, shares
    )


def _read_app(
    config: Path,
    run_config: Settings,
    datamodule_class: type[FederatedDataModule],
    more: Sequence[str] = (),
) -> FederatedCLI:
    show_log()
    options = [f"--config={config}"]
    copy = config.with_name(_PARTITION)
    if copy.is_file():
        options.append(f"--data.partition.path={copy}")
    options += shlex.split(str(run_config.get("options", "")))
    return _read([*options, *more], datamodule_class)


def _read(
    options: Sequence[str], datamodule_class: type[FederatedDataModule] = FederatedDataModule
) -> FederatedCLI:
    with quiet():
        return FederatedCLI(args=list(options), run=False, datamodule_class=datamodule_class)
