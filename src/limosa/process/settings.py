"""The settings file: a few values that would otherwise be options on every call.

``/etc/limosa.toml`` for the machine, then ``$XDG_CONFIG_HOME/limosa/config.toml`` (``~/.config/limosa/config.toml``)
for the user, whose values win. Known keys: ``criu`` (a program or a private folder), ``debian_mirror`` (where
:mod:`limosa.process.criu.fetch` gets packages).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from limosa.errors import UsageError
from limosa.start import user_folder

SYSTEM_FILE = Path("/etc/limosa.toml")
_WAY_OUT = "mend that file, or remove it"
# Python 3.10 has no tomllib; what the settings need of TOML there is one string a line.
_LINE = re.compile(r"""^\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)')\s*(?:#.*)?$""")


def user_file() -> Path:
    """Return the user's settings file; it need not exist."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "limosa" / "config.toml"


def text(key: str) -> str | None:
    """Return a setting that is a text, or None where nobody has set it.

    Args:
        key: its name.

    Raises:
        UsageError: a settings file cannot be read, or the value is no text.
    """
    value: Any = None
    for path in (SYSTEM_FILE, user_file()):
        value = _read(path).get(key, value)
    if value is not None and not isinstance(value, str):
        where = f"mend {user_file()} or {SYSTEM_FILE}"
        raise UsageError(detail=f"the setting {key} must be a text in quotes", hint=where)
    return value or None


def _read(path: Path) -> dict[str, Any]:
    """Return the values of one file; empty where there is none."""
    try:
        raw = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(detail=f"the settings file {path} cannot be read: {error}", hint=_WAY_OUT) from None
    try:
        import tomllib  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _read_lines(path, raw)
    try:
        return dict(tomllib.loads(raw))
    except ValueError as error:
        raise UsageError(detail=f"the settings file {path} is not TOML: {error}", hint=_WAY_OUT) from None


def _read_lines(path: Path, raw: str) -> dict[str, Any]:
    """Read ``key = "text"`` lines and comments, which is all of TOML that the known settings need."""
    values: dict[str, Any] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", "[")):
            continue
        match = _LINE.match(line)
        if match is None:
            raise UsageError(detail=f'the settings file {path}, line {number}: expected key = "text"', hint=_WAY_OUT)
        double, single = match.group(2), match.group(3)
        values[match.group(1)] = re.sub(r"\\(.)", r"\1", double) if double is not None else single
    return values
