"""What a restore by containerd leaves at work where it failed: a shim, the runc that it has started, and runc's note.

A new container of that id would be started by the old shim, with the CRIU that was lent to that; or runc would refuse
it for the note.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping

import msgspec

from limosa.containers import calls
from limosa.containers.runc_leftovers import unmount_root
from limosa.containers.runtime import check_name
from limosa.containers.state import OF_CONTAINERD
from limosa.errors import FailedUndone, LimosaError
from limosa.process.criu.lent import was_lent
from limosa.process.identity import Handle, Identity

_SECONDS = 10.0
_QUIET_SECONDS = 2.0  # a shim that containerd was asked for begins within
_TICK = 0.05
_SIGKILL = 9


class Leftovers(msgspec.Struct, frozen=True):
    """Those of a container whose task containerd does not know any more, or never knew."""

    namespace: str  # containerd's
    id: str
    operation: str = ""  # which was restoring it, if it did not come to its end
    ended: bool = False  # whether containerd has ended the task itself: then nobody else is to be ended

    def see_off(self, program: str, configured: Mapping[str, str]) -> None:
        """Wait until nobody works on the container and nothing is noted of it.

        A shim may still begin, by a request whose asker has died, and containerd never ends that one; or containerd may
        be clearing up after a shim that has died, by another one. A runc that died early has left a folder that no
        state is in yet.

        Args:
            program: runc, for a note that containerd does not take away.
            configured: its environment's part.

        Raises:
            FailedUndone: that note stays.
        """
        now = seen = busy = time.monotonic()
        end = now + _SECONDS
        ours = self.operation and not self.ended
        while now < end:
            at_work = list(self._at_work())
            for pid in at_work if ours else []:
                self._end(pid)
            busy = now if at_work else busy
            if at_work or self._noted():
                seen = now
            elif now - seen >= (_QUIET_SECONDS if ours else 0.0):
                return
            if self.operation and self.ended and now - busy >= _QUIET_SECONDS:
                break  # a runc that was killed has left it, and containerd never heard of that
            time.sleep(_TICK)
            now = time.monotonic()
        if self.operation and self._noted():
            check_name(self.namespace)  # containerd has checked both; runc removes whatever folder they name
            unmount_root(self._notes, check_name(self.id))
            argv = [program, "--root", self._notes, "delete", "--force", "--", check_name(self.id)]
            said = calls.call(argv, configured)
            if said.rc and self._noted():
                raise FailedUndone(what="runc delete", detail=said.why)

    @property
    def _notes(self) -> str:
        return f"{OF_CONTAINERD}/{self.namespace}"

    def _noted(self) -> bool:
        return os.path.lexists(f"{self._notes}/{self.id}")

    def _at_work(self) -> Iterator[int]:
        """The processes that are a shim started for it, or a runc that restores it."""
        shim = {"-namespace", self.namespace, "-id", self.id}
        runc = {"--root", self._notes, "restore", self.id}
        return (pid for pid, words in calls.command_lines() if shim <= set(words) or runc <= set(words))

    def _end(self, pid: int) -> None:
        """End one of them, if it has the CRIU on its PATH that was lent to that operation."""
        with contextlib.suppress(OSError, LimosaError), Handle(Identity.of(pid)) as handle:
            if was_lent(pid, self.operation):
                handle.signal(_SIGKILL)
