"""Completion for bash, zsh and fish: the script is emitted, and it completes verbs and options."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.mark.parametrize(
    ("shell", "text"),
    [
        ("bash", "complete -o nosort -F"),
        ("zsh", "#compdef limosa"),
        ("fish", "complete --no-files --command limosa"),
    ],
)
def test_the_script_is_emitted(cli, shell, text):
    ran = cli("--show-completion", shell)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert text in ran.stdout
    assert "_LIMOSA_COMPLETE" in ran.stdout


def test_bash_accepts_the_script(cli):
    script = cli("--show-completion", "bash").stdout
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n"], input=script, text=True, check=True, timeout=60)


def completed(cli, shell, line):
    """What limosa answers to what each shell's completion asks it; the shell itself need not be there."""
    words = line.split()
    word = {"bash": str(len(words) - 1), "zsh": str(len(words) - 1), "fish": words[-1]}[shell]
    said = cli(env={"_LIMOSA_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": word})
    assert said.stderr == ""
    if shell == "zsh":  # kind, word and help, a line each
        return said.stdout.splitlines()[1::3]
    return [answer.split("\t")[0].partition(",")[2] for answer in said.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("limosa re", ["resume", "restore", "recover"]),
        ("limosa checkpoint --leave", ["--leave-running"]),
        ("limosa suspend --release mem", ["memory-only"]),
        ("limosa plan re", ["resume", "restore", "recover"]),
    ],
)
def test_verbs_options_and_values_are_completed(cli, shell, line, expected):
    assert completed(cli, shell, line) == expected
