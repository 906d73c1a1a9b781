"""What the server sets up before it serves."""

from __future__ import annotations

import socket

import pytest

from rljob_service.server import lifecycle


def test_clients_whose_node_has_died_are_noticed() -> None:
    with lifecycle._bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


@pytest.mark.parametrize(("open_files", "slots", "expected"), [(20_000, 16, 19_744), (256, 16, 128), (1024, 4096, 512)])
def test_connections_leave_open_files_for_workers(open_files: int, slots: int, expected: int) -> None:
    assert lifecycle._max_connections(open_files, slots) == expected
