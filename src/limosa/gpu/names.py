"""Names: a process's checkpoint states, a lock's outcomes, and the forms in which GPUs are named.

States are named as in ``cuda.core.checkpoint`` and as ``CUprocessState`` numbers them; a number that a newer driver
reports is kept, not refused.
"""

from __future__ import annotations

import re

from limosa.terms import Term

_UUID = re.compile(r"^(?:GPU-)?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})$", re.I)
_PCI = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?$", re.I)


class State(Term):
    """The checkpoint state of a process as the driver tells it (``CUprocessState``).

    A member is also its text (``State.RUNNING == "running"``) and travels as that text in JSON. A number that is not
    known here becomes a member of its own whose text is the number (``State.from_code(7) == "7"``).
    """

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    CHECKPOINTING = "checkpointing"
    """Newer drivers: the memory is mapped into the controller, the operation is not complete."""
    RESTORING = "restoring"

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        if not (isinstance(value, str) and value.isascii() and value.isdigit()):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = f"UNKNOWN_{value}"
        unknown._value_ = value
        return unknown

    @classmethod
    def from_code(cls, code: int) -> State:
        """Return the state of a ``CUprocessState`` number.

        Args:
            code: 0 running, 1 locked, 2 checkpointed, 3 failed, 4 checkpointing, 5 restoring; any other is kept.
        """
        return _BY_CODE[code] if 0 <= code < len(_BY_CODE) else cls(str(code))

    @property
    def code(self) -> int:
        """The driver's number."""
        return _BY_CODE.index(self) if self in _BY_CODE else int(self.value)

    @property
    def known(self) -> bool:
        """False for a number that Limosa has no word for."""
        return self in _BY_CODE


_BY_CODE = (State.RUNNING, State.LOCKED, State.CHECKPOINTED, State.FAILED, State.CHECKPOINTING, State.RESTORING)


class LockResult(Term):
    """What became of an attempt to lock a process."""

    LOCKED = "locked"
    TIMED_OUT = "timed_out"


def normal_uuid(text: str) -> str | None:
    """Return ``GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`` in lower case, or None where the text is no GPU's UUID.

    Args:
        text: with or without ``GPU-`` and hyphens, in either case.
    """
    match = _UUID.match(text.strip())
    return "GPU-" + "-".join(match.groups()).lower() if match else None


def uuid_bytes(uuid: str) -> bytes:
    """Return the 16 bytes of a UUID in any form that :func:`normal_uuid` takes.

    Raises:
        ValueError: it is none.
    """
    normal = normal_uuid(uuid)
    if normal is None:
        raise ValueError(f"{uuid!r} is not a GPU's UUID")
    return bytes.fromhex(normal[4:].replace("-", ""))


def uuid_of_bytes(raw: bytes) -> str:
    """Return the UUID text of 16 bytes (``CUuuid.bytes``).

    Raises:
        ValueError: these are not 16 bytes.
    """
    if len(raw) != 16:
        raise ValueError(f"a UUID has 16 bytes, not {len(raw)}")
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def normal_pci(text: str) -> str | None:
    """Return a PCI bus id as ``DDDDDDDD:BB:DD.F`` in lower case, or None where the text is none.

    Args:
        text: NVML's (``00000000:0F:00.0``), lspci's (``0f:00.0``) or sysfs's form (``0000:0f:00.0``).
    """
    match = _PCI.match(text.strip())
    if not match:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):08x}:{bus.lower()}:{device.lower()}.{function or '0'}"
