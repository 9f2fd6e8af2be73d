"""docs/environment.md names the variables that the code reads, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from limosa import start

PROJECT = Path(__file__).parents[2]
INTERNAL = {
    "LIMOSA_RESIDENT_TELLS",  # from one process of Limosa's to the next
    "LIMOSA_DEMO_WHY",
    "LIMOSA_CRIU_RETRY",  # told to the CRIU plugin
    "LIMOSA_LOCKS",
    "LIMOSA_GUARD",
    "LIMOSA_PRELOAD",
    "LIMOSA_ASK",  # told to CRIU's action script
    "LIMOSA_ANSWER",
}


def test_every_variable_is_documented() -> None:
    page = (PROJECT / "docs/environment.md").read_text().partition("\n## What a job is given")[0]
    documented = {name for row in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)}
    python = "\n".join(path.read_text() for path in (PROJECT / "src").rglob("*.py"))
    native = "\n".join(path.read_text() for path in (PROJECT / "src").rglob("*.c"))
    read = {name for name in re.findall(r"""["'](LIMOSA_\w+)["']""", python) if not name.endswith("_")}
    read |= set(re.findall(r'getenv\("(LIMOSA_\w+)"', native))
    read |= set(re.findall(r"""(?:environ\.get|user_folder)\(["'](XDG_\w+)["']""", python))
    assert len(read) > 12
    assert read - INTERNAL == {name for name in documented if name.startswith(("LIMOSA_", "XDG_"))}


def test_what_programs_are_started_with_is_what_the_page_says(monkeypatch) -> None:
    def words(text: str) -> set[str]:
        return set(re.findall(r"`([A-Z_]+…?)`", text))

    def told(name: str, by: set[str]) -> bool:
        return name in by or any(word.endswith("…") and name.startswith(word[:-1]) for word in by)

    page = (PROJECT / "docs/environment.md").read_text().partition("\n## What a job is given")[0]
    table = words("".join(re.findall(r"^\| `.*?` \|", page, re.M)))
    text = page.partition("Programs that Limosa starts get these, except ")[2]
    others, _, for_users = text.partition("What root")
    but, _, besides = others.partition(" and of the others ")
    for_all, for_users = (table - words(but)) | words(besides), words(for_users.partition(" alone.")[0])

    asked = start._KEPT | {"LC_ALL", "LD_PRELOAD", "PYTHONPATH", "EDITOR"}
    asked |= {name for name in table | words(text) if not name.endswith("…")}
    for name in asked:
        monkeypatch.setenv(name, "/usr")
    assert set(start.environment()) & asked == {name for name in asked if told(name, for_all)}
    assert set(start.environment(for_user=True)) & asked == {name for name in asked if told(name, for_users)}
