"""A SuperLink and SuperNodes as processes of this machine, with TLS: for a demonstration and for
tests.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path


class LocalFederation:
    """Flower's processes on this machine's loopback device; a context manager that ends them.

    Each process writes to a log file of its own in the folder.

    Args:
        folder: Where certificates, logs and Flower's own files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        write_certificates(self.folder)
        link = (
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.folder / "ca.crt"}"\n'
        )
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
        certificates = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.crt"}
        options = ["--host", "127.0.0.1", "--port", str(self.port)]
        options.append("--disable-runtime-dependency-installation")
        for key, name in certificates.items():
            options += [f"--ssl-{key}", str(self.folder / name)]
        # Without a database a SuperLink that restarts does not know the nodes that are connected.
        self.start(
            "server", "flower-superlink", *options, "--database", str(self.folder / "superlink.db")
        )
        while not _listens(self.port) and self.processes["server"].poll() is None:
            time.sleep(0.2)

    def start_node(self, name: str, node_config: str) -> None:
        """Start a SuperNode, which waits for the SuperLink.

        Args:
            name: The name of its log.
            node_config: Flower's node configuration, such as ``client=0``.
        """
        link = f"127.0.0.1:{self.port}"
        ca = str(self.folder / "ca.crt")
        options = ["--port", str(free_port()), "--node-config", node_config]
        self.start(
            name, "flower-supernode", "--root-certificates", ca, "--superlink", link, *options
        )

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


def write_certificates(folder: Path) -> None:
    """Write a certificate authority ``ca.crt`` and a certificate of it for this machine,
    ``server.pem``, with its key.

    They are valid for a day: for tests and demonstrations. The commands are those of
    docs/deployment.md.

    Args:
        folder: The folder.
    """
    (folder / "san.txt").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n", encoding="utf-8")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    for command in (
        f"req -x509 {key} -days 1 -subj /CN=demo -keyout ca.key -out ca.crt",
        f"req {key} -subj /CN=localhost -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 1 -extfile "
        "san.txt -out server.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)


def free_port() -> int:
    """A port of the loopback device that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
