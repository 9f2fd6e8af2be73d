"""Keys and values for the ranks of a job, on 127.0.0.1: what the agent keeps, and the ranks' side of it.

A line of JSON each way. ``get`` waits until the key is there; ``barrier`` until so many have come to it.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any


class Store:
    """The agent's side; ``port`` is where ranks come to."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._come: dict[str, int] = {}
        self._changed = threading.Condition()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw", encoding="utf-8") as file:
            for line in file:
                answer = self._answer(json.loads(line))
                file.write(json.dumps(answer) + "\n")
                file.flush()

    def _answer(self, asked: dict[str, Any]) -> Any:
        key = asked["key"]
        with self._changed:
            if asked["what"] == "set":
                self._values[key] = asked["value"]
                self._changed.notify_all()
            elif asked["what"] == "get":
                self._changed.wait_for(lambda: key in self._values)
            else:
                self._come[key] = self._come.get(key, 0) + 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._come[key] >= asked["value"])
            return self._values.get(key)


class Client:
    """A rank's side: one connection, kept as long as the rank lives."""

    def __init__(self, port: int):
        self._file = socket.create_connection(("127.0.0.1", port)).makefile("rw", encoding="utf-8")

    def _ask(self, what: str, key: str, value: Any = None) -> Any:
        self._file.write(json.dumps({"what": what, "key": key, "value": value}) + "\n")
        self._file.flush()
        return json.loads(self._file.readline())

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> Any:
        return self._ask("get", key)

    def barrier(self, key: str, n: int) -> None:
        self._ask("barrier", key, n)
