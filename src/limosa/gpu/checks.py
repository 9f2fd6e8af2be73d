"""Checks before the driver is called: pids, time-outs, maps."""

from __future__ import annotations

from collections.abc import Mapping

from limosa.errors import HeldByImport, InvalidArgument, InvalidMap, NoSuchProcess, NotAProcess
from limosa.gpu.names import normal_uuid, uuid_bytes

IMPORT_SIGN = b"/memfd:limosa-imported (deleted)"
"""A mapping that the library of ``limosa run`` has while such memory is there (``native/shim/bulk.h``)."""


def check_process(pid: int) -> int:
    """Return the pid if it is a process: the driver takes a thread's id for a process as well.

    Raises:
        InvalidArgument: not a whole number, or not positive.
        NoSuchProcess: there is none.
        NotAProcess: it is a thread.
    """
    pid = check_pid(pid)
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    if int(line.split()[1]) != pid:
                        raise NotAProcess(pid=pid, tgid=int(line.split()[1]))
                    return pid
    except (FileNotFoundError, ProcessLookupError):
        pass
    raise NoSuchProcess(pid=pid)


def check_imports(pid: int) -> None:
    """Do nothing unless a process has memory that the driver could save and not restore; its library says so.

    A process that says so falsely keeps nobody but itself from being checkpointed here.

    Raises:
        HeldByImport: it has.
    """
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            if not any(line.rstrip().endswith(IMPORT_SIGN) for line in file):
                return
    except OSError:
        return  # the driver says what it is
    raise HeldByImport(
        call="cuCheckpointProcessCheckpoint",
        pid=pid,
        code=801,
        result="CUDA_ERROR_NOT_SUPPORTED",
        meaning="its memory was made by another process (it has been moved): the driver could not restore it",
        hint=f"limosa suspend {pid}, limosa checkpoint {pid}: they put that memory aside first",
    )


def check_pid(pid: int) -> int:
    """Return the pid if it has the form of one.

    Raises:
        InvalidArgument: not a whole number, or not positive.
    """
    if isinstance(pid, bool) or not isinstance(pid, int) or not 0 < pid <= 0x7FFFFFFF:
        raise InvalidArgument(detail=f"{pid!r} is not a process id")
    return pid


def check_timeout(timeout_ms: int) -> int:
    """Return the time-out if it is one.

    Raises:
        InvalidArgument: not a whole number of milliseconds, negative, or more than 32 bits.
    """
    if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int) or not 0 <= timeout_ms <= 0xFFFFFFFF:
        raise InvalidArgument(detail=f"{timeout_ms!r} is not a time-out in milliseconds (0 waits for ever)")
    return timeout_ms


def check_pairs(mapping: Mapping[str, str] | None) -> list[tuple[bytes, bytes]] | None:
    """Return the pairs of a map as UUID bytes, None for None or an empty map.

    Raises:
        InvalidMap: it is no mapping of UUIDs, or two sources share a destination or are one GPU twice.
    """
    if mapping is None:
        return None
    if not isinstance(mapping, Mapping):
        raise InvalidMap(detail="a GPU map must be a mapping from GPU to GPU")
    sources: set[str] = set()
    destinations: set[str] = set()
    pairs = []
    for old, new in mapping.items():
        source, destination = normal_uuid(str(old)), normal_uuid(str(new))
        if source is None or destination is None:
            raise InvalidMap(detail=f"{(old if source is None else new)!r} is not a GPU's UUID")
        if source in sources or destination in destinations:
            raise InvalidMap(detail=f"the map names {source if source in sources else destination} twice on one side")
        sources.add(source)
        destinations.add(destination)
        pairs.append((uuid_bytes(source), uuid_bytes(destination)))
    return pairs or None
