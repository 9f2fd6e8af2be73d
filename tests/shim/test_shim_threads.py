"""What several threads share, driven by threads under ThreadSanitizer, AddressSanitizer and UBSan: the shim's own
source, with as much of a driver as it asks for. That they would notice is shown by mistakes, made in a copy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from limosa.native.build import SHIM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = {
    "capturing.c": ("capture.c", "gate.c"),
    "tables.c": ("memory.c",),
    "freed_late.c": ("late.c", "memory.c", "gate.c"),
}
THREADS, MEMORY = ["-fsanitize=thread"], ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class Mistake(NamedTuple):
    """Made in a copy of one of a program's sources: what stands there, and what then does."""

    name: str
    program: str
    source: str
    changes: Sequence[tuple[str, str]]
    watched: list[str]
    noticed: str


MISTAKES = (
    Mistake(
        "captures-end-without-the-lock",
        "capturing.c",
        "capture.c",
        [
            ("    bool was = false;\n\n    pthread_mutex_lock(&one);\n", "    bool was = false;\n\n"),
            ("    pthread_mutex_unlock(&one);\n    return was;\n", "    return was;\n"),
        ],
        THREADS,
        "ThreadSanitizer: data race",
    ),
    Mistake(
        "too-little-room-for-captures",
        "capturing.c",
        "capture.c",
        [("realloc(captures, more * sizeof *captures)", "realloc(captures, more / 2 * sizeof *captures)")],
        MEMORY,
        "AddressSanitizer: heap-buffer-overflow",
    ),
    Mistake(
        "memories-looked-through-without-the-lock",
        "tables.c",
        "memory.c",
        [("        memory_lock();\n        memory_guard();\n        memory_unlock();\n", "        memory_guard();\n")],
        THREADS,
        "ThreadSanitizer: data race",
    ),
    Mistake(
        "too-little-room-for-mappings",
        "tables.c",
        "memory.c",
        [("malloc(more * sizeof *items)", "malloc(more / 2 * sizeof *items)")],
        MEMORY,
        "AddressSanitizer: heap-buffer-overflow",
    ),
    Mistake(
        "looked-at-while-others-read",  # as it once was
        "freed_late.c",
        "late.c",
        [("    one->marked = !record(", "    one->recorded = one->owner;\n    one->marked = !record(")],
        THREADS,
        "ThreadSanitizer: data race",
    ),
    Mistake(
        "the-gate-opens-without-an-order",
        "freed_late.c",
        "gate.c",
        [
            (
                "} while (atomic_load_explicit(&gate_closed, memory_order_acquire))",
                "} while (atomic_load_explicit(&gate_closed, memory_order_relaxed))",
            )
        ],
        THREADS,
        "ThreadSanitizer: data race",
    ),
    Mistake(
        "an-event-outlives-its-context",
        "freed_late.c",
        "late.c",
        [("            mapping->event = NULL; /* it went with the context */\n", "")],
        MEMORY,
        "AddressSanitizer: heap-use-after-free",
    ),
)


def runs(
    compiled: Callable[..., Path], folder: Path, program: str, watched: list[str], turns: int = 1
) -> Iterator[subprocess.CompletedProcess[str]]:
    """Of a program made from what is in the folder, and the shim's own where nothing is there."""
    sources = [folder / name if (folder / name).exists() else SHIM / name for name in PROGRAMS[program]]
    built = compiled(program, *sources, f"-I{SHIM}", "-g", "-D_GNU_SOURCE", "-lpthread", *watched)
    # A table that has grown keeps its old place: a child of a fork may still read it. That is no leak here.
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    for _ in range(turns):
        yield subprocess.run([built, "1"], capture_output=True, text=True, timeout=60, env=env, check=False)


@pytest.mark.parametrize("watched", [THREADS, MEMORY], ids=["threads", "memory"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_race_no_wrong_access_and_nothing_lost(
    compiled: Callable[..., Path], tmp_path: Path, program: str, watched: list[str]
) -> None:
    (done,) = runs(compiled, tmp_path / "nothing", program, watched)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stderr[:4000]
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_noticed(compiled: Callable[..., Path], tmp_path: Path, mistake: Mistake) -> None:
    text = (SHIM / mistake.source).read_text()
    for old, new in mistake.changes:
        assert text.count(old) == 1, "the mistake fits the source no longer"
        text = text.replace(old, new)
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / mistake.source).write_text(text)
    # Two threads need not meet in one second.
    said = runs(compiled, folder, mistake.program, mistake.watched, turns=10)
    assert any(mistake.noticed in done.stderr for done in said)
