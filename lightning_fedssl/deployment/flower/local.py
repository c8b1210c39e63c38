"""A SuperLink and SuperNodes as processes of this machine, with TLS: for a demonstration and for tests."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_CONFIG = """\
[superlink]
default = "local"

[superlink.local]
address = "127.0.0.1:{port}"
root-certificates = "{certificate}"
"""


PRELOAD = (sys.executable, "-m", "lightning_fedssl", "deploy", "preload")
"""Precedes a command of Flower; see :mod:`.preload`."""


class LocalFederation:
    """Flower's processes on this machine's loopback device; a context manager that ends them.

    Each process writes to a log file of its own in the folder.

    Args:
        folder: Where certificates, logs and Flower's own files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        write_certificates(self.folder)
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        text = _CONFIG.format(port=self.port, certificate=self.folder / "ca.crt")
        (home / "config.toml").write_text(text, encoding="utf-8")
        # Flower starts its programs by name, so they must be in the path.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {
            **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path,
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds; 1 if left out
        }  # fmt: skip

    def __enter__(self) -> LocalFederation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.processes):
            self.stop(name)

    def start_server(self, preload: bool = False) -> None:
        """Start the SuperLink, and wait until it listens.

        Args:
            preload: Load PyTorch once for all runs; see :mod:`.preload`.

        Raises:
            RuntimeError: If it ends.
        """
        certificates = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "ca.crt"}
        options = [part for key, name in certificates.items() for part in (f"--ssl-{key}", str(self.folder / name))]
        options += ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        # Without a database a SuperLink that restarts does not know the nodes that are connected.
        options += ["--database", str(self.folder / "superlink.db")]
        self._start("server", *(PRELOAD if preload else ()), "flower-superlink", *options)
        while not _listens(self.port):
            if self.processes["server"].poll() is not None:
                raise RuntimeError(f"the SuperLink has ended; see {self.log('server')}")
            time.sleep(0.2)

    def start_node(
        self, name: str, node_config: Mapping[str, str], preload: bool = True, port: int | None = None
    ) -> None:
        """Start a SuperNode, which waits for the SuperLink.

        Args:
            name: The name of its log.
            node_config: Flower's node configuration, such as ``{"clients": "0,3"}``.
            preload: Load PyTorch once for all messages; see :mod:`.preload`.
            port: The port of the SuperLink or of a proxy of it; that of :meth:`start_server` if left out.
        """
        config = " ".join(f'{key}="{value}"' for key, value in node_config.items())
        self._start(
            name, *(PRELOAD if preload else ()), "flower-supernode", "--root-certificates", str(self.folder / "ca.crt"),
            "--superlink", f"127.0.0.1:{port or self.port}", "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def submit(self, app: Path, run_config: Mapping[str, str | int | bool], name: str = "run") -> None:
        """Start a run with ``flwr run``, whose output is that of the ServerApp.

        Args:
            app: The folder of the app.
            run_config: Keys of the run configuration that differ from the app's.
            name: The name of its log.
        """
        config = " ".join(f"{key}={_toml(value)}" for key, value in run_config.items())
        self._start(name, "flwr", "run", str(app), "local", "--stream", *(["--run-config", config] if config else []))

    def follow(self, name: str) -> Iterator[str]:
        """The lines of a process's log, until it ends."""
        with self.log(name).open(encoding="utf-8", errors="replace") as log:
            while True:
                ended = self.processes[name].poll() is not None
                yield from log
                if ended:
                    return
                time.sleep(0.2)

    def stop(self, name: str) -> None:
        """End a process and those that it started; they get no time to finish."""
        process = self.processes.pop(name)
        for child in (*_descendants(process.pid), process.pid):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / f"{name}.log"

    def _start(self, name: str, *command: str) -> None:
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )


def _descendants(process: int) -> Sequence[int]:
    """The processes that a process has started, and theirs."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (*_descendants(child), child)]


def write_certificates(folder: Path) -> None:
    """Write a certificate authority ``ca.crt`` and a certificate of it for this machine, ``server.pem``, with its key.

    They are valid for a day: for tests and demonstrations.

    Args:
        folder: The folder.
    """
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lightning-fedssl demo")])
    local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    ca = _builder(name, name, authority).add_extension(constraints, critical=True).sign(authority, hashes.SHA256())
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    alternatives = x509.SubjectAlternativeName(local)
    server = _builder(own, name, key).add_extension(alternatives, critical=False).sign(authority, hashes.SHA256())
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (folder / "server.key").chmod(0o600)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(minutes=5)).not_valid_after(
        now + datetime.timedelta(days=1)
    )


def _toml(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, int) else f'"{value}"'


def free_port() -> int:
    """A port of the loopback device that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
