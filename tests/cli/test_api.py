"""The public names of the package: each is there, each is documented."""

from __future__ import annotations

import inspect
from pathlib import Path

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
    assert {"timeout", "progress", "cancel"} <= set(inspect.signature(getattr(limosa, name)).parameters)


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
