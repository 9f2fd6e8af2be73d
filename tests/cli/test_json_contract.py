"""What ``-o json`` prints is what docs/json.md documents: by the types of the results, and by a real job's way."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from limosa.errors import Reason
from limosa.gpu import Gpu, GpuProcess, Inventory
from limosa.image import GpuRecord, ImageFile, JobRecord, Listed, Manifest, OpenFile, TreeProcess
from limosa.image.verify import FileCheck, Problem, VerifyResult
from limosa.operation import results
from limosa.operation.doctor_gpu import Check
from limosa.operation.jobs import Holder

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
SECTIONS = {
    part.splitlines()[0].strip(): set(re.findall(r"`([a-zA-Z_\[\].0-9]+)`", part)) for part in PAGE.split("\n## ")[1:]
}
# `gpus[].index` documents "index"; `problems[]` documents "problems".
NAMES = {
    title: {piece.removesuffix("[]") for name in names for piece in re.split(r"\.", name)}
    for title, names in SECTIONS.items()
}

DOCUMENTED = [
    ("Always", Reason, set()),
    ("gpus", Inventory, set()),
    ("gpus", Gpu, set()),
    ("gpus", GpuProcess, set()),
    ("ps (list)", results.Ps, set()),
    ("plan VERB, VERB --dry-run", results.Plan, set()),
    ("plan VERB, VERB --dry-run", results.Estimate, set()),
    ("move, suspend, resume, toggle", results.JobResult, set()),
    ("checkpoint", results.CheckpointResult, {"warnings"}),
    ("restore", results.RestoreResult, {"warnings"}),
    ("inspect", Manifest, {"schema"}),
    ("inspect", JobRecord, set()),
    ("inspect", TreeProcess, set()),
    ("inspect", GpuRecord, set()),
    ("inspect", ImageFile, set()),
    ("inspect", OpenFile, set()),
    ("verify", VerifyResult, set()),
    ("verify", FileCheck, set()),
    ("verify", Problem, set()),
    ("recover", results.Recovered, set()),
    ("images", Listed, set()),
    ("wait", results.WaitResult, set()),
    ("stop", results.StopResult, set()),
    ("gpus", Holder, set()),
    ("doctor", Check, {"exit_code"}),
]


@pytest.mark.parametrize(
    ("section", "struct", "apart"), DOCUMENTED, ids=[f"{s}-{t.__name__}" for s, t, _ in DOCUMENTED]
)
def test_every_field_is_documented(section, struct, apart):
    fields = {f.encode_name for f in msgspec.structs.fields(struct)} - apart
    assert not fields - NAMES[section]


def test_every_problem_and_state_is_documented():
    for word in ("damaged", "missing", "extra", "swapped", "truncated"):
        assert f'"{word}"' in PAGE
    (states,) = (line for line in PAGE.splitlines() if line.startswith("| `job_state` |"))
    for word in ("running", "locked", "checkpointed", "failed", "mixed", "gone", "unknown"):
        assert f'"{word}"' in states, word


def keys(value: Any, inside: bool = True) -> set[str]:
    """The keys of an object, and of the objects in its lists."""
    found = set(value)
    for part in value.values():
        if inside and isinstance(part, list):
            found |= {k for item in part if isinstance(item, dict) for k in item}
    return found


def result(ran: Any, section: str, code: int = 0) -> dict[str, Any]:
    assert ran.returncode == code, ran.stderr
    assert ran.stdout.count("\n") == 1
    said = json.loads(ran.stdout)
    assert said["schema"] == 1
    assert isinstance(said["warnings"], list)
    known = NAMES[section] | NAMES["Always"] | NAMES["On failure"] | {"results", "error"}
    assert not keys(said) - known, f"not documented under {section}"
    return dict(said)


def test_doctor(cli):
    ran = cli("doctor", "-o", "json")
    said = json.loads(ran.stdout)
    assert set(said) == {"schema", "warnings", "ok", "checks"}
    assert said["ok"] == (ran.returncode == 0)
    names = {c["name"] for c in said["checks"]}
    listed = PAGE[PAGE.index("Names: ") : PAGE.index("Exit code 0 where `ok`, else 24")]
    assert names == set(re.findall(r"`(\w+)`", listed))
    for check in said["checks"]:
        assert set(check) == {"name", "status", "detail", "fix", "more"}
        assert check["status"] in ("ok", "warn", "fail")
        assert check["detail"]


def test_nothing_to_recover(cli):
    assert result(cli("recover", "-o", "json"), "recover")["recovered"] == []


@pytest.mark.criu
def test_a_jobs_way_through_the_verbs(cli, tmp_path):
    image = str(tmp_path / "image")
    job = result(cli("run", "--detach", "--name", "sleeper", "-o", "json", "--", "sleep", "600"), "run --detach")
    pid = job["pid"]
    try:
        listed = result(cli("ps", "-o", "json"), "ps (list)")
        mine = next(j for j in listed["jobs"] if j["pid"] == pid)
        assert (mine["name"], mine["command"], mine["state"]) == ("sleeper", ["sleep", "600"], "running")
        assert mine["movable"] is False

        refused = result(cli("plan", "suspend", "sleeper", "-o", "json"), "plan VERB, VERB --dry-run", 13)
        assert (refused["verdict"], refused["reasons"][0]["id"]) == ("refused", "no-cuda-state")
        plan = result(
            cli("plan", "checkpoint", "sleeper", "--output", image, "-o", "json"), "plan VERB, VERB --dry-run"
        )
        assert (plan["operation"], plan["pid"], plan["verdict"]) == ("checkpoint", pid, "ok")
        assert plan["steps"]
        assert not Path(image).exists()

        done = result(cli("checkpoint", "sleeper", "--output", image, "-o", "json"), "checkpoint")
        assert (done["image"], done["pid"], done["left_running"]) == (image, pid, False)
        assert not Path(f"/proc/{pid}").exists()

        facts = result(cli("inspect", image, "-o", "json"), "inspect")
        assert facts["id"] == done["id"]
        assert facts["tree"][0]["command"] == ["sleep", "600"]

        whole = result(cli("verify", image, "-o", "json"), "verify")
        assert whole["ok"] is True
        assert {f["path"] for f in whole["files"]} == {f["path"] for f in facts["files"]}

        dry = result(cli("restore", image, "--dry-run", "-o", "json"), "plan VERB, VERB --dry-run")
        assert (dry["operation"], dry["verdict"]) == ("restore", "ok")
        back = result(cli("restore", image, "-o", "json"), "restore")
        assert (back["pid"], back["id"]) == (pid, done["id"])
        assert Path(f"/proc/{pid}").exists()

        taken = result(cli("plan", "restore", image, "-o", "json"), "plan VERB, VERB --dry-run", 23)
        assert (taken["verdict"], taken["reasons"][0]["id"]) == ("refused", "pid-taken")
        exists = cli("checkpoint", "sleeper", "--output", image, "-o", "json")
        assert exists.returncode == 17

        damaged = next(Path(image).glob("criu/core-*.img"))
        damaged.write_bytes(damaged.read_bytes() + b"x")
        broken = result(cli("verify", image, "-o", "json"), "verify", 16)
        assert (broken["ok"], broken["problems"][0]["problem"]) == (False, "damaged")
        assert "error" not in broken

        removed = result(cli("rm", image, "-o", "json"), "rm")
        assert removed["removed"][0]["path"] == image
        assert not Path(image).exists()
    finally:
        end(pid)


@pytest.mark.criu
def test_the_same_in_words_leaves_stdout_to_the_result(cli, tmp_path):
    image = str(tmp_path / "image")
    ran = cli("run", "--detach", "--name", "sleeper", "--", "sleep", "600")
    pid = int(ran.stdout)
    try:
        done = cli("checkpoint", "sleeper", "--output", image, "--leave-running", "--print-stats")
        assert done.returncode == 0
        assert "runs on" in done.stdout
        assert "pages" in done.stdout
        assert "sleeper" in cli("list").stdout
        shown = cli("inspect", image, "-v").stdout
        assert f"{pid} sleep 600" in shown
        assert cli("verify", image).stdout.startswith("whole: ")
        assert cli("rm", image).stdout.startswith("removed ")
    finally:
        end(pid)


def end(pid: int) -> None:
    """Ends a process that is not our child and waits until it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
