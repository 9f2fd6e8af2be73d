"""``limosa``: finds the verb, runs it, and turns what went wrong before the verb began into words or JSON."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from limosa.cli.output import Format, Report, json_wanted

if TYPE_CHECKING:
    from limosa.errors import LimosaError

VERBS: dict[str, tuple[str, str]] = {
    "run": ("limosa.cli.run", "Start a job that can be checkpointed."),
    "gpus": ("limosa.cli.gpus", "List the GPUs and who is on them."),
    "ps": ("limosa.cli.ps", "List jobs and whether they can be moved (also: list)."),
    "logs": ("limosa.cli.logs", "Show a job's output."),
    "wait": ("limosa.cli.wait", "Wait for a job to end, and exit as it did."),
    "stop": ("limosa.cli.stop", "End a job: SIGTERM, then SIGKILL."),
    "plan": ("limosa.cli.plan", "Say what a verb would do, and touch nothing."),
    "move": ("limosa.cli.move", "Move running jobs to other GPUs."),
    "suspend": ("limosa.cli.suspend", "Suspend jobs into host memory; their GPUs become free."),
    "resume": ("limosa.cli.resume", "Bring suspended jobs back, here or on other GPUs."),
    "toggle": ("limosa.cli.toggle", "Suspend what runs, resume what is suspended."),
    "arena": ("limosa.cli.arena", "Have host memory ready for suspends, show it, give it back."),
    "checkpoint": ("limosa.cli.checkpoint", "Write a job to disk and end it, or let it run on."),
    "restore": ("limosa.cli.restore", "Bring a job back from disk."),
    "images": ("limosa.cli.images", "List the images in a folder."),
    "inspect": ("limosa.cli.inspect", "Show what is in an image."),
    "verify": ("limosa.cli.verify", "Check every byte of an image."),
    "rm": ("limosa.cli.rm", "Remove images and what unfinished ones left."),
    "recover": ("limosa.cli.recover", "Finish or undo what a killed limosa left."),
    "doctor": ("limosa.cli.doctor", "Say what works on this machine and how to fix the rest."),
    "cdi": ("limosa.cli.cdi", "Let containers have what limosa run gives a job."),
    "softgpu": ("limosa.cli.softgpu", "Run a program on a node of GPUs in software."),
    "demo": ("limosa.demo.command", "Disturb a real training; compare its bits with a twin's."),
}
ALIASES = {"list": "ps"}
_STARTERS = ("run", "softgpu")  # what follows is a command's, and may be empty


class Verbs(click.Group):
    """The verbs by name; a verb's module is imported when that verb is asked for and not before."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs in the order in which people meet them."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command object of one verb, or None where there is no such verb."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in VERBS:
            return None
        return verb(name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of verbs in ``limosa --help``, without importing one of them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


def verb(name: str) -> Any:
    """The command object of verb ``name`` (``KeyError`` where there is none)."""
    return importlib.import_module(VERBS[name][0]).command


def _print_version(ctx: click.Context, _: Any, wanted: bool) -> None:
    if wanted:
        from limosa import __version__

        click.echo(f"limosa {__version__}")
        ctx.exit()


def _print_completion(ctx: click.Context, _: Any, shell: str | None) -> None:
    if shell is not None:
        from click.shell_completion import get_completion_class

        found = get_completion_class(shell)
        assert found is not None
        click.echo(found(app, {}, "limosa", "_LIMOSA_COMPLETE").source())
        ctx.exit()


app = Verbs(
    name="limosa",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            callback=_print_version,
            is_eager=True,
            expose_value=False,
            help="Print the version and exit.",
        ),
        click.Option(
            ["--show-completion"],
            type=click.Choice(["bash", "zsh", "fish"]),
            metavar="SHELL",
            callback=_print_completion,
            is_eager=True,
            expose_value=False,
            help='Print what completes limosa in bash, zsh or fish: eval "$(limosa --show-completion bash)".',
        ),
    ],
    help="Move, suspend and checkpoint running GPU jobs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="limosa VERB --help tells more. JOB is a pid, a name given to limosa run, or a container (podman:train).",
)


def entry(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code that tells what state the job is in (docs/exit-codes.md)."""
    args = list(sys.argv[1:] if argv is None else argv)
    report = Report("limosa", Format.json if json_wanted(args) else Format.text)
    if "" in args and args[0] not in _STARTERS:
        leave(report.failure(_empty_argument(args[0])))
    try:
        code = app.main(args=args, prog_name="limosa", standalone_mode=False)
    except click.ClickException as error:
        code = report.usage(error, args[0] if args and args[0] in VERBS else "")
        if args[:1] == ["run"]:
            code = 125  # below that may be the job's own exit code
    except (KeyboardInterrupt, click.Abort):
        code = report.interrupted()
    except BrokenPipeError:
        code = 0
    except SystemExit as left:  # a reader of --help that has gone away, or what completion says
        code = 0 if type(sys.stdout).__name__.endswith("PacifyFlushWrapper") else left.code  # click's
    except Exception as error:
        code = report.crash(error)
    leave(code if isinstance(code, int) else 0)


def _empty_argument(verb: str) -> LimosaError:
    """What is said to `limosa rm "$IMAGE"` where that is not set: the folder one is in was not meant."""
    from limosa.errors import UsageError

    return UsageError(
        detail="an argument is empty: is a variable not set?", hint=f"limosa {verb} --help".replace("  ", " ")
    )


def leave(code: int) -> NoReturn:
    """Flush and exit; a reader that has gone away (``limosa ps | head``) is not an error."""
    for stream, fd in ((sys.stdout, 1), (sys.__stdout__, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    gc.freeze()  # the kernel takes it all back
    sys.exit(code)
