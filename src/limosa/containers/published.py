"""Ports of the machine that lead to a container, as words: "8080/tcp", "127.0.0.1:8080/tcp", "[::1]:5353/udp"."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from typing import NamedTuple

from limosa.containers.runtime import is_port

_WORD = re.compile(r"(?:([0-9.]{7,15}|\[[0-9a-fA-F:.]{2,45}\]):)?([0-9]{1,5})/(tcp|udp|sctp)", re.ASCII)
_KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}


class Published(NamedTuple):
    """One of them; ``address``: of the machine's, "" for all of them."""

    address: str
    port: int
    protocol: str

    @classmethod
    def of(cls, word: str) -> Published | None:
        """Return what a word says; None where it cannot be understood."""
        found = _WORD.fullmatch(word)
        if found is None or not is_port(found[2]):
            return None
        address = (found[1] or "").strip("[]")
        try:
            return cls(str(ipaddress.ip_address(address)) if address else "", int(found[2]), found[3])
        except ValueError:
            return None

    def __str__(self) -> str:
        where = f"[{self.address}]" if ":" in self.address else self.address
        return f"{where}:{self.port}/{self.protocol}" if where else f"{self.port}/{self.protocol}"

    def against(self) -> int:
        """Bind it as podman will, and close it again; 0, or the error number.

        Tables of the kernel would not tell whether what somebody has bound to all of IPv6 is IPv4's as well.
        """
        kind = _KINDS.get(self.protocol)
        if kind is None:  # podman binds nothing for it
            return 0
        try:
            with socket.socket(socket.AF_INET6 if ":" in self.address else socket.AF_INET, kind) as probe:
                if self.protocol == "tcp":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if ":" in self.address:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((self.address, self.port))
        except OSError as error:
            return error.errno or errno.EINVAL
        return 0
