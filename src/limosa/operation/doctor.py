"""What works on this machine, what does not, and what to type about it.

Each check looks at one thing and never raises: it says what it cannot find out. Without ``fix`` nothing is changed,
and with it only what Limosa itself brings along: a CRIU that works, the CRIU plugin, the runtime folder, its CDI spec.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from limosa import start
from limosa.errors import CriuNotPermitted, LimosaError, NoRoomOnHost, NoWorkingCriu, PermissionDenied
from limosa.operation.doctor_containers import containers
from limosa.operation.doctor_gpu import Check, Status, driver_checks, facts_of, fail, gpu_present, huge_pages, ok, warn
from limosa.process import places
from limosa.process.memory import gib
from limosa.process.status import effective_capabilities
from limosa.start import changeable

if TYPE_CHECKING:
    from limosa.process.criu.program import Criu

Log = Callable[[str], None]
Build = Callable[[], str | None]

CAPABILITIES = {
    "CAP_SYS_ADMIN": 21,
    "CAP_CHECKPOINT_RESTORE": 40,
    "CAP_SYS_PTRACE": 19,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_RESOURCE": 24,
}
"""Bit numbers from capability.h. CRIU needs the first or the second, and the third; the fourth for connected TCP."""

_GIB = 1 << 30
_NOTED_BYTES = 16 << 10  # what Limosa notes of an operation


class Diagnosis(msgspec.Struct, kw_only=True):
    """All checks. ``ok`` means that everything needed on this machine works (warnings may remain)."""

    ok: bool
    checks: list[Check]

    @property
    def exit_code(self) -> int:
        """0, or 24 (no working CRIU), 12 (driver), 11 (permission), 15 (no room), the first of them that applies."""
        codes = [c.exit_code for c in self.checks if c.status == Status.FAIL]
        return next((c for c in (24, 12, 11) if c in codes), codes[0] if codes else 0)


def doctor(
    *, fix: bool = False, criu: str | None = None, log: Log = lambda _: None, leave_containers: bool = False
) -> Diagnosis:
    """Look at the machine; the checks come in the order in which they depend on each other.

    ``fix``: fetch a working CRIU, build the CRIU plugin and the libraries of jobs, where they are missing, and let
    containers have the latter: a CDI spec, and runtimes that read it. ``log`` is told. ``criu``: the program to look at
    instead of the one that would be found. ``leave_containers``: ``fix`` leaves runtimes and their specs as they are.
    """
    present = gpu_present()
    *checks, persistence = driver_checks(facts_of(present))
    rights = _capabilities()
    works, trial = _criu(criu, fix, rights, log)
    checks += [trial, _plugin(works, present, fix, log), _libraries(fix=fix, log=log)]
    checks.append(containers(fix=fix and not leave_containers, log=log))
    checks += [rights, _ptrace_scope(), _nftables(works)]
    checks += [_memory(present), _cgroup(), persistence, huge_pages(present), _parking(), _stale(), _runtime_dir()]
    return Diagnosis(ok=not any(c.status == Status.FAIL for c in checks), checks=checks)


# --- the host's side -----------------------------------------------------------------------------------------


def _criu(explicit: str | None, fix: bool, rights: Check, log: Log) -> tuple[Criu | None, Check]:
    """The check "criu": dumps and restores a small process, or says why that does not work."""
    from limosa.process.criu.fetch import fetch
    from limosa.process.criu.find import find

    try:
        try:
            found = find(explicit, use_cache=not fix)
        except NoWorkingCriu:
            if not fix or explicit:
                raise
            fetch(log)
            found = find(explicit, use_cache=False)
    except LimosaError as error:
        if isinstance(error, CriuNotPermitted):
            return None, fail("criu", 11, error.message, error.hint)
        if rights.status == Status.FAIL:  # nothing would pass: what is missing is the right, not the program
            return None, fail("criu", 11, f"{error.message}; {rights.detail}", rights.fix)
        return None, fail("criu", 24, error.message, error.hint or "limosa doctor --fix")
    except Exception as error:
        return None, fail("criu", 24, f"looking for CRIU failed: {error}", "limosa doctor --fix")
    where = "private" if found.private else "the system's"
    return found, ok("criu", f"CRIU {found.version} ({where}, {found.argv[-1]}) passes the trial")


def _plugin(works: Criu | None, present: bool, fix: bool, log: Log) -> Check:
    """The check "plugin": ours, for what forked children inherit of /dev/nvidia*."""
    from limosa.native.build import CRIU, PLUGIN, build_plugin

    library = CRIU / PLUGIN
    builds = {library: build_plugin} if fix else {}
    why = _built(builds, log)
    if library.is_file():
        return _unloadable("plugin", [library], builds, log) or ok("plugin", f"built: {library}")
    text = f"not built: GPU jobs with forked children (DataLoader workers) cannot be checkpointed{why}"
    fixing = "install a C compiler (gcc), then limosa doctor --fix"
    return fail("plugin", 24, text, fixing) if present and works is not None else warn("plugin", text, fixing)


def _libraries(*, fix: bool, log: Log) -> Check:
    """The check "libraries": what ``limosa run`` preloads, and the hash by which a checkpoint sees what has changed."""
    from limosa.native import build

    parts = (
        (build.SHIM / build.SHIM_LIBRARY, build.build_shim, "jobs of limosa run take the driver's way"),
        (build.SIGHT / build.SIGHT_LIBRARY, build.build_sight, "limosa run --gpus hides nothing from a job"),
        (build.HASH / build.HASH_LIBRARY, build.build_hash, "device memory cannot be copied while a job runs"),
    )
    builds = {library: build_it for library, build_it, _ in parts} if fix else {}
    why = _built(builds, log)
    missing = [f"{library.name} ({without})" for library, _, without in parts if not library.is_file()]
    if not missing:
        cannot = _unloadable("libraries", [library for library, _, _ in parts], builds, log)
        return cannot or ok("libraries", "built: they look after the device memory of jobs of limosa run")
    text = f"not built: {', '.join(missing)}{why}"
    return warn("libraries", text, "install a C compiler (gcc), then limosa doctor --fix")


def _built(builds: Mapping[Path, Build], log: Log) -> str:
    """Builds what of these is not there; why that cannot be, in brackets."""
    from limosa.native.build import NO_COMPILER, compilers

    said = []
    for library, build_it in builds.items():
        if not library.is_file():
            log(f"building {library.name}")
            said.append((build_it() or "").partition("\n")[0])
    why = next(filter(None, said), "" if compilers() else NO_COMPILER)
    return f" ({why})" if why else ""


def _unloadable(name: str, libraries: list[Path], builds: Mapping[Path, Build], log: Log) -> Check | None:
    """The check of what cannot be loaded here, None where all can; with ``builds`` it is built here first."""
    from limosa.native.loads import load_problems

    problems = load_problems(libraries)
    for library in [path for path in problems if path in builds]:
        log(f"building {library.name}, which does not load here")
        try:
            library.unlink()
            said = builds[library]()
        except OSError as error:  # another user's installation
            said = f"{problems[library]}, and it cannot be replaced ({error.strerror})"
        problems = {**problems, library: said} if said else load_problems(libraries)
    if not problems:
        return None
    hint = "limosa doctor --fix builds it here (needs a C compiler: gcc)"
    if any(map(changeable, problems)):
        hint = "limosa doctor --fix, where it is the library; chown root: and chmod go-w, where it is the folder"
    return warn(name, "; ".join(f"{path.name} does not load here: {text}" for path, text in problems.items()), hint)


def _capabilities(folder: str = "/proc/self") -> Check:
    """The check "capabilities": what CRIU needs of the caller."""
    bits = effective_capabilities(folder)
    has = {name for name, bit in CAPABILITIES.items() if bits >> bit & 1}
    missing = []
    if not has & {"CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"}:
        missing.append("CAP_CHECKPOINT_RESTORE (or CAP_SYS_ADMIN)")
    if "CAP_SYS_PTRACE" not in has:
        missing.append("CAP_SYS_PTRACE")
    if missing:
        text = f"uid {os.geteuid()} lacks {' and '.join(missing)}: CRIU may not run"
        fix = "use sudo" if os.geteuid() else "give the container these capabilities (--cap-add)"
        return fail("capabilities", 11, text, fix)
    if "CAP_NET_ADMIN" not in has:
        text = "no CAP_NET_ADMIN: jobs with connected TCP sockets cannot be checkpointed"
        fix = "use sudo" if os.geteuid() else "give the container this capability (--cap-add NET_ADMIN)"
        return warn("capabilities", text, fix)
    if "CAP_SYS_RESOURCE" not in has and os.geteuid() == 0:
        text = "no CAP_SYS_RESOURCE: other users' jobs cannot be checkpointed"
        return warn("capabilities", text, "--cap-add SYS_RESOURCE")
    return ok("capabilities", ", ".join(sorted(has)))


def _ptrace_scope(path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> Check:
    try:
        scope = int(path.read_text())
    except (OSError, ValueError):
        return ok("ptrace_scope", "this kernel does not restrict ptrace")
    if scope >= 3:
        text = "3: nobody may attach to a process until the machine is started again, CRIU neither"
        return fail("ptrace_scope", 11, text, "remove kernel.yama.ptrace_scope=3 from sysctl.d and reboot")
    if scope == 2 and os.geteuid():
        return warn("ptrace_scope", "2: only root may attach to processes", "use sudo")
    return ok("ptrace_scope", str(scope))


def _nftables(works: Criu | None) -> Check:
    """The check "nftables": CRIU holds packets back with it while it saves TCP connections."""
    without = "while a job's TCP connections are saved (--tcp-established), the other end may reset them"
    program = start.program("nft")
    argv = works.nft if works is not None and works.nft else [program] if program else None
    if argv is None:
        fix = "install the package nftables" if works else "limosa doctor --fix fetches it together with CRIU"
        return warn("nftables", f"the program nft is missing: {without}", f"{fix}; or use --tcp-close")
    try:
        ran = start.run([*argv, "list", "tables"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn("nftables", f"nft cannot be started ({error}): {without}", "use --tcp-close")
    if ran.returncode:
        why = (ran.stderr.decode(errors="replace").strip().splitlines() or ["?"])[0]
        if "not permitted" in why and not effective_capabilities() >> CAPABILITIES["CAP_NET_ADMIN"] & 1:
            if os.geteuid():
                return warn("nftables", "nft is there; only root can tell whether it works", "sudo limosa doctor")
            text = f"nft is there, but may not be used without CAP_NET_ADMIN: {without}"
            return warn("nftables", text, "give the container this capability (--cap-add NET_ADMIN)")
        return warn("nftables", f"nft does not work here ({why}): {without}", "use --tcp-close")
    left = [line.split()[-1] for line in ran.stdout.decode(errors="replace").splitlines() if " CRIU-" in line]
    if left:
        kept = "1 table of CRIU's keeps" if len(left) == 1 else f"{len(left)} tables of CRIU's keep"
        return ok("nftables", f"nft works; {kept} connections of checkpointed jobs", _kept_tables(left, argv))
    return ok("nftables", "nft works")


def _kept_tables(names: list[str], nft: list[str]) -> str:
    """What the tables that CRIU has left are for, and how each goes: kept on purpose unless nobody has their image."""
    return (
        f"{', '.join(names)}: the peers of a checkpointed job's TCP connections wait until its image is restored or "
        f"removed (limosa restore, limosa rm); if no image is left: {shlex.join(nft)} delete table inet {names[0]}"
    )


def _memory(present: bool, meminfo: Path = Path("/proc/meminfo")) -> Check:
    values = {k: int(v.split()[0]) << 10 for k, v in (line.split(":") for line in meminfo.read_text().splitlines())}
    free, total = values["MemAvailable"], values["MemTotal"]
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    used = _most_used() if present else 0
    if used > free:
        text += f", less than the {used / _GIB:.1f} GiB in use on one GPU (some machines grow on first use)"
        return warn("memory", text, "suspend smaller jobs, or free host memory first")
    return ok("memory", text)


def _most_used() -> int:
    """Bytes in use on the fullest GPU; 0 where that is not known."""
    from limosa import gpu

    try:
        return max((g.memory_used for g in gpu.inventory().gpus), default=0)
    except (LimosaError, OSError):
        return 0


def _cgroup(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Check:
    line = next((x for x in own.read_text().splitlines() if x.startswith("0::")), None)
    if line is None or not (root / "cgroup.controllers").exists():
        return warn("cgroup", "no unified (v2) hierarchy: memory limits of jobs cannot be looked at")
    folder = root / line[3:].lstrip("/")
    for level in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):
            limit = (level / "memory.max").read_text().strip()
            if limit != "max":
                text = f"this shell's cgroup may use {int(limit) / _GIB:.1f} GiB; what is restored from it shares that"
                return ok("cgroup", text)
        if level == root:
            break
    return ok("cgroup", "v2, no memory limit on this shell")


def _parking() -> Check:
    """The check "parking": vault and mover of the caller (for root: of everybody), the arena, when they end."""
    from limosa.operation.arena import owners, shown

    told = []
    try:
        for uid in owners():
            there = shown(uid)
            whose = f"uid {uid}: " if uid != os.geteuid() else ""
            total = there.used + there.free
            if there.mover:
                memory = sum(there.mover_memory.values()) / (1 << 20)
                ends = f"ends in {there.mover_ends_in:.0f} s" if there.mover_ends_in is not None else "in use"
                told.append(f"{whose}mover is process {there.mover}, {memory:.0f} MiB of device memory, {ends}")
            if there.vault:
                kept = f", kept for {there.seconds:.0f} s" if there.reserved else ""
                arena = f"{gib(there.used)} in use, {gib(there.pinned)} pinned{kept}"
                told.append(f"{whose}vault is process {there.vault}, arena {gib(total)}, {arena}")
    except (LimosaError, OSError) as error:
        return warn("parking", f"what is resident cannot be looked at: {error}")
    if not told:
        return ok("parking", "no vault and no mover are resident")
    return ok("parking", "; ".join(told) + " (limosa arena --end gives back what no job uses)")


def _stale() -> Check:
    """The check "stale": journals and claims of operations that nobody works on any more."""
    from limosa.operation import claims, journal

    try:
        dead = [s for s in journal.under_way() if not s.alive]
        litter = claims.stale()
    except (LimosaError, OSError) as error:
        return warn("stale", f"the runtime folder cannot be read: {error}")
    if dead:
        return warn("stale", f"left in the middle: {'; '.join(s.text for s in dead)}", "limosa recover")
    if litter:
        return warn("stale", f"{len(litter)} claim(s) of operations that died", "limosa recover")
    return ok("stale", "no operation was left in the middle")


def _try_writing(folder: Path) -> None:
    """Writes what a few journals need to a file without a name; OSError: that cannot be done."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if (file.write(bytes(_NOTED_BYTES)) or 0) < _NOTED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _runtime_dir() -> Check:
    try:
        found = places.own_place()
    except (LimosaError, OSError) as error:
        return fail("runtime_dir", 11, str(error), getattr(error, "hint", ""))
    try:
        _try_writing(found)
    except OSError as error:
        text = f"{found}, where Limosa notes what it is doing, cannot be written to: {error.strerror}"
        code = NoRoomOnHost.exit_code if error.errno in (errno.ENOSPC, errno.EDQUOT) else PermissionDenied.exit_code
        return fail("runtime_dir", code, text, f"df -h {found}; or another folder: LIMOSA_RUNTIME_DIR")
    name = f"limosa-{os.geteuid()}"
    if os.geteuid() and found.name != name:
        text = f"somebody else has taken {found.parent / name}: records are kept in {found}"
        return warn("runtime_dir", text, f"root may remove {found.parent / name}")
    return ok("runtime_dir", str(found))
