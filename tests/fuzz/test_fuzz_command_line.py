"""Whatever is typed is answered: a documented exit code, never 1, no traceback, and nothing is started or made."""

from __future__ import annotations

import errno
import functools
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from fuzz.frame import Fuzz
from fuzz.mutate import NUMBERS, TEXTS, mutated_words
from limosa import cdi, start
from limosa.cli import main
from limosa.process import launch
from limosa_softgpu import node

VERBS = (*main.VERBS, *main.ALIASES)
NOT_HERE = ("demo", "wait", "stop", "logs")
"""Verbs of which only the options are read: they take a minute, wait for somebody else's process, or end it."""
SLOW = ("ps", "list", "recover")
"""Verbs that look at all processes, whatever is typed: fewer of them."""
PIDS = ("4194305", "0", "1", "2147483648", "99999999999999999999", "-7", "007", "²", "४", "1 2", "4711x")


PATHS = ("folder", "file", "link", "loop", "fifo", "folder/inner", "new", "file/x", "/dev/null", "/nowhere/x")
SIZES = ("64M", "1e9G", "0", "16MiB", "-1M", "9" * 400 + "T", "1,0", "0:1", "0=1", "H200", "all")


class Started(BaseException):
    """Something was to be started. No Exception: nobody takes it for a failure of his own."""


@pytest.fixture
def inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder from which nothing is started: whoever tries ends this case well."""

    def never(*_: Any, **__: Any) -> Any:
        raise Started

    def fails(*_: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    for module, name in ((start, "popen"), (start, "run"), (node, "enter"), (node, "run_here")):
        monkeypatch.setattr(module, name, never)
    for name in ("install", "install_with_spec", "remove", "write_spec"):  # on this machine, or wherever it is told to
        monkeypatch.setattr(cdi, name, never)
    monkeypatch.setattr(launch, "_spawn", fails)
    monkeypatch.setattr(main, "verb", functools.cache(main.verb))
    monkeypatch.setattr(main.gc, "freeze", lambda: None)  # as it leaves, which it does not here
    for name in ("posix_spawn", "execv", "execve", "execvpe", "kill", "killpg", "fork"):
        monkeypatch.setattr(os, name, never)
    monkeypatch.setattr(signal, "pidfd_send_signal", never)
    for name in ("folder", "folder/inner"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p), p.lstat().st_mode, p.lstat().st_size) for p in folder.rglob("*"))


def command_line(source: random.Random, commands: dict[str, Any]) -> list[str]:
    """A verb with some of its own options and arguments, each with a value of its kind or a strange one."""
    name = source.choice(VERBS)
    if name in SLOW and source.random() < 0.8:
        name = "rm"
    words = [name]
    for parameter in commands[name].params:
        option = parameter.param_type_name == "option"
        if source.random() > (0.25 if option else 0.9):
            continue
        if option:
            words.append(source.choice([*parameter.opts, *parameter.secondary_opts]))
            if parameter.is_flag or getattr(parameter, "count", False):
                continue
        for _ in range(source.choice([1, 1, 2, 5]) if parameter.nargs == -1 else 1):
            words.append(value(source, parameter))
    return words


def choices(parameter: Any) -> list[str]:
    """The values that an option takes, where they are a few."""
    return list(getattr(parameter.type, "choices", []))


def value(source: random.Random, parameter: Any) -> str:
    kinds = [
        *([known] * 4 if (known := choices(parameter)) else []),
        *(list(map(str, NUMBERS)), PIDS, PATHS, SIZES, TEXTS),
    ]
    return source.choice(source.choice(kinds))


def test_any_command_line_is_answered(
    fuzz: Fuzz, inert: Path, runtime: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {name: main.verb(main.ALIASES.get(name, name)) for name in VERBS}
    before = listing(inert)
    options = sorted({word for one in commands.values() for p in one.params for word in p.opts if word[0] == "-"})
    for case in fuzz.cases(limit=20.0):
        words = command_line(case.random, commands)
        if case.random.random() < 0.3:
            words = mutated_words(case.random, words, [*options, *VERBS])
        words = [os.fsdecode(word.encode(errors="surrogatepass").replace(b"\0", b"")) for word in words]
        if words[:1] and words[0] in NOT_HERE and "--help" not in words:
            words.insert(1, "--help")
        with case:
            try:
                main.entry(words)
            except Started:
                code: Any = 0
            except SystemExit as left:
                code = left.code
            out, err = capsys.readouterr()
            assert code != 1, (words, err)
            assert code in (0, 2, *range(10, 25), 40, 41, 75, 125, 126, 127), (words, code, err)
            assert "Traceback" not in out + err, words
            assert "internal error" not in out + err, (words, err)
            assert listing(inert) == before, words
