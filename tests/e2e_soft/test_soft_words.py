"""The lines of docs/softgpu.md, typed: what ``move`` and ``gpus`` say of a job and of Limosa's own."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from soft_command import waits_for

PAGE = (Path(__file__).parents[2] / "docs" / "softgpu.md").read_text()


def test_the_page_s_lines_work_and_say_what_happened_to_the_job(soft):
    node = soft()
    run, move = (shlex.split(line) for line in re.findall(r"^# limosa ((?:run|move) .*)$", PAGE, re.MULTILINE)[:2])
    run = ["run", "-q", *run[1:]]
    run[run.index("python3")] = sys.executable
    pid = int(node.limosa(*run, cwd=node.place).stdout)
    node.reaper.watch(pid)
    losses = node.place / "losses"
    waits_for(node, lambda: losses.exists() and losses.read_text().count("\n") > 3)

    said = node.limosa(*move).stdout
    assert re.fullmatch(
        rf"job \(process {pid}\) is running \(GPU 0 → GPU 1\), 64 MiB, stood still for [0-9.]+ m?s\n", said
    )
    assert node.limosa(*move).stdout == f"job (process {pid}) is on GPU 1 already\n"
    nowhere = node.limosa("move", "job", "--to", "7", rc=2)
    assert "there are GPU 0, GPU 1" in nowhere.stderr

    found = node.limosa("gpus", "-o", "json").json
    held = {p["pid"]: p for gpu in found["gpus"] for p in gpu["processes"]}
    assert (held[pid]["name"], held[pid]["job"], held[pid]["limosa"]) == ("job", pid, False)
    own = [p for p in held.values() if p["limosa"]]
    assert own
    assert not any(p["name"] for p in own)
    text = node.limosa("gpus").stdout
    assert re.search(rf"{pid}    job: python", text)
    assert "Limosa's own, for root" in text
    before = losses.read_text().count("\n")
    waits_for(node, lambda: losses.read_text().count("\n") > before)

    node.limosa("suspend", "job")
    refused = node.limosa("stop", "job", "-o", "json", rc=13).json
    assert refused["error"]["id"] == "suspended"
    assert node.limosa("stop", "job", "--kill", "-o", "json").json["killed"] == [pid]
    assert node.limosa("ps", "-o", "json").json["jobs"] == []
