"""The public names of the package: each is there, each is documented."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import limosa

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("name", [n for n in limosa.__all__ if n != "__version__"])
def test_every_public_name_is_there_and_documented(name):
    value = getattr(limosa, name)
    assert inspect.getdoc(value)
    assert f"limosa.{name}" in PAGE


@pytest.mark.parametrize("name", ["move", "suspend", "resume", "toggle", "checkpoint", "restore"])
def test_what_takes_time_can_be_limited_watched_and_cancelled(name):
    from limosa.operation.options import DoingOptions

    taken = inspect.signature(getattr(limosa, name)).parameters
    keywords = {*taken, *(DoingOptions.__annotations__ if "Unpack[DoingOptions]" in str(taken.get("doing")) else ())}
    assert {"timeout", "progress", "cancel"} <= keywords


def test_every_error_is_a_name_of_the_package_with_its_id_and_exit_code():
    from limosa import errors

    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.LimosaError)}
    for name, found in classes.items():
        assert getattr(limosa, name) is found
        if found is not errors.LimosaError:
            assert f"| `limosa.{name}` | `{found.id}` | {found.exit_code} |" in PAGE


def test_dir_lists_them_and_others_are_errors():
    assert set(limosa.__all__) == set(dir(limosa))
    with pytest.raises(AttributeError, match="no attribute 'migrate'"):
        limosa.migrate  # noqa: B018


FUNCTIONS = [name for name in limosa.__all__ if inspect.isfunction(getattr(limosa, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_takes_whatever_it_is_given(name: str) -> None:
    taken = inspect.signature(getattr(limosa, name)).parameters.values()
    assert [p.name for p in taken if p.annotation in (inspect.Parameter.empty, "Any", Any)] == []


def test_the_keywords_of_a_verb_are_those_of_its_record() -> None:
    from limosa.operation import dump_options, restore_options

    for keywords, record in (
        (limosa.PlanCheckpointOptions, dump_options.Options),
        (limosa.RestoreOptions, restore_options.Options),
    ):
        told = {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}
        assert told == record.__annotations__
    from limosa.operation.options import PlanOptions

    one_by_one = (limosa.PlanCheckpointOptions, limosa.MoveOptions, limosa.SuspendOptions, limosa.ToggleOptions)
    assert PlanOptions.__annotations__ == {k: v for one in one_by_one for k, v in one.__annotations__.items()}


@pytest.mark.parametrize("verb", ["move", "suspend", "resume", "toggle", "checkpoint"])
def test_a_plan_refuses_what_its_verb_does_not_know(verb: Any) -> None:
    with pytest.raises(limosa.UsageError, match=f"{verb} has no option bogus"):
        limosa.plan(verb, 1, bogus=1)  # type: ignore[call-overload]
    if verb != "suspend":
        with pytest.raises(limosa.UsageError, match="has no option release"):
            limosa.plan(verb, 1, release="all")


def test_what_cannot_be_is_said_before_any_job_is_looked_at() -> None:
    for verb in (limosa.move, limosa.resume):
        with pytest.raises(limosa.InvalidArgument, match=r"driver='x': give an open limosa\.gpu\.Driver, or leave"):
            verb(1, to="1", driver="x")  # type: ignore[arg-type]
    for verb in (limosa.move, limosa.resume):
        with pytest.raises(limosa.InvalidArgument, match="--force=no-such-id: no refusal with this id"):
            verb(1, to="1", force=["no-such-id"])
    with pytest.raises(limosa.InvalidArgument, match="a list of ids is needed"):
        limosa.suspend(1, force="jax")
    for driver in (limosa.ps, functools.partial(limosa.move, [1, 2], to="1", dry_run=True)):
        with pytest.raises(limosa.InvalidArgument, match="give an open"):
            driver(driver=1)


WRONG = """
import limosa
limosa.checkpoint("train", "/data", leave_runing=True)
limosa.restore("/data", verify="no")
limosa.plan("toggle", "train", to="1")
limosa.plan("checkpoint", "train", leave_running=True)
limosa.suspend("train", release="everything")
limosa.toggle("train", to="1")
limosa.move("train", to="1", time_out=5.0)
"""
RIGHT = """
import threading
import limosa
limosa.checkpoint("train", "/data", leave_running=True, rate=1e9, timeout=5.0, cancel=threading.Event())
limosa.restore("/data", verify=False, to="1", force=["cgroup"])
limosa.move("train", to="1", timeout=5.0, progress=lambda _: None, cancel=threading.Event(), one_by_one=True)
limosa.suspend(["train"], release="memory-only", max_pause=1.0, force=["jax"], dry_run=True)
limosa.plan("move", 4711, gpu_map={"0": "1"})
limosa.plan("checkpoint", "train", output="/data")
limosa.plan_restore("/data", to="1")
more: limosa.CheckpointOptions = {"rounds": 2}
limosa.checkpoint("train", "/data", **more)
"""


@pytest.mark.timeout(300)
def test_a_type_checker_finds_every_wrong_keyword_and_no_right_one(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    settings = str(Path(__file__).parents[2] / "pyproject.toml")
    argv = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", "/dev/null", "--no-error-summary"]
    ran = subprocess.run(
        [*argv, "--follow-imports", "silent", "wrong.py", "right.py"],
        cwd=tmp_path, env={"MYPYPATH": str(Path(limosa.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    lines = [line for line in ran.stdout.splitlines() if "error:" in line]
    assert [line.split(":")[:2] for line in lines] == [["wrong.py", str(n)] for n in range(3, 10)], ran.stdout
