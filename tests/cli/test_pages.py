"""Every link in a page leads to a file of the project, and to a heading that it has; tables are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(PROJECT)
    for path in (
        *PROJECT.glob("*.md"),
        *(p for top in ("docs", "src", "tests", "bench") for p in (PROJECT / top).rglob("*.md")),
    )
)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What its headings are called in links, as GitHub makes it of their words."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return names


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    return [a or b for a, b in found if not re.match(r"[a-z]+:", a or b)]


def test_there_are_pages_with_links() -> None:
    assert len(PAGES) > 15
    assert sum(len(links(PROJECT / page)) for page in PAGES) > 100
    assert "the-jobs-life" in anchors(PROJECT / "docs/architecture.md")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(PROJECT / page):
        path, _, anchor = link.partition("#")
        target = (PROJECT / page.parent / path).resolve() if path else PROJECT / page
        assert target.exists(), link
        assert target == PROJECT or PROJECT in target.parents, link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page.parts], ids=str)
def test_every_file_of_the_project_that_is_named_is_there(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|scripts|bench)/[\w./*-]+)`", (PROJECT / page).read_text())
    assert [name for name in named if not list(PROJECT.glob(name.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_table_has_a_head_and_as_many_cells_in_each_row(page: Path) -> None:
    """An empty line in the middle of a table leaves rows that are shown as text."""
    for block in re.findall(r"^(?:\|.*\n)+", without_code((PROJECT / page).read_text()) + "\n", re.MULTILINE):
        head, *rows = block.splitlines()
        assert rows, head
        assert re.fullmatch(r"\|(?:\s*:?-+:?\s*\|)+", rows[0]), head
        cells = [len(re.sub(r"`[^`]*`|\\\|", "", row).split("|")) for row in (head, *rows)]
        assert set(cells) == {cells[0]}, [row for row, n in zip(rows, cells[1:], strict=True) if n != cells[0]]
