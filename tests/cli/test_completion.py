"""Completion for bash, zsh and fish: the script is emitted, and it completes verbs and options."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.mark.parametrize(
    ("shell", "text"),
    [("bash", "complete -o default -F"), ("zsh", "#compdef limosa"), ("fish", "complete --command limosa")],
)
def test_the_script_is_emitted(cli, shell, text):
    ran = cli(env={"_LIMOSA_COMPLETE": f"source_{shell}"})
    assert ran.returncode == 0
    assert text in ran.stdout
    assert "_LIMOSA_COMPLETE" in ran.stdout


def test_bash_accepts_the_script(cli):
    script = cli(env={"_LIMOSA_COMPLETE": "source_bash"}).stdout
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n"], input=script, text=True, check=True, timeout=10)


def test_bash_completes_verbs_and_options(cli):
    ask = {"_LIMOSA_COMPLETE": "complete_bash", "COMP_CWORD": "1", "COMP_WORDS": "limosa re"}
    assert cli(env=ask).stdout.split() == ["resume", "restore", "recover"]
    ask = {"_LIMOSA_COMPLETE": "complete_bash", "COMP_CWORD": "2", "COMP_WORDS": "limosa checkpoint --leave"}
    assert cli(env=ask).stdout.split() == ["--leave-running"]


def test_zsh_and_fish_complete_verbs(cli):
    assert "suspend" in cli(env={"_LIMOSA_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "limosa susp"}).stdout
    fish = {
        "_LIMOSA_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": "limosa susp",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    assert "suspend" in cli(env=fish).stdout


def test_what_plan_takes_is_completed_too(cli):
    ask = {"_LIMOSA_COMPLETE": "complete_bash", "COMP_CWORD": "2", "COMP_WORDS": "limosa plan re"}
    assert cli(env=ask).stdout.split() == ["resume", "restore", "recover"]
