"""Finding a CRIU that works here: what the caller names, the setting, the system's, the private folder's.

Each must pass the trial. The answer is kept in the user's cache folder, under a name made of all that it depends on:
kernel, build, user, capabilities. A kept answer counts only if nobody else could have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import resource
import stat
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec

from limosa import start
from limosa.errors import CriuNotPermitted, NoWorkingCriu
from limosa.process import settings
from limosa.process.criu import fetch
from limosa.process.criu.program import Criu, build_identity, from_folder, from_program, system_program
from limosa.process.criu.trial import TrialResult, missing_right, trial
from limosa.process.status import effective_capabilities
from limosa.structs import ready

_MOST_FILES = 2000
SKIP_KEPT = 3600.0  # that connections cannot be shut meanwhile: one disturbed try may have said so
NO_KEPT = 60.0  # seconds that a "does not work" is kept: its cause may be mended without a trace in the key
_begun: Future[Criu] | None = None
ROOT_CACHE = Path("/var/cache")  # for root where its home is another user's (sudo)


class _Kept(msgspec.Struct, frozen=True):
    """A kept answer: to which question, since when (seconds since 1970), and what."""

    key: str
    since: float
    result: TrialResult


def find(explicit: str | None = None, *, use_cache: bool = True) -> Criu:
    """Return a CRIU that works here.

    Args:
        explicit: a program, or a private folder; then no other is looked at.
        use_cache: take a kept answer where there is one.

    Returns:
        The first that passes the trial, of: ``explicit``; else the setting ``criu``; else the system's, then the
        private folders (``docs/criu.md``).

    Raises:
        NoWorkingCriu: none does; says of each why.
        CriuNotPermitted: none can: the caller lacks the right.
        UsageError: a settings file is broken.
    """
    global _begun
    if explicit is None and use_cache and _begun is not None:
        begun, _begun = _begun, None
        return begun.result()
    return _find(explicit, use_cache=use_cache)


def _find(explicit: str | None = None, *, use_cache: bool = True) -> Criu:
    reasons: list[str] = []
    permitted = True
    for name, place in _candidates(explicit):
        try:
            _check_owner(place)
            criu = from_folder(place) if place.is_dir() else from_program(str(place))
        except NoWorkingCriu as error:
            reasons.append(f"{name}: {error.fields.get('detail', error.message)}")
            continue
        result = tried(criu, use_cache=use_cache)
        if result.ok:
            return msgspec.structs.replace(criu, network_lock=result.network_lock)
        permitted = permitted and result.permitted
        reasons.append(f"{name} ({criu.version}): {result.reason}")
        if not result.permitted:
            break  # it is not about this CRIU
    if not reasons:
        reasons = ["none is installed, and there is no private folder"]
    lacks = missing_right(effective_capabilities(), os.geteuid())
    if lacks or not permitted:  # no CRIU would pass: what is missing is the right, not the program
        root = os.geteuid() == 0
        hint = "give this container CAP_SYS_ADMIN and CAP_SYS_PTRACE (docker run --cap-add)" if root else "use sudo"
        raise CriuNotPermitted(detail=lacks or "; ".join(reasons), hint=hint)
    raise NoWorkingCriu(detail="; ".join(reasons))


def warm() -> None:
    """Begin to look for a CRIU without waiting for it: it has to be started once to be asked which it is.

    Not one that somebody names: that is started once everything else is found to be in order. The next
    :func:`find` says what was found, or what is wrong.
    """
    global _begun
    found: Future[Criu] = Future()
    _begun = found

    def look() -> None:
        try:
            found.set_result(_find())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=look, name="limosa-criu", daemon=True).start()


def forget() -> None:
    """Leave what :func:`warm` has begun: the next one is looked for anew."""
    global _begun
    _begun = None


def _candidates(explicit: str | None) -> list[tuple[str, Path]]:
    """Return what to try, each with a name for messages."""
    chosen = explicit or settings.text("criu")
    if chosen:
        return [("--criu" if explicit else "the setting criu", Path(chosen).expanduser().absolute())]
    system = system_program("criu")
    found = [(f"the system's {system}", Path(system))] if system else []
    return found + [(f"the private folder {place}", place) for place in fetch.folders() if place.is_dir()]


def _check_owner(place: Path) -> None:
    """Refuse, before any of it runs, what anybody but root, us and the user who installed Limosa could have put there.

    Args:
        place: a program, or a private folder: then all that is started or loaded from there.
    """
    parts = [place]
    if place.is_dir():
        files = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
        parts += itertools.islice(files, _MOST_FILES)  # "/" has millions
        if len(parts) > _MOST_FILES:
            raise NoWorkingCriu(detail=f"{place} is no private folder of CRIU's: more than {_MOST_FILES} files")
    for path in parts:
        try:
            part = start.untrusted_part(path)
            owner = os.stat(part).st_uid if part else 0
        except OSError as error:
            raise NoWorkingCriu(detail=f"{path} cannot be looked at: {error.strerror}") from None
        if part is not None:
            raise NoWorkingCriu(detail=f"{part} may be written to by others (owner {owner})")


def tried(criu: Criu, *, use_cache: bool = True) -> TrialResult:
    """Return how the trial of this CRIU went, the kept answer where there is one.

    Args:
        criu: the one.
        use_cache: False for a new trial in any case (its answer is kept).
    """
    key = _key(criu)
    if use_cache and (kept := _read(key)) is not None:
        return kept
    result = trial(criu)
    _write(key, result)
    return result


USUAL_FILES = 1024


def _key(criu: Criu) -> str:
    """Return all that the answer depends on, as a text."""
    system = os.uname()
    with contextlib.suppress(OSError):
        return "\n".join(
            [
                "2",  # raise where the trial changes
                system.release,
                system.version,
                build_identity(criu),
                f"uid {os.geteuid()} caps {effective_capabilities():x}",
                # CRIU truncates a memory file in the process that it dumps, which has our limit.
                f"file size {resource.getrlimit(resource.RLIMIT_FSIZE)[0]}",
                # With few descriptors it finds no room for its own. More than usual is as good as usual.
                f"files {min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], USUAL_FILES)}",
                *(os.readlink(f"/proc/self/ns/{name}") for name in ("user", "net", "pid")),
            ]
        )
    return ""


def cache_folder() -> Path | None:
    """Return where answers are kept: ``$XDG_CACHE_HOME/limosa``; None where no folder is safely ours."""
    user = start.user_folder("XDG_CACHE_HOME", ".cache")
    for place in (user, ROOT_CACHE) if os.geteuid() == 0 else (user,):
        folder = place / "limosa"
        with contextlib.suppress(OSError):
            nearest = next(path for path in (place, *place.parents) if path.exists())
            if nearest.stat().st_uid != os.geteuid():
                continue
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = folder.lstat()
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022:
                return folder
    return None


def _file(key: str) -> Path | None:
    folder = cache_folder()
    return folder and folder / f"criu-trial-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(key: str) -> TrialResult | None:
    """Return the kept answer; None where there is none, it is too old, or somebody else could have written it."""
    file = _file(key) if key else None
    if file is None:
        return None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as opened:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
                return None
            kept = msgspec.json.decode(opened.read(1 << 16), type=ready(_Kept))
        longest = NO_KEPT if not kept.result.ok else SKIP_KEPT if kept.result.network_lock == "skip" else None
        if kept.key == key and (longest is None or 0 <= time.time() - kept.since < longest):
            return kept.result
    return None


def _write(key: str, result: TrialResult) -> None:
    """Keep an answer; a cache that cannot be written to is no error."""
    file = _file(key) if key else None
    if file is None:
        return
    with contextlib.suppress(OSError):
        fd, name = tempfile.mkstemp(prefix=".criu-trial-", dir=file.parent)  # mode 0600
        with open(fd, "wb") as opened:
            opened.write(msgspec.json.encode(_Kept(key=key, since=time.time(), result=result)))
        os.replace(name, file)
