"""What is named and cannot be is refused with a code of its own: never an internal error."""

from __future__ import annotations

import os

import pytest

from limosa.cli.main import entry
from limosa.process.identity import pid_in

LONG = "x" * 5000


@pytest.fixture
def limosa(tmp_path, runtime, monkeypatch, capsys):
    """The command line in this process: arguments → exit code, and what it said."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        with pytest.raises(SystemExit) as left:
            entry(arguments)
        return left.value.code, "".join(capsys.readouterr())

    return go


@pytest.mark.parametrize("job", ["²", "४", "99999999999999999999", "9" * 5000, "\udcff"])
@pytest.mark.parametrize("verb", ["move", "suspend", "resume", "toggle"])
def test_what_looks_like_a_pid_and_is_none_is_a_name_that_nobody_has(limosa, verb, job):
    to = ["--to", "1"] if verb == "move" else []
    assert limosa(verb, job, *to)[0] == 10


def test_a_pid_is_digits():
    assert [pid_in(text) for text in ("4711", "007", "0", "²", "४", "-1", "1 ", "9" * 11)] == [4711, 7, 0, *[None] * 5]


@pytest.mark.parametrize("name", [LONG, f"a/{LONG}", "a/" * 5000, "loop", "loop/x"])
@pytest.mark.parametrize("verb", ["rm", "inspect", "verify", "restore"])
def test_a_name_that_no_file_can_have_is_no_image(limosa, tmp_path, verb, name):
    os.symlink("loop", tmp_path / "loop")
    code, said = limosa(verb, name)
    assert code in (2, 16), said
    assert len(said) < 12000


@pytest.mark.parametrize(("name", "code"), [("nothing", 2), ("file", 2), ("loop", 2), (LONG, 2), ("folder", 0)])
def test_recover_says_what_is_wrong_with_a_folder(limosa, tmp_path, name, code):
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    found, said = limosa("recover", name)
    assert found == code
    assert code == 0 or (said.startswith("limosa: ") and name[:20] in said)


EMPTY = ["rm", "recover", "restore", "checkpoint 1 --output", "move --to 1"]


@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_argument_is_a_variable_that_is_not_set(limosa, tmp_path, line):
    """Not the folder one is in, which may be an image."""
    code, said = limosa(*line.split(), "")
    assert (code, "is empty" in said) == (2, True), said
    assert tmp_path.exists()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("images", 2),
        ("rm x", 2),
        ("checkpoint 1 --output x", 2),
        ("plan checkpoint 1 --output x", 2),
        ("restore x", 2),
        ("run -d -- sleep 0", 125),
        ("ps", 0),
    ],
)
def test_in_a_folder_that_is_gone_what_needs_it_says_so(limosa, tmp_path, monkeypatch, line, code):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    found, said = limosa(*line.split())
    assert found == code, said
    assert "internal error" not in said
    assert code == 0 or "has been removed" in said


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "T", "9e9", "४M", "-1", "1" * 25])
def test_a_size_that_no_machine_has_is_none(limosa, size):
    assert limosa("arena", size)[0] == 2


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "1e300"])
def test_a_time_that_never_comes_is_none(limosa, seconds):
    assert limosa("suspend", "1", "--timeout", seconds)[0] == 2
