"""What ``move``, ``suspend``, ``resume`` and mistyped commands say: about the job, and no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from limosa.cli import words
from limosa.cli.on_jobs import _line, _plan_text, refused
from limosa.cli.verify import _text as _verified
from limosa.containers.find import Container, Containers
from limosa.errors import NoSuchImage, NoSuchProcess, Reason, Refused, UnknownGpu, UsageError
from limosa.gpu import Gpu, Inventory, find_gpu
from limosa.image.verify import FileCheck, VerifyResult
from limosa.operation.results import Estimate, JobResult, OtherWay, Plan
from limosa.process.identity import Identity
from limosa.process.records import EndedRecord

A, B, C = "GPU-a", "GPU-b", "GPU-c"
SWAP = {A: B, B: A, C: C}


@pytest.fixture(autouse=True)
def _three_gpus(monkeypatch):
    monkeypatch.setattr(words, "gpu_names", lambda asked=None: {A: "GPU 0", B: "GPU 1", C: "GPU 2"})


def result(**fields: Any) -> JobResult:
    return JobResult(**{"operation": "move", "pid": 7, "map": SWAP, "gpus": [B], "bytes": 4 << 30, **fields})


def test_a_move_tells_of_the_gpu_that_the_job_was_on_and_is_on_now():
    said = _line(result(name="train", timings={"pause_seconds": 0.45}))
    assert said == "train (process 7) is running (GPU 0 → GPU 1), 4.00 GiB, stood still for 450 ms"
    both = _line(result(gpus=[A, B]))
    assert "(GPU 0 → GPU 1, GPU 1 → GPU 0)" in both


def test_a_gpu_that_is_not_here_is_not_told_by_its_uuid():
    assert words.moves({"GPU-elsewhere": B}, [B]) == "a GPU that is not here → GPU 1"


def test_what_was_suspended_did_not_stand_still_for_its_way_back_alone():
    said = _line(result(operation="resume", timings={"pause_seconds": 0.45}))
    assert said == "process 7 is running (GPU 0 → GPU 1), 4.00 GiB, brought back in 450 ms"


def test_the_other_way_is_told_only_when_asked_for_and_as_an_estimate():
    slower = result(way="parked", other=OtherWay(way="driver", pause_seconds=0.53), timings={"pause_seconds": 2.18})
    assert "driver" not in _line(slower)
    assert "by the driver alone 530 ms were estimated" in _line(slower, 1)
    plan = Plan(operation="move", pid=7, estimate=Estimate(pause_seconds=1.0), other=slower.other, way="parked")
    assert "way:" not in _plan_text(plan)
    assert "by the driver alone it would stand still for about 530 ms" in _plan_text(plan, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "process 7 is on GPU 1 already"),
        ({"gpus": [B, A]}, "process 7 is on GPU 0, GPU 1 already"),
        ({"operation": "resume"}, "process 7 runs on GPU 1 already"),
        ({"operation": "suspend", "state": "checkpointed", "gpus": []}, "process 7 is suspended already"),
        ({"operation": "resume", "gpus": []}, "process 7 runs already"),
    ],
)
def test_what_is_so_already(fields, said):
    assert _line(result(already=True, **fields)) == said


def test_a_plan_for_what_is_not_there_names_no_process():
    plan = refused("restore", NoSuchImage("there is no image at /data/x"))
    assert _plan_text(plan).splitlines() == [
        "restore: refused",
        "  refused [no-such-image]: there is no image at /data/x",
        "    → limosa images DIR lists images",
    ]


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (
            "move podmn:x --to 1",
            2,
            "there is no runtime podmn; podman, docker, containerd, cri-o, runc, crun are known",
        ),
        ("move podmn:x --to 1", 2, "hint: did you mean podman:x?\n"),
        ("suspend xyzzy:x", 2, "hint: limosa suspend --help\n"),
        ("suspend podman:", 2, "podman: names no container\nlimosa: hint: podman:NAME, or"),
        ("suspend --container nobody", 10, "no container nobody runs here\n"),
        ("suspend --container podman:nobody", 10, "no container nobody runs here in podman\n"),
        ("suspend --container podmn:nobody", 2, "there is no runtime podmn"),
        ("restore /nosuch", 16, "hint: limosa images DIR lists images\n"),
    ],
)
def test_who_is_meant_and_is_not_there_is_told_with_a_way_on(inside, typed, code, said):
    ran = inside(*typed.split())
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr


@pytest.mark.parametrize(
    ("record", "typed"), [("e2e", "e2e"), ("podman:web", "podman:web"), ("podman:web", "container:web")]
)
def test_a_job_that_a_checkpoint_has_ended_is_told_by_its_image(inside, tmp_path, record, typed):
    image = tmp_path / "the image"
    EndedRecord(root=Identity(1 << 22, 1), image=str(image), name=record).save()
    assert "a checkpoint" not in inside("resume", typed).stderr, "its image has gone"
    image.mkdir()
    ran = inside("resume", typed)
    assert ran.returncode == 10
    assert f"hint: a checkpoint ended it: limosa restore '{image}'\n" in ran.stderr
    assert "a checkpoint" not in inside("resume", "docker:e2e").stderr


def test_each_reason_against_it_has_its_way_out():
    reasons = [Reason(id=one, text=one, exit_code=2, hint=f"leave out --{one}") for one in ("log", "shell", "log")]
    assert Refused(reasons).hint == "leave out --log; leave out --shell"


def test_one_file_is_no_files():
    file = FileCheck(path="a", size=0, ok=True)
    one = VerifyResult(image=Path("/x"), id="a", ok=True, files=[file], problems=[], bytes=0, seconds=0)
    assert _verified(one).startswith("whole: 1 file, ")
    assert _verified(msgspec.structs.replace(one, files=[file, file])).startswith("whole: 2 files, ")


def test_a_jobs_name_does_not_drive_the_terminal():
    assert words.job("podman:\x1b[2J", 7) == "podman:\\x1b[2J (process 7)"


def inventory(numbers: Sequence[int]) -> Inventory:
    gpus = [
        Gpu(index=n, uuid=f"GPU-1234567{n}", name="x", memory_total=1, memory_used=0, memory_free=1) for n in numbers
    ]
    return Inventory(driver_version="580", cuda_version="13.0", gpus=gpus)


@pytest.mark.parametrize(
    ("there", "hint"), [([0, 1], "there are GPU 0, GPU 1"), ([0], "there is GPU 0"), ([], "there is none")]
)
def test_a_gpu_that_is_not_there_names_those_that_are(there, hint):
    with pytest.raises(UnknownGpu) as caught:
        find_gpu(inventory(there), "7")
    assert "'7'" in caught.value.message
    assert caught.value.hint == f"{hint} (limosa gpus shows more)"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("mvoe 1", "did you mean limosa move?"),
        ("ckeckpoint 1", "did you mean limosa checkpoint?"),
        ("plan mvoe 1", "did you mean limosa plan move?"),
        ("checkpoint 1 -o /data/x", "did you mean --output DIR?"),
        ("checkpoint 1 --otput /data/x", "did you mean --output?"),
        ("stop --all", "limosa: there is no option --all\nlimosa: hint: limosa stop --help\n"),
        ("move 1 --too 3", "did you mean --to?"),
        ("move 1 --to", "limosa: Option '--to' requires an argument.\nlimosa: hint: limosa move --help\n"),
        ("-v ps", "limosa: there is no option -v before the verb\nlimosa: hint: limosa VERB -v; limosa --help\n"),
        ("stop a b c", "limosa: b c: more than this verb takes\nlimosa: hint: limosa stop --help\n"),
        ("ps a", "limosa: a: more than this verb takes\nlimosa: hint: limosa ps --help\n"),
        ("move 1 --timeout abc", "'abc' is not a number"),
        ("logs 1 -n x", "'x' is not a number"),
    ],
)
def test_what_is_wrong_with_what_was_typed_is_told(inside, typed, said):
    ran = inside(*typed.split())
    assert ran.returncode == 2
    assert said in ran.stderr


@pytest.mark.parametrize("typed", ["xyzzy", "move 1 --xyzzy", "ps -o yaml"])
def test_no_guess_where_nothing_is_like_it(inside, typed):
    ran = inside(*typed.split())
    assert ran.returncode == 2
    assert "did you mean" not in ran.stderr


def test_an_id_that_somebody_has_chosen_is_meant_as_a_whole() -> None:
    chosen = Container(runtime="runc", id="train-2")
    assert not chosen.is_meant("train")
    assert chosen.is_meant("train-2")
    made = Container(runtime="podman", id="3f2a91" + 58 * "0", name="train")
    assert [made.is_meant(word) for word in ("3f", "3f2", "tra", "train")] == [False, True, False, True]
    assert (chosen.short, made.short) == ("train-2", "3f2a91000000")


def test_a_word_that_may_be_several_containers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limosa.containers.find.states", list)
    here, me = Containers(), Identity.of(os.getpid())
    ids = {"3f2a" + 60 * "0": "train", "3f2b" + 60 * "0": "tune"}
    here._known = {f"/{id_}": [Container(runtime="podman", id=id_, name=name, init=me)] for id_, name in ids.items()}
    with pytest.raises(UsageError, match=r"3f2 may be several containers: podman:train .*, podman:tune"):
        here.meant("3f2")
    assert here.meant("3f2a").name == "train"
    assert here.meant("tune", "podman").name == "tune"
    with pytest.raises(NoSuchProcess):
        here.meant("train", "docker")
