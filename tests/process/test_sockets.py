"""Sockets as ``/proc`` lists them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

from limosa.process.socket_entry import proc_unix


def test_a_name_with_line_breaks_hides_no_other_socket() -> None:
    """The kernel writes a name as it is, and anybody can choose one."""
    ours = f"limosa-test-{secrets.token_hex(4)}"
    strange = f"{ours}-\nffff: 00000002 00000000\r00010000 0001 01 x y\n\x85"
    with contextlib.ExitStack() as open_:
        listening = []
        for name in (strange, ours):
            one = open_.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(f"\0{name}")
            one.listen()
            listening.append(one)
        client = open_.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(f"\0{ours}")
        open_.enter_context(listening[1].accept()[0])
        found = sorted(one.state for one in proc_unix(os.getpid()) if one.local == f"@{ours}")
    assert found == ["established", "listen"]
