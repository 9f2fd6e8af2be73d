"""Numbers and reasons in words, for the text output."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from limosa.terms import JobState

if TYPE_CHECKING:
    from limosa.errors import Reason
    from limosa.gpu import Driver

STATES: dict[str, str] = {JobState.CHECKPOINTED: "suspended", JobState.PARKED: "suspended (memory only)"}
"""What states are called in text that are called otherwise in JSON."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(text: Any, form: str = "") -> str:
    """Text that came from elsewhere (a command line, an image), so that it cannot drive the terminal.

    Args:
        text: the text; what is one line stays one.
        form: how a control character is written; as Python does where empty.
    """
    plain = str(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda m: form.format(ord(m[0])) if form else m[0].encode("unicode_escape").decode(), plain)


def size(number: float | None) -> str:
    """Bytes as people read them: 1.50 GiB."""
    if number is None:
        return "?"
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(value)) < 1024:  # as it is shown: no "1024 MiB" for what is nearly a GiB
            short = unit == "B" or abs(value) >= 9.995
            return f"{value:.0f} {unit}" if short else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def rate(number: float) -> str:
    """Bytes a second as people read them: 5.50 GiB/s."""
    return f"{number / (1 << 30):.2f} GiB/s"


def seconds(number: float | None) -> str:
    """Seconds as people read them."""
    if number is None:
        return "?"
    if number < 1:
        return f"{number * 1000:.0f} ms"
    if number < 120:
        return f"{number:.2f} s"
    return f"{number / 60:.1f} min"


def job(name: str, pid: int) -> str:
    """A job as sentences call it."""
    return f"{clean(name)} (process {pid})" if name else f"process {pid}"


def command_line(command: Sequence[str]) -> str:
    """A command line on one line."""
    return clean(" ".join(command))


def reason_lines(reasons: Iterable[Reason]) -> list[str]:
    """Refusals and warnings, each with its id and its way out."""
    lines = []
    for reason in reasons:
        lines.append(f"  {'refused' if reason.refuses else 'warning'} [{reason.id}]: {clean(reason.text)}")
        if reason.hint:
            lines.append(f"    → {clean(reason.hint)}")
        if reason.refuses and reason.forceable:
            lines.append(f"    → or --force={reason.id}, knowing that")
    return lines


def moves(gpu_map: Mapping[str, str], onto: Sequence[str], asked: Driver | None = None) -> str:
    """What a map changes for a job that has memory on ``onto`` afterwards: GPU 0 → GPU 1; "" where nothing.

    The rest of the map is the driver's: it wants a full permutation of what the job can open. ``asked``: see
    :func:`gpu_names`.
    """
    changed = {a: b for a, b in gpu_map.items() if a != b and b in onto}
    if not changed:
        return ""
    named = gpu_names(asked)
    away = "a GPU that is not here" if named else ""  # its UUID would say nothing to anybody
    return ", ".join(f"{named.get(a, away or clean(a))} → {named.get(b, clean(b))}" for a, b in changed.items())


def places(uuids: Sequence[str], asked: Driver | None = None) -> str:
    """GPUs by number, or by UUID where the numbers cannot be had: GPU 0, GPU 1."""
    named = gpu_names(asked) if uuids else {}
    return ", ".join(sorted(named.get(uuid, clean(uuid)) for uuid in uuids))


def gpu_names(asked: Driver | None = None) -> dict[str, str]:
    """UUID → GPU 0; empty where the numbers cannot be had.

    ``asked``: a worker that is up answers at once; NVML in this process takes 40 ms to begin with.
    """
    from limosa import gpu
    from limosa.errors import LimosaError

    try:
        return {g.uuid: f"GPU {g.index}" for g in (asked or gpu).inventory().gpus}
    except LimosaError:
        return {}


def age(then: str, now: datetime.datetime | None = None) -> str:
    """How long ago a time in RFC 3339 was: 40 s, 12 min, 5 h, 3 days; "?" where it is none."""
    try:
        now = now or datetime.datetime.now(datetime.timezone.utc)
        seconds = (now - datetime.datetime.fromisoformat(then.replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds // unit))} {word}"
    return f"{int(seconds // 86400)} days"
