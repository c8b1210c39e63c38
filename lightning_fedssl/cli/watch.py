"""The command ``watch``: serves the page of a run or a comparison on this machine alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lightning_fedssl.cli.messages import ScriptParser
from lightning_fedssl.report import FILE_NAME

HOST = "127.0.0.1"

DESCRIPTION = f"""\
Serves the page {FILE_NAME} of a run, which shows the run as it goes on, on {HOST}. RUN is the
folder of a run or of a comparison, or a default_root_dir, of which the newest run is taken:

  lightning-fedssl watch runs/lightning_logs/version_3

From another machine: ssh -L 8000:{HOST}:8000 MACHINE, then http://localhost:8000 in the browser.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``watch`` until it is interrupted.

    Args:
        arguments: What follows the command's name.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If there is no page.
        OSError: If the port is taken.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    parser = ScriptParser(
        "lightning-fedssl watch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="The folder.")
    parser.add_argument("--port", type=int, default=8000, help="The port; 0 takes a free one.")
    options = parser.parse_args(list(arguments))
    page = find(Path(options.run))
    with serve(page, options.port) as server:
        print(f"{page}: http://{HOST}:{server.server_port}/ (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def find(folder: Path) -> Path:
    """The page of a folder, or the newest page of the runs below it.

    Raises:
        ValueError: If there is none.
    """
    pages = [folder / FILE_NAME, *folder.glob(f"lightning_logs/*/{FILE_NAME}")]
    found = [page for page in pages if page.is_file()]
    if not found:
        raise ValueError(
            f"watch: there is no {FILE_NAME} in {folder}: give the folder of a run, which fit "
            "prints, or wait until the run has begun"
        )
    return max(found, key=lambda page: page.stat().st_mtime)


def serve(page: Path, port: int) -> ThreadingHTTPServer:
    """A server of the page, and of the pages below its folder.

    Args:
        page: The file.
        port: The port; 0 for a free one.

    Raises:
        OSError: If the port is taken.
    """
    return ThreadingHTTPServer((HOST, port), partial(_Pages, directory=str(page.parent)))


class _Pages(SimpleHTTPRequestHandler):
    """Sends pages, and no other file of the folder, to browsers that ask this machine by its name.

    A page of another site cannot ask under its own name and read what is here.
    """

    def send_head(self) -> Any:
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            self.send_error(403)
            return None
        if self.path == "/":
            self.path = f"/{FILE_NAME}"
        if not self.path.partition("?")[0].endswith(".html"):
            self.send_error(404)
            return None
        return super().send_head()

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""
