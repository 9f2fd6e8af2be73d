"""CRIU's log: its first real error, as a sentence with a way out.

A log has many lines that say "Error" and mean nothing: probes of what the kernel has, limits that a sandbox forbids,
the undoing after the real one. The first that is none of these is the cause. A known cause is explained in words;
an unknown one is shown as CRIU wrote it. ``tests/criu/logs`` holds what CRIU 3.17 to 4.2.1 really wrote.
"""

from __future__ import annotations

import re

import msgspec

TAKEN = "is taken"  # in the sentence for a pid that somebody else has


class Cause(msgspec.Struct, frozen=True):
    """Why a run of CRIU failed.

    Attributes:
        text: a sentence, with the way out where one is known.
        kind: a stable name of the cause ("pid-taken", "tcp-established" …); "" where it is not known.
        raw: CRIU's own line, "" where its log has no error.
    """

    text: str
    kind: str = ""
    raw: str = ""


# "(00.012345) Error (criu/files.c:12): text", "(00.012345)     42: Error (…): text", "pie: 42: Error (…): text"; also
# "Error (…): text" of what is said before the log is open. Group 1: the process, where it is said. Group 2: the text.
_ERROR = re.compile(r"^(?:\(\s*[\d.]+\)\s*)?(?:pie:\s*)?(?:(\d+):\s*)*Error\s*\([^)]*\):\s*(.*)$")
_WARNING = re.compile(r"^(?:\(\s*[\d.]+\)\s*)?(?:(\d+):\s*)*Warn\s*\([^)]*\):\s*(.*)$")

# Errors that are none: (where they come from, so that nobody removes one that is needed)
_NOISE = re.compile(
    r"RLIMIT_NOFILE"  # sandboxes forbid raising it
    r"|Unable to create tun"  # probe: there is no tun device
    r"|kdat|kerndat_.*cache|on tmpfs"  # CRIU's cache of what the kernel has cannot be written
    r"|^exited, status="  # a program it ran, iptables or an action script; what follows says which
    r"|^Message reply from daemon is trimmed"
    r"|^Can't retrieve FDs from socket"  # follows send_fds failed
    r"|Unable to detach from"
)
# Warnings that are the cause where nothing but undoing follows.
_TELLING = re.compile(r"Unable to interrupt task")

_TABLE: list[tuple[str, str, str]] = [
    # (kind, pattern of CRIU's text, sentence; {1} … are the pattern's groups, {pid} the process)
    ("pid-taken", r"Can't fork for (\d+): File exists", "pid {1} " + TAKEN + " by another process or not yet reaped"),
    ("pid-taken", r"Pid (\d+) do(?:es)? not match expected", "pid {1} " + TAKEN + " by another process"),
    ("pid-taken", r"Unable to create a thread: -17\b",
     "the id of one of its threads " + TAKEN + " by another process or thread"),
    ("exchanged", r"^exchanged: (.*)", "{1}: it was exchanged while the job was restored"),
    ("size-changed", r"File (.*) has bad size (\d+) \(expect (\d+)\)",
     "file /{1} has {2} bytes, it had {3} when it was dumped; --rewind-files cuts back one that has grown"),
    ("mode-changed", r"File (.*) has bad mode (\S+) \(expect (\S+)\)",
     "file /{1} has mode {2}, it had {3} when it was dumped: chmod puts it back"),
    ("file-missing", r"Can't open file (.*) on restore: No such file or directory",
     "/{1}, which the job had open, is not there any more"),
    ("file-forbidden", r"Can't open file (.*) on restore: Permission denied",
     "/{1}, which the job had open, may not be opened"),
    ("port-taken", r"Can't bind inet socket.*: Address already in use",
     "a port that the job listened on is used by another process"),
    ("address-missing", r"Can't bind inet socket.*: Cannot assign requested address",
     "this machine lacks an address that the job's sockets were bound to"),
    ("tcp-established", r"Connected TCP socket, consider using --tcp-established",
     "it has a connected TCP socket: --tcp-established keeps it, --tcp-close closes it"),
    ("shell-job", r"The root process (\d+) is not a session leader",
     "process {1} belongs to the session of a shell: --shell-job, or start it by limosa run"),
    ("terminal", r"Found slave peer index \d+ without correspond master peer",
     "it has a terminal open whose other side is outside of the job: --shell-job, or start it by limosa run"),
    ("terminal", r"Found dangling tty",
     "it has a terminal of another session open: --shell-job, or start it by limosa run"),
    ("terminal-taken", r"Unable to open \S*ptmx with specified index (\d+)",
     "somebody else has the number of a terminal that the job works on, /dev/pts/{1}: try again when it is free"),
    ("file-lock", r"Some file locks are hold by dumping tasks", "it holds file locks: --file-locks keeps them"),
    ("ghost-limit", r"Can't dump ghost file (.*) of (\d+) size",
     "it has a deleted file of {2} bytes open ({1}): --ghost-limit must be at least that"),
    ("link-remap", r"Can't create link remap for (.*)\. Use link-remap option",
     "it has a file open ({1}) that was deleted under this name and has another: --link-remap"),
    ("external-unix", r"External socket is used",
     "it has a unix socket to a process outside of the job: start it by limosa run"),
    ("external-unix", r"Can't dump half of stream unix connection",
     "it has a unix socket to a process outside of the job: start it by limosa run"),
    ("external-unix", r"Can't connect \d+ socket: (?:No such file|Connection refused)",
     "nobody has the name that a unix socket of the job sends to (--ext-unix-sk)"),
    ("sysv-ipc", r"Task (\d+) with SysVIPC shmem map",
     "process {1} uses System V shared memory, which cannot be dumped"),
    ("io-uring", r"send_fds failed \(-22\)",
     "process {pid} has a descriptor that cannot be handed on, such as an io_uring: start it by limosa run"),
    ("io-uring", r"anon_inode:\[io_uring\]",
     "process {pid} uses io_uring, which cannot be dumped: start it by limosa run"),
    ("traced", r"Unable to interrupt task: (\d+) \(Operation not permitted\)",
     "process {1} may not be stopped: a debugger holds it, or it belongs to somebody else"),
    ("traced", r"Can't seize task|ptrace.*Operation not permitted",
     "the job may not be traced: a debugger holds it ({0})"),
    ("device", r"Can't dump file (\d+) of that type \[\d+\] \((.*?)\s*\)",
     "it has a device open (descriptor {1}, {2}) that cannot be dumped"),
    ("device-mapping", r"handle_device_vma plugin failed",
     "a child inherited mappings of a device: Limosa's CRIU plugin is needed (limosa doctor --fix)"),
    ("device-mapping", r"Can't handle non-regular mapping on (\d+)'s map (\S+)",
     "process {1} has a device mapped at {2} that cannot be dumped"),
    ("script", r"Script .*action\.sh exited with", "Limosa said no or has ended"),
    ("no-space", r"No space left on device", "there is no room left for the image"),
    ("kernel-vdso", r"vdso: Unexpected rt vDSO area bounds", "it is too old for this kernel (its vDSO)"),
    ("kernel-sockopt", r"Can't get (\d+:\d+) opt: Operation not supported",
     "it is too old for this kernel (socket option {1})"),
    ("network-lock", r"(iptables|nft).*(failed|not found|No such file)", "packets cannot be kept away ({0})"),
    ("image-damaged", r"Read (\d+) bytes while (\d+) expected", "an image file is cut off ({0})"),
    ("image-damaged", r"Unexpected EOF on|No inventory\.img|Magic doesn't match",
     "an image file is missing or damaged ({0})"),
    ("seccomp", r"seccomp.*(not supported|Can't)", "a seccomp filter of the job cannot be dumped ({0})"),
]  # fmt: skip


def cause(log: str, status: int) -> Cause:
    """Return why a run of CRIU failed.

    Args:
        log: its log, or what it wrote to its output where it never opened one.
        status: its exit status, negative where a signal ended it.
    """
    line = _first(log)
    if line is None:
        if status < 0:
            return Cause(text=f"it was ended by signal {-status}", kind="killed")
        last = next((text for text in reversed(log.splitlines()) if text.strip()), "") if "(00." not in log else ""
        return Cause(text=f"it ended with status {status}" + (f": {last}" if last else ", and its log names no error"))
    pid, text = line
    for kind, pattern, sentence in _TABLE:
        match = re.search(pattern, text)
        if match:
            groups = [group or "" for group in match.groups()]
            return Cause(text=sentence.format(text, *groups, pid=pid or "of the job"), kind=kind, raw=text)
    return Cause(text=text, raw=text)


def _first(log: str) -> tuple[str, str] | None:
    """Return process and text of the first error that is one; what only undoing follows, last."""
    warning: tuple[str, str] | None = None
    weak: tuple[str, str] | None = None
    for line in log.splitlines():
        match = _ERROR.match(line)
        if match is None:
            match = _WARNING.match(line)
            if match and warning is None and _TELLING.search(match.group(2)):
                warning = (match.group(1) or "", match.group(2))
            continue
        found = (match.group(1) or "", match.group(2))
        if "FAILED" in found[1]:
            break  # "Dumping FAILED.", the end of it
        if not _NOISE.search(found[1]):
            return found if warning is None else warning
        if weak is None and not re.search("RLIMIT|tun", found[1]):
            weak = found
    return warning or weak
