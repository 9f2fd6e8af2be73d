"""``limosa run``: start a job that can be checkpointed, show its output, pass signals and its exit code on."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from limosa.cli.options import FormatOption, Quiet, Verbose
from limosa.cli.output import Format, Report, reporting
from limosa.errors import LimosaError, Reason, RunFailed, UsageError
from limosa.parking import preload
from limosa.process import device_nodes, records
from limosa.process.follow import Signals, follow_job, stop_adopting
from limosa.process.identity import Identity
from limosa.process.launch import Launched, launch

CONTEXT_SETTINGS = {"allow_interspersed_args": False}  # what follows COMMAND is COMMAND's
ENDED_BY_CHECKPOINT = 75


class Part(str, Enum):
    """What of the shim can be left out."""

    bulk = "bulk"
    stack = "stack"


_INTERPRETER = re.compile(r"(python|pypy)[0-9.]*")


def command(
    command_line: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to start.", show_default=False)],
    *,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="FILE", help="Append its output here (default: a new NAME.limosa.log)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What to call it (default: from COMMAND).")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the pid and leave it running.")] = False,
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="GPU,...", help="Let it see these GPUs only.")] = None,
    no_seccomp: Annotated[
        bool, typer.Option("--no-seccomp", help="Do not hide io_uring, which CRIU cannot dump.")
    ] = False,
    no_shim: Annotated[
        bool, typer.Option("--no-shim", help="Leave its device memory to the driver: moving it takes longer.")
    ] = False,
    without: Annotated[
        list[Part] | None,
        typer.Option("--without", help="Leave out a part of what makes the driver's own steps shorter."),
    ] = None,
    fmt: FormatOption = Format.text,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Start a job that can be checkpointed.

    COMMAND gets a session of its own, no terminal and no pipes: stdin is
    /dev/null, its output goes to a file, which is shown here until the job
    ends. Ctrl-C and other signals are passed on, also while it is moved,
    and its exit code is limosa's. It does not get to use io_uring.

    Exit code 75: a checkpoint ended the job. 125-127: it was not started.
    """
    with reporting("run", fmt, quiet, verbose) as report:
        try:
            env = None if no_shim else preload(without=[part.value for part in without or ()])
            options = {"log": log, "name": name, "detach": detach, "seccomp": not no_seccomp, "env": env}
            options["gpus"] = gpus
            report.exit_code = run(command_line, report, **options)  # type: ignore[arg-type]
        except LimosaError as error:
            if not isinstance(error, RunFailed):
                error.exit_code = RunFailed.exit_code  # type: ignore[misc]  # 1..40 would look like the job's own
            raise


def run(
    command_line: Sequence[str],
    report: Report,
    *,
    log: Path | None = None,
    name: str | None = None,
    detach: bool = False,
    seccomp: bool = True,
    env: Mapping[str, str] | None = None,
    gpus: str | None = None,
) -> int:
    """Starts the job; follows it to its end unless ``detach``.

    Returns:
        The exit code for ``limosa run``.

    Raises:
        LimosaError: it was not started.
    """
    if report.json and not detach:
        raise RunFailed(detail="-o json needs --detach: while attached, stdout is the job's output")
    with Signals() if not detach else contextlib.nullcontext() as signals:
        report.warn(*records.runtime_dir().warnings)
        with records.lock("jobs"):
            if name is not None:
                records.check_name(name)
            chosen = name or default_name(command_line)
            env, sees = _only(gpus, env, report) if gpus is not None else (env, "")
            try:
                launched = launch(command_line, log, env=env, name=chosen, seccomp=seccomp, detach=detach)
            except BaseException:
                device_nodes.forget(sees)
                raise
            _remember(chosen, command_line, launched, report, attached=not detach, sees=sees)
        report.warn(*launched.warnings)
        job = launched.identity
        if signals is None:
            fields = {"pid": job.pid, "name": chosen, "log": launched.log}
            report.result(fields, str(job.pid))
            return 0
        signals.to(job)
        report.tell(f"{chosen} is process {job.pid}, its output is kept in {launched.log}")
        return follow(job, launched.log, report, offset=launched.log_start, signals=signals)


def follow(
    job: Identity, log: str, report: Report, *, offset: int | None = None, signals: Signals | None = None
) -> int:
    """Shows the job's output and passes signals on until it ends (``run``, ``restore --attach``).

    Args:
        job: its root, a child of this process (``process.follow.adopting``).
        log: the file its output goes to, or "".
        report: where notes go.
        offset: where in the log to begin, in bytes; its end now where None.
        signals: already catching, or None: for the time of the call.

    Returns:
        The job's exit code, 128 + signal, 75 where a checkpoint ended it, 125 where nobody can know.
    """
    with contextlib.ExitStack() as stack:
        if signals is None:
            stack.enter_context(Signals()).to(job)
            stop_adopting()  # a restore did; what the job itself orphans from here on is init's to reap
        known = records.RunRecord.of(job)
        ended = follow_job(job, log, _to_stdout, offset=offset)
    records.RunRecord(root=job, name="", command=[]).forget()
    if known is not None and not ended.image:  # else somebody may have restored it by now
        device_nodes.forget(known.sees)
    if ended.image:
        report.tell(f"a checkpoint ended the job; its image is {ended.image}")
        report.tell(f"hint: limosa restore {ended.image}")
        return ENDED_BY_CHECKPOINT
    if ended.exit_code is None:
        report.tell(f"process {job.pid} has ended; it was not a child of this limosa, so its exit code is not known")
        return RunFailed.exit_code
    return ended.exit_code


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


def _only(gpus: str, env: Mapping[str, str] | None, report: Report) -> tuple[dict[str, str], str]:
    """How a job is to see these GPUs only.

    Returns:
        Its environment, and the file that says what it sees; "" where that is not hidden from it.

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
        return made, ""
    if device_nodes.LIBRARY.is_file() and all(g.minor is not None for g in found.gpus):
        made.pop("CUDA_VISIBLE_DEVICES", None)  # it counts, or names, other GPUs than the job will have
        try:
            return device_nodes.preload(made, [g.minor for g in chosen if g.minor is not None])
        except OSError as error:
            raise RunFailed(detail=f"what it is to see of the GPUs cannot be noted: {error}") from error
    text = "the other GPUs cannot be hidden from the job here, only taken out of CUDA's sight"
    report.warn(Reason(id="gpus-not-hidden", text=text, hint="limosa doctor says what was not built"))
    made["CUDA_VISIBLE_DEVICES"] = ",".join(g.uuid for g in chosen)
    return made, ""


def _remember(
    name: str, command_line: Sequence[str], launched: Launched, report: Report, *, attached: bool, sees: str
) -> None:
    """Writes the job's record; a job that runs is worth more than its record, so failing is a warning."""
    record = records.RunRecord(
        root=launched.identity,
        name=name,
        command=list(command_line),
        log=launched.log,
        cwd=os.getcwd(),
        supervisor=Identity.of(os.getpid()) if attached else None,
        sees=sees,
    )
    try:
        record.save()
    except (OSError, LimosaError) as error:
        text = f"the job cannot be called {name}, only by its pid {launched.identity.pid}: {error}"
        report.warn(Reason(id="no-record", text=text))


def _to_stdout(data: bytes) -> None:
    """Writes to stdout past Python's buffers; a reader that has gone away does not end the job."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
