"""The socket that a local server listens on."""

from __future__ import annotations

import socket

from kedge.core.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 is a free one. An address that cannot be had is an error that says so."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if isinstance(error, socket.gaierror):
            raise ConfigError(f"--host {host}: {error.strerror}; give an address of this machine") from error
        raise ConfigError(f"--port {port}: {error.strerror}; choose another, or leave it out for a free one") from error
    return listening
