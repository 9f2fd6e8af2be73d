"""What a node is told to do wrong, and what is changed on it while it runs.

Rules are as ``native/fault.h`` has them: words separated by spaces, one rule a file. The other switches change
the node's state at once for all of its processes.

Examples:
    >>> check_rule("function=cuCheckpointProcessRestore result=CUDA_ERROR_UNKNOWN")
    {'function': 'cuCheckpointProcessRestore', 'result': 'CUDA_ERROR_UNKNOWN'}
    >>> check_rule("result=")
    Traceback (most recent call last):
    limosa.errors.UsageError: fault 'result=': result= needs a value
"""

from __future__ import annotations

import fcntl
import fnmatch
import functools
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from limosa.errors import UsageError
from limosa.native.build import DRIVER
from limosa.process.openat import closing
from limosa_softgpu.build import SOFTGPU
from limosa_softgpu.state import (
    GRANULARITY,
    KIND_RESERVED,
    MAX_BLOCKS,
    MAX_GPUS,
    NODE_FOLDER,
    NVML_MPS,
    NodeState,
    locked,
    open_file,
    open_folder,
    opened,
)

_MOST_BYTES = 1024
"""Bytes of a rule, as the libraries read it."""
_MOST_RULES = 999_999_999
_NAME = re.compile(r"[0-9]{6,9}\Z", re.ASCII)

_NUMBER = re.compile(r"\d+")
_RESULT = re.compile(r"\d+|[A-Z][A-Z0-9_]*|nccl[A-Z][A-Za-z]*")
_VICTIM = re.compile(r"caller|target")
_SECONDS = re.compile(r"\d+(\.\d+)?")
_ANY = re.compile(r".+")
_WHO = re.compile(r"[1-9]\d*|.*\D.*")
WORDS: dict[str, re.Pattern[str]] = {
    "function": _ANY,
    "nth": re.compile(r"[1-9]\d*"),
    "every": re.compile(r"1"),
    "caller": _WHO,
    "target": _WHO,
    "result": _RESULT,
    "after": _RESULT,
    "delay": _SECONDS,
    "crash": _VICTIM,
    "crash-after": _VICTIM,
    "state": _NUMBER,
    "memory": re.compile(r"device|host"),
    "lost": _NUMBER,
    "hazard": re.compile(r"[a-z][a-z0-9-]*"),
    "lie": re.compile(r"[a-z]+:.*"),
}
HAZARDS = {
    "bus-id-remembered",
    "chips-differ",
    "collective-deadlocks-lock",
    "first-synchronise-segfaults",
    "init-slow",
    "ipc-lost",
    "kill-after-restore-hangs",
    "killed-by-cgroup",
    "lock-hangs-when-stopped",
    "managed-not-supported",
    "mig-not-supported",
    "mps-not-supported",
    "multicast-hangs",
    "nccl-shared-memory-lost",
    "needs-persistence",
    "no-map-refused",
    "peer-large-allocation-lost",
    "restore-poisons",
    "state-blocks-in-flight",
    "states-4-and-5",
    "stays-locked-after-controller-death",
    "synchronise-while-checkpointed-segfaults",
    "thread-id-as-pid",
    "thread-id-refused",
    "vgpu",
}
"""The hazards that can be switched on (``docs/softgpu.md``)."""
STEPS = {
    "step:checkpoint-begin",
    "step:checkpoint-released",
    "step:checkpoint-saved",
    "step:lock-begin",
    "step:lock-closed",
    "step:nccl-collective",
    "step:nccl-init",
    "step:nccl-launch",
    "step:nccl-sendrecv",
    "step:restore-begin",
    "step:restore-claimed",
    "step:restore-loaded",
    "step:unlock-begin",
}
LIES = {
    "free": ("nvmlDeviceGetMemoryInfo", r"\d+"),
    "used": ("nvmlDeviceGetMemoryInfo", r"\d+"),
    "total": ("nvmlDeviceGetMemoryInfo", r"\d+"),
    "processes": ("nvmlDeviceGetComputeRunningProcesses", "none"),
    "name": ("nvmlDeviceGetName", r".+"),
    "uuid": ("nvmlDeviceGetUUID", r".+"),
    "count": ("nvmlDeviceGetCount", r"\d+"),
    "minor": ("nvmlDeviceGetMinorNumber", r"\d+"),
    "mig": ("nvmlDeviceGetMigMode", "on|off"),
    "persistence": ("nvmlDeviceGetPersistenceMode", "on|off"),
    "driver": ("nvmlSystemGetDriverVersion", r".+"),
    "cuda": ("nvmlSystemGetCudaDriverVersion", r"\d+"),
}
"""What NVML can lie about: the function that is asked for it, and what can be said."""
EFFECTS = {
    "memory=device": "cuMemAlloc,cuMemAllocPitch,cuMemAllocAsync,cuMemAllocFromPoolAsync,cuMemCreate,cuMemGetInfo,"
    "cuDevicePrimaryCtxRetain,cuCtxCreate,cuCtxSetCurrent,cuCheckpointProcessRestore",
    "memory=host": "cuMemHostAlloc,cuMemAllocHost,cuCheckpointProcessCheckpoint",
    "state": "cuCheckpointProcessGetState",
}
"""Words that only some functions heed: those are meant where a rule names none."""
NCCL_RESULTS = {
    "ncclSuccess": 0,
    "ncclUnhandledCudaError": 1,
    "ncclSystemError": 2,
    "ncclInternalError": 3,
    "ncclInvalidArgument": 4,
    "ncclInvalidUsage": 5,
    "ncclRemoteError": 6,
    "ncclInProgress": 7,
}
LONGEST = {"function": 255, "caller": 127, "target": 127, "hazard": 63, "lie": 63}
CONDITIONS = {"function", "nth", "every", "caller", "target"}
_LISTS = (DRIVER / "functions.list", SOFTGPU / "nvml_functions.list", SOFTGPU / "nccl_functions.list")
_LISTED = re.compile(r"^FUNCTION\((\w+)", re.MULTILINE)
_VERSION = re.compile(r"(_v\d+)?(_pt[sd][sz])?$")
_TURN = re.compile(r"((?P<gpu>\d+):)?(?P<what>lost|mig|persistence|mps)=(?P<how>on|off)")
COMPUTE_MODES = {"default": 0, "exclusive_thread": 1, "prohibited": 2, "exclusive_process": 3}


def check_rule(rule: str) -> dict[str, str]:
    """Look whether a rule can be one.

    Returns:
        Its words: what is given for each.

    Raises:
        UsageError: it cannot, and why.
    """
    given = _words_of(rule)
    _check_values(rule, given)
    function = given.get("function", "*")
    if "lie" in given:
        _check_lie(rule, given["lie"], function)
    for pattern in function.split(","):
        if not any(fnmatch.fnmatchcase(name, pattern) for name in functions()):
            raise UsageError(detail=f"fault {rule!r}: no function of libcuda, NVML or NCCL is called {pattern}")
    for word in (f"memory={given.get('memory')}", "state" if "state" in given else ""):
        heeding = EFFECTS.get(word, "").split(",")
        if word in EFFECTS and not any(_means(pattern, name) for pattern in function.split(",") for name in heeding):
            raise UsageError(detail=f"fault {rule!r}: {function} does not heed {word}; {', '.join(heeding)} do")
    about_a_target = function == "*" or function.startswith(("cuCheckpoint", "step:", "cu*"))
    if "target" in (given.get("crash"), given.get("crash-after")) and not about_a_target:
        raise UsageError(detail=f"fault {rule!r}: only checkpoint calls have a target; crash=caller is whoever calls")
    return given


def _words_of(rule: str) -> dict[str, str]:
    """What a rule gives for each word, every one of which is known and stands there once."""
    given: dict[str, str] = {}
    try:
        rule.encode()
    except UnicodeEncodeError:
        raise UsageError(detail=f"fault {os.fsencode(rule)!r} is no UTF-8") from None
    for word in rule.split():
        key, equals, value = word.partition("=")
        if key == "hang" and not equals:
            given[key] = ""
            continue
        if key not in WORDS:
            raise UsageError(detail=f"fault {rule!r}: {key!r} is none of hang, {', '.join(WORDS)}")
        if not value:
            raise UsageError(detail=f"fault {rule!r}: {key}= needs a value")
        if not WORDS[key].fullmatch(value):
            raise UsageError(detail=f"fault {rule!r}: {value!r} is no value of {key}=")
        if key in given:
            raise UsageError(detail=f"fault {rule!r}: {key}= stands there twice")
        if len(value.encode(errors="surrogateescape")) > LONGEST.get(key, 63):
            raise UsageError(detail=f"fault {rule!r}: what {key}= is given is too long")
        given[key] = value
    return given


def _check_values(rule: str, given: Mapping[str, str]) -> None:
    """Refuses results and hazards that are called nothing, and a rule that says nothing, or two things."""
    for key in ("result", "after"):
        if key in given and result_number(given[key]) is None:
            raise UsageError(detail=f"fault {rule!r}: no CUresult, NVML or NCCL result is called {given[key]}")
    if given.get("hazard", "vgpu") not in HAZARDS:
        raise UsageError(detail=f"fault {rule!r}: there is no hazard {given['hazard']} ({', '.join(sorted(HAZARDS))})")
    if not given.keys() - CONDITIONS:
        raise UsageError(detail=f"fault {rule!r} does not say what is to go wrong (result=, hang, delay=, …)")
    if "nth" in given and "every" in given:
        raise UsageError(detail=f"fault {rule!r}: nth= and every= exclude each other")


def _means(pattern: str, function: str) -> bool:
    """Whether a pattern means a function, or a version of it."""
    return fnmatch.fnmatchcase(function, pattern) or fnmatch.fnmatchcase(function, _VERSION.sub("", pattern))


def _check_lie(rule: str, lie: str, function: str) -> None:
    """Look whether a lie can be told by one of the functions that a rule means.

    Raises:
        UsageError: it cannot, and why.
    """
    about, _, said = lie.partition(":")
    if about not in LIES:
        raise UsageError(detail=f"fault {rule!r}: NVML can lie about {', '.join(sorted(LIES))}")
    asked, sayable = LIES[about]
    if not re.fullmatch(sayable, said):
        raise UsageError(detail=f"fault {rule!r}: {said!r} is nothing that NVML could say of {about}")
    if not any(fnmatch.fnmatchcase(name, function) for name in functions() if name.startswith(asked)):
        raise UsageError(detail=f"fault {rule!r}: {function} is never asked for {about}; {asked} is")


def result_number(name: str) -> int | None:
    """Return the number of a ``CUresult``, ``nvmlReturn_t`` or ``ncclResult_t`` by name or number, None for none."""
    if name.isascii() and name.isdigit():
        return int(name[:20])
    if name.startswith("nccl"):
        return NCCL_RESULTS.get(name)
    if not name.startswith(("CUDA_", "NVML_")):
        name = f"CUDA_{name}" if name == "SUCCESS" else f"CUDA_ERROR_{name}"
    if name.startswith("NVML_"):
        import pynvml

        value = getattr(pynvml, name, None)
        return value if isinstance(value, int) else None
    from cuda.bindings import driver

    found = driver.CUresult.__members__.get(name)
    return None if found is None else int(found)


@functools.cache
def functions() -> frozenset[str]:
    """Return the names that ``function=`` can mean: what the libraries export, the same without versions, the steps."""
    listed = {name for path in _LISTS for name in _LISTED.findall(path.read_text(encoding="utf-8"))}
    return frozenset(listed | {_VERSION.sub("", name) for name in listed} | STEPS)


def _written(given: Mapping[str, str]) -> str:
    """Return a rule as the libraries read it: results are numbers, and what only some functions heed names those."""
    words = []
    if "function" not in given and "hazard" not in given:
        heeding = [EFFECTS[word] for word in (f"memory={given.get('memory')}", *given) if word in EFFECTS]
        heeding += [LIES[given["lie"].partition(":")[0]][0]] if "lie" in given else []
        words += [f"function={heeding[0]}"] if len(heeding) == 1 else []
    for key, value in given.items():
        if key == "hang":
            words.append(key)
        else:
            words.append(f"{key}={result_number(value) if key in ('result', 'after') else value}")
    return " ".join(words)


class Switches:
    """A node as seen by whoever lets it fail.

    Args:
        folder: the node's folder; from outside of the node ``/proc/PID/root`` + that of a process in it.
    """

    def __init__(self, folder: str = NODE_FOLDER):
        self.folder = folder

    # --- rules -----------------------------------------------------------------------------------------------

    def add(self, rule: str) -> str:
        """Add a rule; it holds for every call that begins from now on.

        Returns:
            Its name, for :meth:`remove`.

        Raises:
            UsageError: it is none.
        """
        given = check_rule(rule)
        if "lost" in given:
            with opened(self.folder) as state:
                there = int(state.n_gpus)
                del state
            if int(given["lost"]) >= there:
                raise UsageError(detail=f"fault {rule!r}: this node has {there} GPUs")
        with locked(self.folder), self._faults() as folder:
            number = max((int(name) for name in _names(folder) if _NAME.match(name)), default=0) + 1
            names = set(os.listdir(folder))
            while f"{number:06}" in names:  # something that somebody has put there and that is no rule
                number += 1
            if number > _MOST_RULES:
                raise UsageError(detail="this node has no number for another fault", hint="limosa softgpu --lift all")
            name = f"{number:06}"
            hidden = f".{name}.{secrets.token_hex(8)}"
            with open(open_file(folder, hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
                file.write(_written(given) + "\n")
                os.fchmod(file.fileno(), 0o666)
            os.rename(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)
            self._changed()
        return name

    def remove(self, name: str) -> None:
        """Remove a rule; whoever hangs by it goes on. Nothing happens where it is not there."""
        with locked(self.folder), self._faults() as folder:
            _remove(folder, name)
            self._changed()

    def clear(self) -> None:
        """Remove every rule."""
        with locked(self.folder), self._faults() as folder:
            for name in _names(folder):
                _remove(folder, name)
            self._changed()

    def rules(self) -> dict[str, str]:
        """Return the rules that there are, by name."""
        with self._faults() as folder:
            said = {name: _said(folder, name) for name in _names(folder)}
        return {name: text.strip() for name, text in said.items() if text is not None}

    def count(self, name: str) -> int:
        """Return how many calls a rule's conditions have met so far."""
        with self._faults() as folder:
            counted = (_said(folder, f"{name}.count") or "").split()
        return int(counted[0]) if counted and re.fullmatch(r"[0-9]{1,20}", counted[0]) else 0

    def log(self) -> list[str]:
        """Return the node's log: calls that are not implemented, faults that were injected."""
        with open_folder(self.folder) as folder:
            # Not by open_in: with --log it is a mount.
            fd = os.open("log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()

    def _faults(self) -> AbstractContextManager[int]:
        return open_folder(self.folder, "faults")

    def _changed(self) -> None:
        with opened(self.folder) as state:
            state.fault_generation = (state.fault_generation + 1) % (1 << 32) or 1  # 0: never any rule
            del state

    # --- GPUs ------------------------------------------------------------------------------------------------

    def lose(self, gpu: int, lost: bool = True) -> None:
        """Let a GPU fall off the bus, or come back."""
        self._set(gpu, lost=int(lost))

    def mig(self, gpu: int, on: bool = True) -> None:
        """Switch MIG mode."""
        self._set(gpu, mig=int(on))

    def persistence(self, gpu: int, on: bool) -> None:
        """Switch persistence mode."""
        self._set(gpu, persistence=int(on))

    def compute_mode(self, gpu: int, mode: str) -> None:
        """Set the compute mode: a key of ``COMPUTE_MODES``."""
        self._set(gpu, compute_mode=COMPUTE_MODES[mode])

    def mps(self, on: bool = True) -> None:
        """Let every compute process be a client of MPS (NVML tells them as such)."""
        with locked(self.folder), opened(self.folder) as state:
            state.nvml_flags = state.nvml_flags | NVML_MPS if on else state.nvml_flags & ~NVML_MPS
            del state

    def turn(self, word: str) -> None:
        """Do what ``limosa softgpu --turn`` is told: "1:lost=on", "0:mig=off", "mps=on".

        Raises:
            UsageError: it is none of these, or there is no such GPU.
        """
        match = _TURN.fullmatch(word)
        if not match or (match["gpu"] is None) != (match["what"] == "mps"):
            raise UsageError(
                detail=f"--turn {word}: it is GPU:lost=on, GPU:mig=on, GPU:persistence=on (or off), mps=on"
            )
        on = match["how"] == "on"
        if match["what"] == "mps":
            self.mps(on)
        else:
            changes: dict[str, Callable[[int, bool], None]] = {
                "lost": self.lose,
                "mig": self.mig,
                "persistence": self.persistence,
            }
            try:
                changes[match["what"]](int(match["gpu"]), on)
            except IndexError as error:
                raise UsageError(detail=f"--turn {word}: {error}") from None

    def _set(self, gpu: int, **fields: int) -> None:
        with locked(self.folder), opened(self.folder) as state:
            found = _gpu(state, gpu)
            for name, value in fields.items():
                setattr(found, name, value)
            del found, state

    def used(self, gpu: int) -> int:
        """Return the bytes taken on a GPU, those that it shows when it is idle counted."""
        with locked(self.folder), open_folder(self.folder, "memory") as folder, opened(self.folder) as state:
            self._reap(state, folder)
            return _used(state, gpu)

    def _reap(self, state: NodeState, folder: int) -> None:
        """Give places of blocks that nobody holds back, as the libraries do (``node.h``). The lock is held."""
        for place in range(_places(state)):
            block = state.blocks[place]
            if not block.id:
                continue
            name = str(block.id)
            try:
                fd = open_file(folder, name, os.O_RDONLY)
            except FileNotFoundError:
                block.id = 0
                continue
            except OSError:  # somebody has put something else there: it is taken as long as it is there
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
                block.id = 0
            except BlockingIOError:
                pass
            finally:
                os.close(fd)

    def fill(self, gpu: int, bytes_: int = 0, leave: int = 0) -> Filled:
        """Take device memory away: ``bytes_`` of it, or all but ``leave``.

        Returns:
            What gives it back by ``close`` (also at the end of a ``with``, or of this process).

        Raises:
            MemoryError: there is not that much.
        """
        with locked(self.folder), open_folder(self.folder, "memory") as folder, opened(self.folder) as state:
            self._reap(state, folder)
            found = _gpu(state, gpu)
            free = found.memory - _used(state, gpu)
            wanted = bytes_ or max(0, free - leave)
            wanted = (wanted + (GRANULARITY - 1 if bytes_ else 0)) // GRANULARITY * GRANULARITY
            if wanted > free:
                raise MemoryError(f"GPU {gpu} has {free} bytes free, not {wanted}")
            place = next((i for i in range(_places(state)) if not state.blocks[i].id), _places(state))
            if place >= MAX_BLOCKS:
                raise MemoryError("the node has no place for another block")
            state.next_block += 1
            block = state.blocks[place]
            block.bytes, block.pid, block.gpu, block.kind = wanted, os.getpid(), gpu, KIND_RESERVED
            block.start_time = _start_time()
            name = state.next_block * MAX_BLOCKS + place
            fd = open_file(folder, str(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.ftruncate(fd, wanted)
            block.id = name
            state.n_blocks = max(state.n_blocks, place + 1)
            del block, found, state
        return Filled(fd, wanted)


class Filled:
    """Device memory that nobody else can have while this is open.

    Attributes:
        bytes: how much it is.
    """

    def __init__(self, fd: int, size: int):
        self._fd = fd
        self.bytes = size

    def close(self) -> None:
        """Give it back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Filled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _gpu(state: NodeState, index: int) -> Any:
    there = min(state.n_gpus, MAX_GPUS)  # everybody in the node may write there
    if not 0 <= index < there:
        raise IndexError(f"the node has {there} GPUs, none with index {index}")
    return state.gpus[index]


def _places(state: NodeState) -> int:
    """How many places of blocks are to be looked at."""
    return max(0, min(int(state.n_blocks), MAX_BLOCKS))


def _names(folder: int) -> list[str]:
    """Names of rules: of files alone."""
    with os.scandir(folder) as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return sorted(name for name in files if not name.startswith(".") and not name.endswith(".count"))


def _said(folder: int, name: str) -> str | None:
    """What a file of the folder says, no more than a rule can; None where it is not there or is no file."""
    try:
        with closing(open_file(folder, name, os.O_RDONLY)) as fd:
            return os.read(fd, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def _remove(folder: int, name: str) -> None:
    for file in (name, f"{name}.count"):
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(file, dir_fd=folder)


def _used(state: NodeState, gpu: int) -> int:
    taken = int(_gpu(state, gpu).reserved)
    for place in range(_places(state)):
        block = state.blocks[place]
        if block.id and block.gpu == gpu:
            taken += block.bytes
    return taken


def _start_time() -> int:
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
