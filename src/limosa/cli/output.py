"""What a verb prints: its result on stdout and nothing else there; progress, notes and errors in words on stderr.

With ``-o json`` a verb prints exactly one object, with ``schema`` and ``warnings`` always in it, also when it fails
(``docs/json.md``). The exit code is the error's (``docs/exit-codes.md``).
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from limosa.cli.words import STATES, clean
from limosa.terms import JobState

if TYPE_CHECKING:
    from rich.console import Console

    from limosa.cli.progress import Display
    from limosa.errors import LimosaError, Reason
    from limosa.progress import Progress

SCHEMA = 1


class Format(str, enum.Enum):
    """How a result is printed."""

    text = "text"
    json = "json"


class Report:
    """Prints one verb's result, or its failure.

    Attributes:
        verb: the verb's name, for messages.
        fmt: text or JSON.
        quiet: say nothing on stderr but errors.
        verbose: say more on stderr (steps; the trace of an internal error).
        warnings: said on stderr as they come, and part of the JSON.
    """

    def __init__(self, verb: str, fmt: Format = Format.text, quiet: bool = False, verbose: int = 0):
        self.verb = verb
        self.fmt = fmt
        self.quiet = quiet
        self.verbose = verbose
        self.warnings: list[Reason] = []
        self.exit_code = 0
        self.dry_run = False  # what it prints is a plan
        self._display: Display | None = None
        self._drawing = threading.RLock()  # operations report from several threads at once
        self._closed = False
        self._printed = False

    @property
    def json(self) -> bool:
        """True where the result is printed as JSON."""
        return self.fmt is Format.json

    # --- results -------------------------------------------------------------------------------------------

    def result(self, value: Any, text: str | Callable[[Console], None], *, exit_code: int = 0) -> None:
        """Print the result.

        Args:
            value: a Struct or a dict: the JSON object without ``schema`` and ``warnings``.
            text: the same for people: a string, or a function that draws on a console (stdout).
            exit_code: what to exit with (``verify`` and ``plan`` print their result also when the answer is no).
        """
        self.close()
        self.exit_code = exit_code
        self._printed = True
        try:
            if self.json:
                fields = plain(value)
                own = fields.pop("warnings", [])
                known = [plain(w) for w in self.warnings]
                _write_json({"schema": SCHEMA, **fields, "warnings": [*known, *(w for w in own if w not in known)]})
            elif callable(text):
                text(console())
            elif text:
                sys.stdout.write("".join(clean(line) + "\n" for line in text.split("\n")))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:  # a full disk, say: what was done is done
            self._unwritten(error, text)

    def _unwritten(self, error: OSError, text: Any) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it is not tried again at the end
        what = "plan" if self.dry_run else "result"
        done = f"exit code {self.exit_code} is the answer" if self.exit_code else "it was done"
        if self.dry_run:
            done = "nothing was touched"
        self._say(f"the {what} of limosa {self.verb} could not be written ({error.strerror}): {done}")
        if isinstance(text, str) and text:
            for line in text.splitlines():
                self._say(f"  {line}")
        self.exit_code = self.exit_code or 1

    def warn(self, *reasons: Reason) -> None:
        """Keep warnings for the JSON and say them on stderr."""
        for reason in reasons:
            if reason not in self.warnings:
                self.warnings.append(reason)
                self.tell("warning: " + reason.text + (f" ({reason.hint})" if reason.hint else ""))

    # --- stderr --------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """One line on stderr, unless ``-q``."""
        if not self.quiet:
            self._say(text)

    def detail(self, text: str) -> None:
        """One line on stderr, with ``-v``."""
        if self.verbose:
            self._say(text)

    def _say(self, text: str) -> None:
        text = clean(text)  # it names others' processes and files
        try:
            if self._display is not None:
                self._display.above(f"limosa: {text}")
            else:
                sys.stderr.write(f"limosa: {text}\n")
        except OSError:
            pass  # a terminal that has gone away must not end an operation

    def progress(self, event: Progress) -> None:
        """What operations are given as ``progress=``: a live display on a terminal, lines with ``-v``."""
        if self.quiet:
            return
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from limosa.cli.progress import Display

            with self._drawing:
                if self._closed:  # the last word of a thread that was slower than the operation
                    return
                if self._display is None:
                    self._display = Display()
                self._display.update(event)
        elif self.verbose and (event.message or event.done is None):
            self._say(f"{event.step}{': ' + event.message if event.message else ''}")

    def close(self) -> None:
        """End the live display for good; the terminal is as it was."""
        with self._drawing:
            self._closed = True
            if self._display is not None:
                self._display.close()
                self._display = None

    # --- failures ------------------------------------------------------------------------------------------

    def failure(self, error: LimosaError) -> int:
        """Print an error and return its exit code."""
        self.close()
        if error.exit_code == 2 and not error.hint:
            error.hint = f"limosa {self.verb} --help".replace("limosa limosa", "limosa")
        if error.warnings:
            self.warn(*error.warnings)
        if self.json and not self._printed:
            _write_json({"schema": SCHEMA, "error": error_object(error), "warnings": [plain(w) for w in self.warnings]})
        self.problem(error)
        return int(error.exit_code)

    def problem(self, error: LimosaError, about: str = "") -> None:
        """Say an error on stderr: what happened, what state the job is in, what to type next."""
        self._say(f"{about}{error.message}")
        if error.job_state == JobState.GONE and self._brings_job():  # as it was before
            self._say("nothing of the job runs; the image is as it was")
        elif error.job_state:
            self._say(f"the job's state now: {STATES.get(error.job_state, error.job_state)}")
        if error.hint:
            self._say(f"hint: {error.hint}")

    def _brings_job(self) -> bool:
        from limosa.operation.verbs import RESTORE

        return self.verb == RESTORE.name

    def interrupted(self) -> int:
        """Ctrl-C outside of an operation: 22 where no job was touched, else 1 with what is where."""
        from limosa.cli.state import whereabouts
        from limosa.errors import CancelledUndone, LimosaError

        state, text = whereabouts()
        message = f"limosa {self.verb} was interrupted; {text}".replace("limosa limosa", "limosa")
        if state:
            return self.failure(LimosaError(message, hint="limosa recover", job_state=state))
        return self.failure(CancelledUndone(message))

    def crash(self, error: BaseException) -> int:
        """An exception that nobody foresaw: exit code 1, the job's state in the message, the trace with ``-v``."""
        from limosa.cli.state import whereabouts
        from limosa.errors import LimosaError, UsageError

        self.close()
        state, text = whereabouts()
        if isinstance(error, FileNotFoundError) and not state and _is_nowhere():
            return self.failure(UsageError(detail="the folder that you are in has been removed", hint="cd elsewhere"))
        if isinstance(error, OSError) and _is_of_echo(error):
            return self.failure(LimosaError(f"the output could not be written ({error.strerror})"))
        if self.verbose or os.environ.get("LIMOSA_TRACE"):
            _print_trace(error)
        return self.failure(
            LimosaError(
                f"internal error: {type(error).__name__}: {error}; {text}",
                hint="limosa recover, and the same command with -v shows where it happened",
                job_state=state,
            )
        )

    def usage(self, error: Any, verb: str = "") -> int:
        """A usage error that the option parser found: exit code 2, as JSON where JSON was asked for.

        Args:
            error: what the parser raised.
            verb: the verb that was typed, or "": a parser that lacks a value does not say for which verb.
        """
        from limosa.errors import UsageError

        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(error.format_message() + "\n")
            return 2
        from limosa.cli.meant import meant

        ctx = getattr(error, "ctx", None)
        path = ctx.command_path if ctx is not None else f"limosa {verb}".rstrip()
        message, guess = meant(error)
        return self.failure(UsageError(message, hint=f"{guess}{path} --help"))


def _print_any_path() -> None:
    """Paths need not be UTF-8. A Ctrl-C in the middle would leave a stdout that nobody can write to: it comes after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def reporting(verb: str, fmt: Format, quiet: bool = False, verbose: int = 0) -> Iterator[Report]:
    """Run a verb: whatever it raises is printed, and the exit code is the error's.

    Raises:
        click.exceptions.Exit: with the exit code, where it is not 0.
    """
    from limosa.errors import LimosaError

    report = Report(verb, fmt, quiet, verbose)
    _print_any_path()
    try:
        yield report
        code = report.exit_code
    except LimosaError as error:
        if verbose and error.exit_code == 1:
            _print_trace(error)
        code = report.failure(error)
    except KeyboardInterrupt:
        code = report.interrupted()
    except (BrokenPipeError, SystemExit):  # rich makes the second of the first
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone; the exit code still tells
        code = report.exit_code
    except Exception as error:
        if isinstance(error, click.exceptions.Exit) or hasattr(error, "format_message"):
            raise  # the option parser's own: entry() knows them
        code = report.crash(error)
        if verb == "run":
            code = 125  # 1 would look like the job's own
    finally:
        report.close()
    if code:
        raise click.exceptions.Exit(code)


def _is_nowhere() -> bool:
    """Whether the working folder has been removed: no relative path leads anywhere."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _is_of_echo(error: OSError) -> bool:
    """Whether ``click.echo`` raised it, which writes what is no verb's result (a help, a log): stdout is full, say."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code is click.echo.__code__


def _print_trace(error: BaseException) -> None:
    for line in "".join(traceback.format_exception(error)).splitlines():
        sys.stderr.write(f"  {clean(line)}\n")  # not at the margin, where our own words are


def error_object(error: LimosaError) -> dict[str, Any]:
    """The ``error`` of the JSON contract: id, exit_code, message, hint, job_state, and ``image`` where there is one."""
    found: dict[str, Any] = {
        "id": error.id,
        "exit_code": error.exit_code,
        "message": error.message,
        "hint": error.hint,
        "job_state": error.job_state,
    }
    if error.fields.get("image"):
        found["image"] = str(error.fields["image"])
    reasons = getattr(error, "reasons", None)
    if reasons:
        found["reasons"] = [plain(r) for r in reasons]
    return found


def plain(value: Any) -> Any:
    """Structs to dicts that JSON can hold: every key text, every text valid Unicode."""
    import msgspec

    return _valid(msgspec.to_builtins(value, enc_hook=str, str_keys=True))


def _valid(value: Any) -> Any:
    """Bytes of a path or command line that are not UTF-8 become U+FFFD: JSON has no others."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_valid(v) for v in value]
    if isinstance(value, dict):
        return {_valid(k): _valid(v) for k, v in value.items()}
    return value


def _write_json(value: dict[str, Any]) -> None:
    import msgspec

    encoded = msgspec.json.encode(_valid(value))
    if not sys.stdout.isatty():
        sys.stdout.write(encoded.decode() + "\n")
    else:  # JSON may have control characters above 0x7e as they are
        pretty = msgspec.json.format(encoded, indent=2).decode()
        sys.stdout.write("\n".join(clean(line, r"\u{:04x}") for line in pretty.split("\n")) + "\n")
    sys.stdout.flush()


def console() -> Console:
    """A console on stdout: colours only on a terminal and without NO_COLOR; never cut where a program reads."""
    from rich.console import Console

    tty = sys.stdout.isatty()
    return Console(file=sys.stdout, width=None if tty else 10_000, highlight=False, markup=False, emoji=False)


def json_wanted(args: Sequence[str]) -> bool:
    """Whether the arguments ask for JSON; needed where they are too wrong to be parsed."""
    for at, arg in enumerate(args):
        if arg == "--":
            return False
        if arg in ("-o", "--format") and at + 1 < len(args) and args[at + 1] == "json":
            return True
        if arg in ("-ojson", "--format=json"):
            return True
    return False
