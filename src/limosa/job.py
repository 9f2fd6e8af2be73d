"""``run``: starts a job that can be checkpointed, and remembers what it is called and where its output goes.

Not in ``operation``, which takes longer to load than most jobs take to start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from limosa.errors import InvalidArgument, LimosaError, Reason, RunFailed, UsageError
from limosa.parking import LIBRARY, preload
from limosa.process import device_nodes, records
from limosa.process.identity import Identity
from limosa.process.launch import Launched, launch
from limosa.process.runtime import lock
from limosa.start import loadable

_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*")


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has just been started.

    Attributes:
        pid: its process.
        identity: the same with its start time: safe against pid reuse.
        name: what it is called.
        log: absolute path of the file that its output goes to.
        log_start: size of that file before, in bytes: its output begins there.
        warnings: what the user should know.
    """

    pid: int
    identity: Identity
    name: str
    log: str
    log_start: int = 0
    warnings: list[Reason] = []


def run(  # noqa: PLR0913 - options are keywords
    command: Sequence[str],
    *,
    name: str | None = None,
    log: str | os.PathLike[str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    gpus: str | None = None,
    shim: bool = True,
    without: Sequence[str] = (),
    seccomp: bool = True,
    detach: bool = True,
) -> Started:
    """Starts a job that can be checkpointed: own session, no terminal, output on a file, no io_uring.

    Args:
        command: argument vector.
        name: what to call it; else from its program, numbered where that is taken.
        log: file that its output is appended to; else a new ``NAME.limosa.log`` in ``cwd``.
        cwd: its working folder, else the caller's.
        env: its environment, else the caller's.
        gpus: the GPUs that it is to see, by any of their names, with commas; None: all.
        shim: let the library look after its large device allocations: it moves faster.
        without: parts of that library to leave out.
        seccomp: answer io_uring_setup with ENOSYS: CRIU cannot dump io_uring.
        detach: let init be its parent. Else it is the caller's child, and the caller must ``waitpid`` it.

    Raises:
        RunFailed: it was not started.
        UsageError: the name is none, or a living job has it; a GPU is named twice.
        UnknownGpu: there is no such GPU.
        InvalidArgument: the command is no list of words, or the environment has what is no text.
    """
    if isinstance(command, (str, bytes)) or not command:
        raise InvalidArgument(f"{command!r} is no command: a command is a list of words, the program first")
    for said in (*command, *(word for pair in (env or {}).items() for word in pair)):
        if not isinstance(said, str):
            raise InvalidArgument(f"{said!r} is not a text: words of a command, and what is in env, have to be")
    made = preload(env, without=without) if shim else env
    warnings: list[Reason] = []
    if shim and not loadable(LIBRARY):
        text = (
            "the library of limosa run was not built, or others can change it: this job will move at the driver's speed"
        )
        warnings.append(Reason(id="no-library", text=text, hint="limosa doctor --fix, then start it again"))
    folder = os.path.abspath(cwd if cwd is not None else os.getcwd())
    with lock("jobs"):
        if name is not None:
            records.check_name(name)
        chosen = name or default_name(command)
        sees = ""
        if gpus is not None:
            made, sees, more = _only(gpus, made)
            warnings += more
        try:
            launched = launch(command, log, cwd=cwd, env=made, name=chosen, seccomp=seccomp, detach=detach)
        except BaseException:
            device_nodes.forget(sees)
            raise
        supervisor = None if detach else Identity.of(os.getpid())
        warnings += _remember(chosen, command, launched, folder, supervisor=supervisor, sees=sees)
    return Started(
        pid=launched.identity.pid,
        identity=launched.identity,
        name=chosen,
        log=launched.log,
        log_start=launched.log_start,
        warnings=[*warnings, *launched.warnings],
    )


def default_name(command_line: Sequence[str]) -> str:
    """A name for a job that was given none: its program's (``python train.py``: train), numbered where taken."""
    words = [os.path.basename(command_line[0])]
    if _INTERPRETER.fullmatch(words[0]):
        arguments = list(command_line[1:])
        while arguments and arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
            del arguments[: 2 if arguments[0] in ("-X", "-W") else 1]
        if arguments[:1] == ["-m"]:
            words.append(arguments[1] if len(arguments) > 1 else "")
        elif arguments and arguments[0] != "-c":
            words.append(Path(arguments[0]).stem)
    base = re.sub(r"[^A-Za-z0-9._-]", "-", words[-1]).strip("-.")[:50]
    if not re.match(r"[A-Za-z_]", base):
        base = f"job-{base}".rstrip("-")
    taken = {r.name for r in records.RunRecord.all()}
    return next(n for i in range(1, len(taken) + 2) if (n := base if i == 1 else f"{base}-{i}") not in taken)


def _only(gpus: str, env: Mapping[str, str] | None) -> tuple[dict[str, str], str, list[Reason]]:
    """How a job is to see these GPUs only.

    Returns:
        Its environment, the file that says what it sees ("" where that is not hidden from it), and warnings.

    Raises:
        UnknownGpu: there is no such GPU.
        UsageError: one is named twice.
        RunFailed: what it is to see cannot be noted.
    """
    from limosa.gpu import find_gpu, inventory

    found = inventory()
    chosen = [find_gpu(found, name.strip()) for name in gpus.split(",")]
    if len({g.uuid for g in chosen}) < len(chosen):
        raise UsageError(detail=f"--gpus {gpus} names a GPU twice")
    made = dict(os.environ if env is None else env)
    if len(chosen) == len(found.gpus):
        made.pop("CUDA_VISIBLE_DEVICES", None)
        return made, "", []
    if loadable(device_nodes.LIBRARY) and all(g.minor is not None for g in found.gpus):
        made.pop("CUDA_VISIBLE_DEVICES", None)  # it counts, or names, other GPUs than the job will have
        try:
            return *device_nodes.preload(made, [g.minor for g in chosen if g.minor is not None]), []
        except OSError as error:
            raise RunFailed(detail=f"what it is to see of the GPUs cannot be noted: {error}") from error
    text = "the other GPUs cannot be hidden from the job here, only taken out of CUDA's sight"
    made["CUDA_VISIBLE_DEVICES"] = ",".join(g.uuid for g in chosen)
    return made, "", [Reason(id="gpus-not-hidden", text=text, hint="limosa doctor says what was not built")]


def _remember(
    name: str, command: Sequence[str], launched: Launched, cwd: str, *, supervisor: Identity | None, sees: str
) -> list[Reason]:
    """Writes the job's record; a job that runs is worth more than its record, so failing is a warning."""
    record = records.RunRecord(
        root=launched.identity,
        name=name,
        command=list(command),
        log=launched.log,
        cwd=cwd,
        supervisor=supervisor,
        sees=sees,
    )
    try:
        record.save()
    except (OSError, LimosaError) as error:
        text = f"the job cannot be called {name}, only by its pid {launched.identity.pid}: {error}"
        return [Reason(id="no-record", text=text)]
    return []
