"""The command ``watch``."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest

from lightning_fedssl.cli import main
from lightning_fedssl.cli.watch import find, serve


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of a server of the newest run below a folder."""
    for number in (2, 10):
        folder = tmp_path / f"lightning_logs/version_{number}"
        folder.mkdir(parents=True)
        (folder / "report.html").write_text(f"run {number}")
    (folder / "secret.ckpt").write_text("weights")
    with serve(find(tmp_path), 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/", "", 200),
        ("/report.html", "localhost", 200),
        ("/secret.ckpt", "", 404),
        ("/../", "", 404),
        ("/", "a.b", 403),
    ],
)
def test_the_page_of_the_newest_run_is_served_and_nothing_else(port: int, path: str, host: str, status: int) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    assert answer.status == status
    assert (answer.read() == b"run 10") == (status == 200)


def test_a_folder_without_a_page_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert f"there is no report.html in {tmp_path}" in capsys.readouterr().err
