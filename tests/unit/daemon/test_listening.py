"""The daemon's unix socket: a dead one is replaced, a living one never, and a foreign one is not removed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from forkd.config import Settings
from forkd.daemon.config import DaemonConfig
from forkd.daemon.listening import listening
from forkd.specs.errors import Conflict, HostNotReady


def config(path: Path) -> DaemonConfig:
    return DaemonConfig(bind="none", socket=str(path))


def test_a_socket_on_which_somebody_listens_is_left_to_him(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(Settings(tmp_path / "a"), config(path)):
        with (
            pytest.raises(Conflict, match="another process listens on"),
            listening(Settings(tmp_path / "b"), config(path)),
        ):
            pass
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


def test_a_socket_whose_queue_is_full_has_somebody_who_listens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(path))
        server.listen(0)
        client.connect(str(path))
        with pytest.raises(Conflict, match="another process"), listening(Settings(tmp_path), config(path)):
            pass


def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
    with listening(Settings(tmp_path), config(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_took_our_place_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(Settings(tmp_path), config(path)), socket.socket(socket.AF_UNIX) as other:
        path.rename(tmp_path / "ours")
        other.bind(str(path))
    assert path.exists()


def test_a_place_where_no_socket_can_be_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = Path("/proc/x/y.sock")
    with (
        pytest.raises(HostNotReady, match=r"cannot listen on /proc/x/y.sock"),
        listening(Settings(tmp_path), config(path)),
    ):
        pass
