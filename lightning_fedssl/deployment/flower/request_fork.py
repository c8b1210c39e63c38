"""A script that Flower starts instead of ``flwr-clientapp`` or ``flwr-serverapp``; see :mod:`.preload`.

It imports the standard library alone, so that it starts quickly.
"""

import json
import os
import socket
import sys


def request_fork(address: str, program: str, arguments: list[str]) -> None:
    """Let the preloaded process run a program with the folder, environment and output of this process.

    Args:
        address: The socket of the preloaded process.
        program: The path of the program, which runs here if the preloaded process has ended.
        arguments: The arguments of the program.
    """
    request = {"program": program, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address)
            socket.send_fds(connection, [b"\0"], [sys.stdout.fileno(), sys.stderr.fileno()])
            connection.sendall(json.dumps(request).encode())
        except OSError:
            os.execv(program, [program, *arguments])


if __name__ == "__main__":
    request_fork(sys.argv[1], sys.argv[2], sys.argv[3:])
