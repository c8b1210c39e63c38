"""A SuperLink and SuperNodes as processes of this machine: for a demonstration and for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path


class LocalFederation:
    """Flower's processes on this machine's loopback device; a context manager that ends them.

    Nothing leaves the machine, so there are no certificates. Each process writes to a log file of
    its own in the folder.

    Args:
        folder: Where logs and Flower's own files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        link = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        text = f'[superlink]\ndefault = "local"\n[superlink.local]\n{link}'
        (self.folder / "home" / "config.toml").write_text(text, encoding="utf-8")
        # Flower starts its programs by name, so they must be in the path.
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }

    def __enter__(self) -> LocalFederation:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.processes):
            self.stop(name)

    def start_server(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        options = ["--insecure", "--host", "127.0.0.1", "--port", str(self.port)]
        options.append("--disable-runtime-dependency-installation")
        # Without a database a SuperLink that restarts does not know the nodes that are connected.
        options += ["--database", str(self.folder / "superlink.db")]
        self.start("server", "flower-superlink", *options)
        while not _listens(self.port) and self.processes["server"].poll() is None:
            time.sleep(0.2)

    def start_node(self, name: str, node_config: str) -> None:
        """Start a SuperNode, which waits for the SuperLink.

        Args:
            name: The name of its log.
            node_config: Flower's node configuration, such as ``client=0``.
        """
        link = f"127.0.0.1:{self.port}"
        own = ["--port", str(free_port()), "--node-config", node_config]
        self.start(name, "flower-supernode", "--insecure", "--superlink", link, *own)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process."""
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        return self.processes[name]

    def stop(self, name: str) -> None:
        """End a process, and wait until it has ended those that it started."""
        process = self.processes.pop(name)
        process.terminate()
        process.wait()

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / f"{name}.log"


def free_port() -> int:
    """A port of the loopback device that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
