"""What another user's job writes does not drive the terminal of who reads its log."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from limosa.cli import logs


@pytest.mark.root
@pytest.mark.parametrize("cut", range(12))
def test_no_control_of_a_terminal_comes_through_wherever_the_log_is_cut(monkeypatch, tmp_path: Path, cut: int) -> None:
    """As UTF-8 there are more of them than ESC: OSC, CSI and DCS are characters of their own."""
    out = io.BytesIO()
    monkeypatch.setattr(logs.sys, "stdout", SimpleNamespace(buffer=out, isatty=lambda: True))
    log = tmp_path / "log"
    log.touch()
    os.chown(log, 4242, 4242)
    text = "ü\x9d0;x\x07\x9b\x90é\n".encode()
    with open(log, "rb") as file:
        write = logs._writer(file.fileno())
        write(text[:cut])
        write(text[cut:])
    assert out.getvalue().decode() == "ü?0;x???é\n"
