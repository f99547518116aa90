"""Run the application: a socket of one's own, and uvicorn on it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

from coder_plugin.errors import CoderError


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address, so that a wrong one is noticed before the model is opened.

    Args:
        host: a name or an address of this machine.
        port: 0: any free one.

    Raises:
        CoderError: the port is in use or not allowed; no such address here.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise CoderError(f"--host {host}: no such address ({getattr(error, 'strerror', None) or error})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise CoderError(f"--port {port} is in use: choose another one, or --port 0 for any that is free") from error
        if error.errno == errno.EACCES:
            raise CoderError(f"--port {port} is not allowed to this user: choose one from 1024 on") from error
        raise CoderError(f"--host {host}: this machine does not have the address ({error.strerror})") from error
    return bound


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def address(bound: socket.socket, host: str) -> str:
    """The URL of a socket that was bound to ``host``, as a browser takes it."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}/"


def run(app: Any, bound: socket.socket, *, connections: int) -> None:
    """Answer requests until a signal ends the process, such as Ctrl-C (``KeyboardInterrupt``).

    Args:
        app: the application.
        bound: the socket.
        connections: open at once; requests on further ones are answered with 503.
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,  # the command's own
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=connections + 1,  # uvicorn's is the first number that it refuses
        timeout_keep_alive=30,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(config).run(sockets=[bound])
