"""What is wrong with a command line is said in words on stderr, as JSON on stdout where asked for, with exit code 2."""

from __future__ import annotations

import json

import pytest

from limosa import gpu
from limosa.errors import DriverTooOld
from limosa.operation import doctor_gpu

WRONG = [
    (),
    ("nonsense",),
    ("move",),
    ("move", "--nonsense"),
    ("move", "1"),
    ("move", "1", "--to"),
    ("move", "1", "--to", "0", "--map", "0=1"),
    ("move", "1", "--swap"),
    ("move", "1", "2", "--swap", "--to", "1"),
    ("move", "1", "--to", "1", "--timeout", "-3"),
    ("move", "1", "--to", "1", "--timeout", "soon"),
    ("resume", "1", "--to", "0", "--map", "0=1"),
    ("suspend", "1", "--force"),
    ("checkpoint", "1"),
    ("checkpoint", "1", "--output", "x", "--tcp-established", "--tcp-close"),
    ("checkpoint", "1", "--output", "x", "--ghost-limit", "big"),
    ("restore",),
    ("restore", "x", "--tcp-established", "--tcp-close"),
    ("restore", "x", "--attach"),
    ("plan",),
    ("plan", "gpus"),
    ("plan", "move", "--nonsense"),
    ("rm",),
    ("inspect",),
    ("verify", "a", "b"),
    ("gpus", "x"),
]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_a_usage_error_is_exit_2_and_json(inside, args):
    ran = inside(*args[:1], "-o", "json", *args[1:])
    assert ran.returncode == 2, ran.stderr
    said = json.loads(ran.stdout)
    assert said["schema"] == 1
    assert said["warnings"] == []
    error = said["error"]
    assert set(error) == {"id", "exit_code", "message", "hint", "job_state"}
    assert (error["id"], error["exit_code"], error["job_state"]) == ("usage", 2, "")
    assert error["message"]
    assert error["hint"]


@pytest.mark.parametrize("args", [a for a in WRONG if a and a != ("restore", "x", "--attach")], ids=" ".join)
def test_in_words_it_is_on_stderr_only(inside, args):
    ran = inside(*args)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "limosa: " in ran.stderr
    assert "hint: " in ran.stderr


def test_an_unknown_format_is_a_usage_error(inside):
    ran = inside("gpus", "-o", "xml")
    assert ran.returncode == 2
    assert "xml" in ran.stderr


def test_what_belongs_to_the_job_is_not_taken_for_limosas(cli):
    from limosa.cli.output import json_wanted

    assert not json_wanted(["run", "--", "train", "-o", "json"])
    assert json_wanted(["run", "-o", "json", "--", "train"])
    assert json_wanted(["ps", "--format=json"])
    assert not json_wanted(["ps", "-o"])


@pytest.mark.parametrize("name", ["all", "*", "any", "Cgroup", "memory cgroup"])
def test_force_takes_names_and_never_all(name):
    from limosa.cli.options import check_force
    from limosa.errors import UsageError

    with pytest.raises(UsageError, match="name the refusal"):
        check_force([name])


def test_force_may_be_repeated_or_have_commas():
    from limosa.cli.options import check_force

    assert check_force(["cgroup", "mps,disk-room"]) == ["cgroup", "mps", "disk-room"]
    assert check_force(None) == []


@pytest.mark.parametrize(
    ("name", "meant"), [("no-such-id", ""), ("own-ancestor", ""), ("nccl-rank", " (nccl-ranks can)")]
)
def test_force_refuses_what_forces_nothing_and_says_what_may_be_meant(cli, name, meant):
    for verb in (("move", "1", "--to", "1"), ("checkpoint", "1", "--output", "/nowhere"), ("restore", "/nowhere")):
        ran = cli(*verb, f"--force={name}", "-o", "json")
        assert ran.returncode == 2, ran.stderr
        error = json.loads(ran.stdout)["error"]
        assert error["id"] == "invalid-argument"
        assert error["message"].endswith(f"--force={name}: no refusal with this id can be forced{meant}")
        assert "limosa plan" in error["hint"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64M", 64 << 20), ("64MiB", 64 << 20), ("64MB", 64_000_000), ("1.5k", 1536), ("2G", 2 << 30)],
)
def test_sizes(text, size):
    from limosa.cli.options import parse_size

    assert parse_size(text) == size


NO_PID = "4194305"  # one more than the kernel's largest


@pytest.mark.parametrize("verb", ["suspend", "resume", "toggle"])
def test_no_such_process_is_exit_10(cli, verb):
    ran = cli(verb, NO_PID, "-o", "json")
    assert ran.returncode == 10, ran.stderr
    assert json.loads(ran.stdout)["error"]["id"] == "no-such-process"


def test_no_such_process_in_words(cli):
    ran = cli("suspend", NO_PID)
    assert (ran.returncode, ran.stdout) == (10, "")
    assert ran.stderr == f"limosa: there is no process {NO_PID}\nlimosa: hint: limosa ps lists the jobs\n"


@pytest.mark.parametrize(("present", "named"), [(False, ("limosa demo", "limosa softgpu")), (True, ("limosa doctor",))])
def test_gpus_without_a_driver_says_what_goes_on_without_a_gpu_and_who_knows_more_where_there_is_one(
    inside, monkeypatch, present, named
):
    def none():
        raise DriverTooOld(detail="there is no NVIDIA driver here")

    monkeypatch.setattr(gpu, "inventory", none)
    monkeypatch.setattr(doctor_gpu, "gpu_present", lambda: present)
    ran = inside("gpus")
    assert ran.returncode == 12
    hint = ran.stderr.splitlines()[-1]
    assert [name for name in ("limosa demo", "limosa softgpu", "limosa doctor") if name in hint] == list(named)


def test_no_such_job_by_name(cli):
    ran = cli("suspend", "nobody")
    assert ran.returncode == 10
    assert "a container is named with its runtime, as podman:NAME" in ran.stderr


def test_no_such_container(cli):
    ran = cli("suspend", "--container", "nobody")
    assert ran.returncode == 10
    assert ran.stderr.splitlines() == [
        "limosa: no container nobody runs here",
        "limosa: hint: limosa ps lists those that run with a GPU",
    ]


def test_a_plan_is_printed_also_where_there_is_nothing_to_plan(inside, tmp_path):
    ran = inside("plan", "checkpoint", NO_PID, "--output", str(tmp_path / "x"), "-o", "json")
    assert ran.returncode == 10
    said = json.loads(ran.stdout)
    assert (said["operation"], said["verdict"], said["pid"]) == ("checkpoint", "refused", int(NO_PID))
    assert said["reasons"][0]["exit_code"] == 10
    assert len(said["results"]) == 1


def test_plan_is_dry_run(inside, tmp_path):
    out = str(tmp_path / "x")
    plan = inside("plan", "-o", "json", "checkpoint", NO_PID, "--output", out)
    dry = inside("checkpoint", NO_PID, "--output", out, "--dry-run", "-o", "json")
    assert (plan.stdout, plan.returncode) == (dry.stdout, dry.returncode)


def test_a_missing_image_is_exit_16(cli, tmp_path):
    for verb in ("inspect", "verify", "restore", "rm"):
        ran = cli(verb, str(tmp_path / "no"), "-o", "json")
        assert ran.returncode == 16, (verb, ran.stderr)
        assert json.loads(ran.stdout)["error"]["id"] == "no-such-image"


def test_what_never_was_an_image_is_not_called_damaged(inside):
    """Exit code 16 all the same: nothing was started."""
    for verb in ("inspect", "verify", "restore"):
        ran = inside(verb, "/etc", "-o", "json")
        assert ran.returncode == 16, (verb, ran.stderr)
        error = json.loads(ran.stdout)["error"]
        assert error["id"] == "not-an-image"
        assert error["message"] == "/etc is not an image: other things are in it"


def test_verify_prints_its_result_where_the_manifest_is_missing(inside, tmp_path):
    (tmp_path / "image" / "criu").mkdir(parents=True)
    ran = inside("verify", str(tmp_path / "image"), "-o", "json")
    assert ran.returncode == 16
    said = json.loads(ran.stdout)
    assert said["ok"] is False
    assert said["problems"][0]["path"] == "manifest.json"
    assert "error" not in said


def test_rm_refuses_what_is_no_image(inside, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("meow")
    ran = inside("rm", str(tmp_path / "photos"))
    assert ran.returncode == 2
    assert (tmp_path / "photos" / "cat.jpg").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["checkpoint", "1", "--output", "x", "--rate", "lots"], "--rate"),
        (["checkpoint", "1", "--output", "x", "--chunk", "lots"], "--chunk"),
        (["arena", "lots"], "SIZE"),
        (["arena", "1G", "--keep", "lots"], "--keep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_size_or_time_is_told_with_its_option(inside, words, named):
    ran = inside(*words)
    assert ran.returncode == 2
    assert named in ran.stderr.splitlines()[0]


@pytest.mark.parametrize("words", [["ps"], ["move", "train", "--to", "0"], ["logs", "train"]], ids=" ".join)
def test_a_runtime_folder_that_cannot_be_used_is_refused_by_all_that_read_names(inside, tmp_path, words):
    """``ps`` listed jobs without their names, and the others said that there was no such job."""
    ran = inside(*words, env={"LIMOSA_RUNTIME_DIR": "some/where"})
    assert ran.returncode == 2
    assert "LIMOSA_RUNTIME_DIR=some/where is not an absolute path" in ran.stderr
    (file := tmp_path / "file").touch()
    (opened := tmp_path / "opened").mkdir()
    opened.chmod(0o777)
    for path, why in ((file, "is not a folder"), (opened, "others may change what is in")):
        ran = inside(*words, env={"LIMOSA_RUNTIME_DIR": str(path)})
        assert ran.returncode == 11
        assert f"LIMOSA_RUNTIME_DIR={path} cannot be made or is not safe to use" in ran.stderr
        assert why in ran.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"file", "opened"}
