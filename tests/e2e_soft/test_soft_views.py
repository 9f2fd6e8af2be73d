"""What the command line shows of a node: gpus, ps, plan, doctor; and verbs over several jobs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from soft_command import start, waits_for
from soft_job import JOB

MIB = 1 << 20


def test_gpus(soft: Callable[..., Any]) -> None:
    node = soft(gpus=4, memory=["256MiB", "128MiB", "256MiB", "256MiB"], chip=["H200", "H200", "A100", "H200"])
    node.switches.mig(2)
    node.switches.persistence(3, False)
    job = node.job("--mib", 32)
    said = node.says(0, "", "gpus")
    assert said["software"] is True
    assert (said["driver_version"], said["cuda_version"]) == ("580.159.04", "13.0")
    gpus = said["gpus"]
    assert [g["name"] for g in gpus] == ["Soft GPU H200", "Soft GPU H200", "Soft GPU A100", "Soft GPU H200"]
    assert [g["memory_total"] for g in gpus] == [256 * MIB, 128 * MIB, 256 * MIB, 256 * MIB]
    assert [g["mig"] for g in gpus] == [False, False, True, False]
    assert [g["persistence"] for g in gpus] == [True, True, True, False]
    assert len({g["uuid"] for g in gpus}) == len({g["pci_bus_id"] for g in gpus}) == 4
    assert [p["pid"] for p in gpus[0]["processes"]] == [job.pid]
    assert 32 * MIB <= gpus[0]["processes"][0]["memory_used"] <= gpus[0]["memory_used"] < 64 * MIB
    assert [g["processes"] for g in gpus[1:]] == [[], [], []]
    shown = node.limosa("gpus")
    assert re.search(r"Soft GPU A100 \(MIG\)", shown.stdout)
    assert re.search(r"Soft GPU H200 \(no persistence\)", shown.stdout)
    assert "software GPUs, not real ones" in shown.stderr
    job.finish()


def test_ps_shows_what_runs_and_what_is_put_aside(node: Any) -> None:
    first, second = node.job("--mib", 32), node.job("--gpu", 1, "--managed")
    node.limosa("suspend", first.pid)
    jobs = {j["pid"]: j for j in node.says(0, "", "ps")["jobs"]}
    assert set(jobs) == {first.pid, second.pid}
    aside, runs = jobs[first.pid], jobs[second.pid]
    assert (aside["state"], aside["movable"], aside["gpus"][0]["index"]) == ("checkpointed", True, 0)
    assert aside["gpus"][0]["memory_used"] >= 32 * MIB
    assert aside["suspended"]["by"] == "root"
    assert (runs["state"], runs["movable"]) == ("running", False)
    assert [r["id"] for r in runs["reasons"] if r["exit_code"]] == ["managed-memory"]
    text = node.limosa("ps").stdout
    assert str(first.pid) in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[0] == str(second.pid)]
    assert row[3:7] == ["running", "1", "8.00", "MiB"]
    assert row[7] == "no", text
    node.limosa("resume", "--all")
    first.goes_on()
    first.finish()
    second.finish()


def test_ps_plan_and_results_say_which_way_and_what_the_other_costs(soft: Callable[..., Any]) -> None:
    node = soft(memory="512MiB")
    under = start(node, "--mib", 48, "--small")
    bare = node.job("--mib", 48)
    off = start(node, "--gpu", 1, LIMOSA_SHIM="off")
    jobs = {j["pid"]: j for j in node.says(0, "", "ps")["jobs"]}
    assert [jobs[job.pid]["way"] for job in (under, bare, off)] == ["parked", "driver", "driver"]
    assert [jobs[job.pid]["parkable"] for job in (under, bare, off)] == [48 * MIB, 0, 0]
    (shown,) = jobs[under.pid]["processes"]
    assert (shown["way"], shown["why"], shown["parkable"]) == ("parked", "", 48 * MIB)
    assert shown["left"] == {"small": 4096}
    assert shown["unknown"] == []
    assert "not started by limosa run" in jobs[bare.pid]["processes"][0]["why"]
    assert "switched off" in jobs[off.pid]["processes"][0]["why"]
    text = node.limosa("ps", "-v").stdout
    assert re.search(r"\bparked, \S+ [MG]i?B can be parked, \S+ Ki?B left to the driver \(small\)", text, re.I)
    assert re.search(r"driver: without \S+\.so", text)
    slow, fast = (node.says(0, "", "plan", "move", str(job.pid), "--to", "1") for job in (bare, under))
    assert (slow["way"], slow["other"]["way"]) == ("driver", "parked")
    assert (fast["way"], fast["other"]["way"]) == ("parked", "driver")
    for plan in (slow, fast):
        ways = {plan["way"]: plan["estimate"], plan["other"]["way"]: plan["other"]}
        assert 0 < ways["parked"]["pause_seconds"] <= ways["driver"]["pause_seconds"]
    assert any("from GPU to GPU" in step for step in fast["steps"])
    assert not any("from GPU to GPU" in step for step in slow["steps"])
    text = "with the library of limosa run it would stand still for about"
    assert text in node.limosa("plan", "-v", "move", bare.pid, "--to", 1).stdout
    assert text not in node.limosa("plan", "move", bare.pid, "--to", 1).stdout  # only where it was asked for
    nothing = node.says(0, "", "plan", "move", bare.pid, "--to", 0)
    assert (nothing["already"], nothing["steps"], nothing["other"]) == (True, [], None)
    assert nothing["estimate"] == {"pause_seconds": 0.0, "seconds": 0.0, "bytes": 0}
    said = node.limosa("plan", "move", bare.pid, "--to", 0).stdout
    assert ("nothing to do" in said, "stand still" in said) == (True, False)
    for job, way, other in ((bare, "driver", "parked"), (under, "parked", "driver")):
        moved = node.says(0, "", "move", str(job.pid), "--to", "1")
        assert (moved["way"], moved["other"]["way"]) == (way, other)
        assert moved["other"]["pause_seconds"] > 0
    put = node.limosa("suspend", "-v", under.pid).stdout
    assert re.search(r"\(parked; by the driver alone \S+ m?s were estimated\)", put), put
    (aside,) = [j for j in node.says(0, "", "ps")["jobs"] if j["pid"] == under.pid]
    assert (aside["way"], aside["parkable"]) == ("parked", 48 * MIB)
    back = node.says(0, "", "plan", "resume", str(under.pid))
    assert (back["way"], back["other"]["way"]) == ("parked", "driver")
    node.limosa("resume", under.pid)
    for job in (under, bare, off):
        job.goes_on(2)
        job.finish()


def test_plan_says_what_a_verb_would_do_and_touches_nothing(soft: Callable[..., Any]) -> None:
    node = soft(gpus=3, like="h200", memory="2GiB")
    job = node.job("--mib", 16)
    before = node.log()
    plan = node.says(0, "", "plan", "move", str(job.pid), "--to", "2")
    assert plan["verdict"] == "ok"
    assert [s.split()[0] for s in plan["steps"]] == ["lock", "checkpoint", "restore", "unlock"]
    assert len(plan["map"]) == 3  # a full permutation
    assert sorted(plan["map"]) == sorted(plan["map"].values())
    assert plan["estimate"]["bytes"] >= 16 * MIB
    assert plan["estimate"]["pause_seconds"] > 0.3  # an H200's fixed cost
    assert node.log() == before
    assert node.where(job) == [0]
    done = node.limosa("move", job.pid, "--to", 2, "-o", "json").json
    assert done["timings"]["pause_seconds"] > 0.45  # --like h200 takes its time
    job.goes_on()
    job.finish()


def test_doctor_says_that_the_driver_is_in_software(node: Any) -> None:
    checks = {c["name"]: c for c in node.limosa("doctor", "-o", "json", rc=None).json["checks"]}
    assert "the driver in software, not a real one" in checks["driver"]["detail"]
    assert [checks[n]["status"] for n in ("driver", "bindings", "symbols", "persistence")] == ["ok"] * 4


def test_several_jobs_each_with_a_result_of_its_own(node: Any) -> None:
    movable, managed = node.job(), node.job("--managed")
    said = node.says(13, "managed-memory", "move", movable.pid, managed.pid, "--to", 1)
    assert [("error" in r, r["pid"]) for r in said["results"]] == [(False, movable.pid), (True, managed.pid)]
    assert (node.where(movable), node.where(managed)) == ([1], [0])
    for job in (movable, managed):
        job.goes_on()
        job.finish()


def test_two_jobs_change_places_where_neither_fits_beside_the_other(soft: Callable[..., Any]) -> None:
    node = soft(memory="400MiB", rates={"context_bytes": 200 << 20})  # counted, never touched
    left, right = node.job(), node.job("--gpu", 1)
    node.says(14, "gpu-room", "move", left.pid, "--to", 1)
    node.limosa("move", "--swap", left.pid, right.pid)
    assert (node.where(left), node.where(right)) == ([1], [0])
    for job in (left, right):
        job.goes_on()
        job.finish()


def test_a_gpu_is_cleared_and_filled_again(soft: Callable[..., Any]) -> None:
    """``suspend --gpu``, somebody else uses it, ``toggle``."""
    node = soft(memory="600MiB", rates={"context_bytes": 200 << 20})
    tree = node.job("--child")
    node.limosa("suspend", "--gpu", 0)
    other = node.job()  # it fits only now
    node.says(14, "gpu-room", "resume", tree.pid)
    other.finish()
    assert node.says(0, "", "toggle", tree.pid)["operation"] == "resume"
    tree.goes_on()
    tree.finish()


def test_a_suspended_job_is_none_that_runs_where_its_driver_is_not(node: Any) -> None:
    """From outside its node, or its container, nobody can ask: stopped from there it would lose its device memory."""

    def outside(*words: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "limosa", *map(str, words)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    def seen() -> dict[str, Any]:
        return next(j for j in json.loads(outside("ps", "-o", "json").stdout)["jobs"] if j["pid"] == pid)

    folder = node.place / "job"
    folder.mkdir()
    job = [sys.executable, JOB, folder, "--mib", 24]
    pid = int(node.limosa("run", "-d", "-q", "--log", folder / "log", "--", *job).stdout)
    node.reaper.watch(pid)
    waits_for(node, lambda: "tick" in (folder / "log").read_text())
    assert (seen()["state"], seen()["movable"]) == ("unknown", False)
    node.limosa("suspend", pid)
    found = seen()
    assert (found["state"], found["reasons"][0]["id"]) == ("checkpointed", "cannot-be-asked")
    assert found["suspended"]["by"]
    stopped = outside("stop", pid)
    assert (stopped.returncode, "is suspended" in stopped.stderr) == (13, True), stopped
    node.limosa("resume", pid)
    node.limosa("stop", pid)
