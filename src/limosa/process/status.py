"""What ``/proc/PID/status`` says (proc_pid_status(5)): the one place that reads it."""

from __future__ import annotations

from limosa.process.slurp import slurp


def status_of(pid: int | str) -> dict[str, list[str]]:
    """Return the words behind each name of a process's status.

    Args:
        pid: the process, or a folder below ``/proc`` (a thread's, say).

    Raises:
        OSError: there is none, or it may not be looked at.
    """
    folder = f"/proc/{pid}" if isinstance(pid, int) else pid
    found = {}
    # A process's name may have any line end in it but this one, which the kernel escapes.
    for line in slurp(f"{folder}/status").decode(errors="replace").split("\n")[:-1]:
        name, _, value = line.partition(":")
        found[name] = value.split()
    return found


def uids_of(pid: int) -> tuple[int, ...]:
    """Return the uids that a process runs with: real, effective, saved, of the file system.

    Raises:
        OSError: it is gone.
    """
    return tuple(int(word) for word in _words(pid, "Uid"))


def tracer_of(pid: int) -> int:
    """Return which process traces it; 0: none.

    Raises:
        OSError: it is gone.
    """
    return int(_words(pid, "TracerPid")[0])


def effective_capabilities(pid: int | str = "/proc/self") -> int:
    """Return effective capabilities, ours if nobody is named, as a bit mask (capabilities(7))."""
    return int(status_of(pid)["CapEff"][0], 16)


def _words(pid: int, name: str) -> list[str]:
    found = status_of(pid)
    if name not in found:  # it was read while it went
        raise ProcessLookupError(pid)
    return found[name]
