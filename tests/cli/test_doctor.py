"""What doctor makes of a machine: pure functions over made-up machines; the exit code; what --fix builds."""

from __future__ import annotations

import os
from io import FileIO

import pytest

from limosa.gpu import DriverFacts
from limosa.operation import doctor as module
from limosa.operation.doctor import Diagnosis
from limosa.operation.doctor_gpu import Check, driver_checks, gpu_present, huge_pages
from limosa.process.criu.program import Criu

SYMBOLS = dict.fromkeys(("cuCheckpointProcessLock", "cuCheckpointProcessRestore"), True)
GOOD = {
    "driver_version": "580.159.04",
    "cuda_version": "13.0",
    "bindings_version": "13.3.1",
    "bindings_ok": True,
    "available": True,
    "symbols": {**SYMBOLS, "cuCheckpointOperationComplete": False},
    "can_suspend": True,
    "can_change_gpus": True,
    "persistence": {0: True, 1: True},
    "gpus": 2,
}


def statuses(facts: DriverFacts | None) -> dict[str, tuple[str, int]]:
    return {c.name: (c.status, c.exit_code) for c in driver_checks(facts)}


def test_without_a_gpu_no_driver_is_needed():
    assert set(statuses(None).values()) == {("ok", 0)}


def test_a_good_driver_is_good_also_without_the_newest_calls():
    assert set(statuses(DriverFacts(**GOOD)).values()) == {("ok", 0)}


@pytest.mark.parametrize(
    ("change", "name", "status"),
    [
        ({"driver_version": "", "problem": "no libcuda"}, "driver", "fail"),
        ({"driver_version": "550.1", "can_suspend": False, "can_change_gpus": False}, "driver", "fail"),
        ({"driver_version": "570.1", "can_change_gpus": False}, "driver", "warn"),
        ({"mps": True}, "driver", "warn"),
        ({"mig": [1]}, "driver", "warn"),
        ({"available": False, "problem": "cuInit fails"}, "driver", "fail"),
        ({"bindings_ok": False, "bindings_detail": "too old"}, "bindings", "fail"),
        ({"symbols": {"cuCheckpointProcessLock": False}}, "symbols", "fail"),
        ({"symbols": {}}, "symbols", "warn"),
        ({"persistence": {0: True, 1: False}}, "persistence", "warn"),
    ],
)
def test_what_is_wrong_with_a_driver_is_named(change, name, status):
    found = statuses(DriverFacts(**{**GOOD, **change}))
    assert found[name] == (status, 12 if status == "fail" else 0)


def test_a_gpu_is_seen_on_the_bus_or_by_its_node(tmp_path):
    bus, dev = tmp_path / "bus", tmp_path / "dev"
    for name, vendor, kind in (("00", "0x8086", "0x030000"), ("01", "0x10de", "0x068000")):
        (bus / name).mkdir(parents=True)
        (bus / name / "vendor").write_text(vendor + "\n")
        (bus / name / "class").write_text(kind + "\n")
    dev.mkdir()
    (dev / "nvidiactl").touch()
    assert not gpu_present(bus, dev)  # another vendor's GPU, NVIDIA's bridge, a driver without a GPU
    (dev / "nvidia0").touch()
    assert gpu_present(bus, dev)
    (dev / "nvidia0").unlink()
    (bus / "01" / "class").write_text("0x030200\n")
    assert gpu_present(bus, dev)


@pytest.mark.parametrize(
    ("bits", "status", "word"),
    [
        (1 << 21 | 1 << 19 | 1 << 12 | 1 << 24, "ok", "CAP_SYS_ADMIN"),
        (1 << 40 | 1 << 19 | 1 << 12 | 1 << 24, "ok", "CAP_CHECKPOINT_RESTORE"),
        (1 << 21 | 1 << 19 | 1 << 12, "warn", "CAP_SYS_RESOURCE"),
        (1 << 21 | 1 << 19, "warn", "CAP_NET_ADMIN"),
        (1 << 21, "fail", "CAP_SYS_PTRACE"),
        (0, "fail", "CAP_CHECKPOINT_RESTORE"),
    ],
)
def test_capabilities(tmp_path, monkeypatch, bits, status, word):
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{bits:016x}\n")
    check = module._capabilities(str(tmp_path))
    assert (check.status, check.exit_code) == (status, 11 if status == "fail" else 0)
    assert word in check.detail


@pytest.mark.parametrize(("scope", "status"), [("0", "ok"), ("1", "ok"), ("3", "fail")])
def test_ptrace_scope(tmp_path, scope, status):
    (tmp_path / "scope").write_text(scope + "\n")
    assert module._ptrace_scope(tmp_path / "scope").status == status


def test_ptrace_scope_2_is_roots(tmp_path, monkeypatch):
    (tmp_path / "scope").write_text("2\n")
    for uid, status in ((0, "ok"), (1000, "warn")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert module._ptrace_scope(tmp_path / "scope").status == status


def test_a_kernel_without_yama_does_not_restrict(tmp_path):
    assert module._ptrace_scope(tmp_path / "no").status == "ok"


def test_huge_pages_matter_with_a_gpu_only(tmp_path):
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert huge_pages(True, path).status == "warn"
    assert huge_pages(False, path).status == "ok"
    path.write_text("[always] madvise never\n")
    assert huge_pages(True, path).status == "ok"


def test_the_cgroups_limit_is_found_on_the_way_up(tmp_path):
    root = tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    (root / "cgroup.controllers").touch()
    (root / "a" / "memory.max").write_text("2147483648\n")
    (root / "a" / "b" / "memory.max").write_text("max\n")
    own = tmp_path / "own"
    own.write_text("1:cpu:/x\n0::/a/b\n")
    assert "2.0 GiB" in module._cgroup(root, own).detail
    own.write_text("1:cpu:/x\n")
    assert module._cgroup(root, own).status == "warn"


def test_memory_is_told(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n")
    assert module._memory(False, tmp_path / "meminfo").detail == "2.0 of 4.0 GiB available"


@pytest.mark.parametrize(
    ("codes", "code"), [([], 0), ([11], 11), ([11, 12], 12), ([11, 12, 24], 24), ([12, 24], 24), ([11, 24], 24)]
)
def test_the_exit_code_is_criu_then_driver_then_permission(codes, code):
    checks = [Check(name="x", status="fail", detail="", exit_code=c) for c in codes]
    checks.append(Check(name="y", status="warn", detail=""))
    assert Diagnosis(ok=not codes, checks=checks).exit_code == code


def test_no_working_criu_is_24_and_names_the_way_out():
    _, check = module._criu("/bin/false", False, Check(name="capabilities", status="ok", detail=""), lambda _: None)
    assert (check.status, check.exit_code) == ("fail", 24)
    assert check.fix


def test_without_the_right_criu_is_not_what_is_missing():
    rights = Check(name="capabilities", status="fail", detail="lacks X", fix="use sudo", exit_code=11)
    _, check = module._criu("/bin/false", False, rights, lambda _: None)
    assert (check.status, check.exit_code, check.fix) == ("fail", 11, "use sudo")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([], ["nft works"]),
        (["CRIU-aaaa-1"], ["1 table of CRIU's keeps", "delete table inet CRIU-aaaa-1", "limosa rm"]),
        (["CRIU-aaaa-1", "CRIU-bb"], ["2 tables of CRIU's keep", "CRIU-aaaa-1, CRIU-bb", "restored or removed"]),
    ],
)
def test_the_tables_that_criu_keeps_are_named_with_what_they_are_for(monkeypatch, tmp_path, tables, said):
    nft = tmp_path / "nft"
    lines = ["table ip filter", *(f"table inet {name}" for name in tables)]
    nft.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    nft.chmod(0o755)
    monkeypatch.setattr(module.start, "program", lambda _: str(nft))
    check = module._nftables(None)
    assert check.status == "ok"
    for part in said:
        assert part in check.detail + check.more
    assert len(check.detail) < 80  # a line; the rest is told with -v
    assert "filter" not in check.detail


@pytest.mark.parametrize(
    ("uid", "rights", "said", "fix"),
    [
        (1000, 0, "only root can tell whether it works", "sudo limosa doctor"),
        (0, 0, "may not be used without CAP_NET_ADMIN", "--cap-add NET_ADMIN"),
        (0, 1 << 12, "Operation not permitted", "--tcp-close"),
    ],
)
def test_what_nft_may_not_do_is_said_with_what_the_caller_can_do(monkeypatch, tmp_path, uid, rights, said, fix):
    nft = tmp_path / "nft"
    nft.write_text("#!/bin/sh\necho 'netlink: Error: Operation not permitted' >&2\nexit 1\n")
    nft.chmod(0o755)
    monkeypatch.setattr(module.start, "program", lambda _: str(nft))
    monkeypatch.setattr(module, "effective_capabilities", lambda: rights)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    check = module._nftables(None)
    assert said in check.detail
    assert fix in check.fix


def test_a_missing_nft_is_said_with_what_it_costs_and_what_to_install(monkeypatch):
    monkeypatch.setattr(module.start, "program", lambda _: None)
    check = module._nftables(None)
    assert check.status == "warn"
    assert "the program nft is missing" in check.detail
    assert "the other end may reset" in check.detail
    assert "doctor --fix" in check.fix
    assert "install the package nftables" in module._nftables(Criu(argv=["/bin/true"], version="4.2.1")).fix


def test_an_operation_that_died_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "r"))
    from limosa.operation.journal import Header, Journal
    from limosa.process.identity import Identity

    assert module._stale().status == "ok"
    gone = Identity(pid=os.getpid(), start_time=1)  # this pid, of a process that started at boot: nobody
    Journal.create(Header(id="move-1", operation="move", roots=[Identity.of(1)], controller=gone)).close()
    check = module._stale()
    assert (check.status, check.fix) == ("warn", "limosa recover")
    assert "move of 1" in check.detail


def test_why_the_plugin_cannot_be_built_is_said_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr("limosa.native.build.CRIU", tmp_path)
    monkeypatch.setattr("limosa.native.build.build_plugin", lambda: "cc: one\ntwo")
    assert module._plugin(None, True, True, print).detail.endswith("(cc: one)")


def test_libraries_that_were_not_built_are_named_and_built(monkeypatch, tmp_path):
    from limosa.native import build

    whole = build.SIGHT / build.SIGHT_LIBRARY
    monkeypatch.setattr(build, "SIGHT", tmp_path)
    monkeypatch.setattr(build, "build_sight", lambda: "cc: one\ntwo")
    said = module._libraries(fix=False, log=print)
    assert (said.status, said.fix) == ("warn", "install a C compiler (gcc), then limosa doctor --fix")
    assert "liblimosa_sight.so (limosa run --gpus hides nothing from a job)" in said.detail
    assert "liblimosa_shim.so" not in said.detail
    assert module._libraries(fix=True, log=print).detail.endswith("(cc: one)")
    monkeypatch.setattr(
        build, "build_sight", lambda: (tmp_path / build.SIGHT_LIBRARY).write_bytes(whole.read_bytes()) and None
    )
    assert module._libraries(fix=True, log=print).status == "ok"


def test_a_runtime_folder_that_is_full_is_no_good_one(runtime, monkeypatch):
    """Every verb failed for want of room while doctor said that all works."""
    assert module._runtime_dir().status == "ok"
    monkeypatch.setattr(module.tempfile, "TemporaryFile", lambda **_: FileIO("/dev/full", "w"))
    found = module._runtime_dir()
    assert (found.status, found.exit_code) == ("fail", 15)
    assert "No space left on device" in found.detail
