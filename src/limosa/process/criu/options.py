"""What a run of CRIU may do, under the names that users of CRIU and podman know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from limosa.process.criu.program import Criu


class DumpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a dump may do; names as CRIU's.

    Attributes:
        leave_running: let the job run on afterwards.
        tcp_established: keep connected TCP sockets.
        tcp_close: dump connected TCP sockets as closed ones.
        shell_job: the job's terminal and session belong to a shell outside of it.
        file_locks: keep file locks.
        ghost_limit: bytes; how large an unlinked file that is still open may be (CRIU's own default is 1 MiB).
        link_remap: give unlinked files with another name left a name of their own.
        skip_in_flight: leave out TCP connections that the job has not accepted (always so with ``tcp_established``).
        network_lock: "nftables", "skip" or "iptables", where ``tcp_established``; None for what the trial found.
        ext_unix_sk: keep unix sockets whose other end is outside of the job.
        extra: further arguments for CRIU, as they are.
    """

    leave_running: bool = False
    tcp_established: bool = False
    tcp_close: bool = False
    shell_job: bool = False
    file_locks: bool = False
    ghost_limit: int | None = None
    link_remap: bool = False
    skip_in_flight: bool = False
    network_lock: str | None = None
    ext_unix_sk: bool = False
    extra: Sequence[str] = ()

    def arguments(self, criu: Criu) -> list[str]:
        """Return them as CRIU's arguments."""
        given = _flags(self, ("leave_running", "tcp_established", "tcp_close", "shell_job", "file_locks", "link_remap"))
        if self.ghost_limit is not None:
            given += ["--ghost-limit", str(self.ghost_limit)]
        if self.tcp_established or self.skip_in_flight:
            given += ["--skip-in-flight"]  # connections nobody has accepted yet; their clients connect again
        if self.tcp_established:
            # Only where there may be connections: to set up nftables costs as much as the dump of a small job.
            given += ["--network-lock", self.network_lock or criu.network_lock]
        return [*given, *(["--ext-unix-sk"] if self.ext_unix_sk else []), *self.extra]


class RestoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a restore may do; names as CRIU's.

    Attributes:
        tcp_established: bring connected TCP sockets back connected.
        tcp_close: bring them back closed.
        shell_job: take the caller's terminal and session (the caller must be in a terminal).
        file_locks: take the file locks again.
        cgroup: the control group for the job ("/sys/fs/cgroup/…" or as in ``/proc/PID/cgroup``); None for the caller's.
        ext_unix_sk: as in the dump.
        inherit: descriptors of ours that the job gets instead of what CRIU calls so ("socket:[123]").
        extra: further arguments for CRIU, as they are.
    """

    tcp_established: bool = False
    tcp_close: bool = False
    shell_job: bool = False
    file_locks: bool = False
    cgroup: str | None = None
    ext_unix_sk: bool = False
    inherit: Mapping[str, int] = {}
    extra: Sequence[str] = ()

    def arguments(self) -> list[str]:
        """Return them as CRIU's arguments."""
        given = _flags(self, ("tcp_established", "tcp_close", "shell_job", "file_locks"))
        for name, fd in self.inherit.items():
            given += ["--inherit-fd", f"fd[{fd}]:{name}"]
        return [*given, *(["--ext-unix-sk"] if self.ext_unix_sk else []), *self.extra]


def _flags(options: msgspec.Struct, names: Sequence[str]) -> list[str]:
    return ["--" + name.replace("_", "-") for name in names if getattr(options, name)]
