"""What can be seen of a job from outside in each state: NVML's lists and bytes, /proc's descriptors and mappings."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.differences import HARDWARE, expected
from conformance.jobs import MIB, POSIX, Controller, Job, enum, prop

JobIn = Callable[[str], Job]
Start = Callable[..., Job]
HELD = 192 * MIB
INTERPROCESS = 4 | 2  # CU_EVENT_INTERPROCESS takes CU_EVENT_DISABLE_TIMING with it
SHARED_FILE = r"/dev/shm/cuda\.shm\.\w+\.{:x}\.\w+"  # with the exporter's pid


def device_files(pid: int) -> list[str]:
    """What a process has open under /dev/nvidia*, the software GPU's stand-in for hardware included."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return found


def descriptors(pid: int) -> list[str]:
    """The same without the stand-in for hardware."""
    return [path for path in device_files(pid) if not path.startswith(HARDWARE)]


def mappings(pid: int, part: str = "/dev/nvidia", hardware: bool = False) -> list[str]:
    """The files that a process has mapped whose paths have ``part`` in them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6 and part in line]
    return [path for path in found if hardware or not path.startswith(HARDWARE)]


def anonymous(pid: int) -> int:
    """RssAnon in bytes."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found.group(1)) * 1024


# --- NVML -------------------------------------------------------------------------------------------------------------

SHOWN = {
    "initialised": False,  # no context: nothing on any GPU
    "running": True,
    "locked": True,
    "checkpointed": False,
    "refused": False,
    "restored": True,
}


@pytest.mark.parametrize("state", SHOWN)
def test_nvml_lists_the_job_while(state: str, controller: Controller, job_in: JobIn) -> None:
    held = controller.bytes_of(job_in(state).pid)
    assert len(held) == (1 if SHOWN[state] else 0)


@pytest.mark.parametrize("state", ["running", "locked", "restored"])
def test_nvml_tells_the_jobs_bytes_while(state: str, controller: Controller, start: Start) -> None:
    job = start().start_up()
    before = controller.bytes_of(job.pid)[0]
    job.do("cuMemAlloc", HELD)
    if state != "running":
        assert controller.lock(job.pid) == "SUCCESS"
    if state == "restored":
        assert controller.checkpoint(job.pid) == "SUCCESS"
        assert controller.restore(job.pid) == "SUCCESS"
    after = controller.bytes_of(job.pid)[0]
    assert before is not None
    assert after is not None
    assert abs(after - before - HELD) <= 32 * MIB


def test_nvml_shows_a_moved_job_where_it_went(controller: Controller, job_in: JobIn) -> None:
    job = job_in("running")
    here = controller.gpus_of(job.pid)
    controller.cycle(job.pid, controller.swap)
    assert controller.gpus_of(job.pid) == {1 - next(iter(here))}


@pytest.mark.alone
@pytest.mark.parametrize("state", ["checkpointed", "restored", "killed"])
def test_the_gpus_memory_is_free_for_others_while_the_job_is(state: str, controller: Controller, start: Start) -> None:
    idle = controller.used(0)
    job = start().start_up()
    job.do("cuMemAlloc", HELD)
    held = controller.used(0)
    assert held >= idle + HELD
    controller.suspend(job.pid)
    if state == "killed":
        job.kill()
    if state == "restored":
        assert controller.restore(job.pid) == "SUCCESS"
        assert abs(controller.used(0) - held) <= 64 * MIB
    else:
        assert abs(controller.used(0) - idle) <= 64 * MIB


@pytest.mark.alone
def test_another_job_takes_the_memory_of_a_checkpointed_one(controller: Controller, start: Start) -> None:
    job, other = start().start_up(), start().start_up()
    size = 512 * MIB
    job.do("cuMemAlloc", size)
    other.do("cuMemAlloc", other.do("cuMemGetInfo")[0] - 256 * MIB)
    assert other.says("cuMemAlloc", size) == "OUT_OF_MEMORY"
    controller.suspend(job.pid)
    assert other.says("cuMemAlloc", size) == "SUCCESS"


# --- /proc ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["initialised", "running", "locked", "restored"])
def test_a_job_has_device_files_open_while(state: str, job_in: JobIn) -> None:
    found = descriptors(job_in(state).pid)
    assert "/dev/nvidiactl" in found
    assert any(re.fullmatch(r"/dev/nvidia\d+", path) for path in found)


@pytest.mark.parametrize("state", ["checkpointed", "refused"])
def test_a_job_has_no_device_files_open_while(state: str, job_in: JobIn) -> None:
    assert device_files(job_in(state).pid) == []


@pytest.mark.parametrize("state", ["checkpointed", "refused"])
def test_a_job_has_no_device_files_mapped_while(state: str, job_in: JobIn) -> None:
    assert mappings(job_in(state).pid, hardware=True) == []


@pytest.mark.parametrize("state", ["running", "locked", "restored"])
def test_a_plain_job_maps_nvidia_uvm_once_while(state: str, job_in: JobIn) -> None:
    assert len(mappings(job_in(state).pid, "/dev/nvidia-uvm")) == 1


@pytest.mark.parametrize("state", ["running", "restored"])
def test_a_plain_job_maps_nvidiactl_or_a_gpus_node_while(state: str, job_in: JobIn) -> None:
    found = [path for path in mappings(job_in(state).pid) if path != "/dev/nvidia-uvm"]
    assert found
    assert all(re.fullmatch(r"/dev/nvidia(ctl|\d+)", path) for path in found)


@pytest.mark.parametrize("visible", ["0", "1"])
def test_a_job_that_sees_one_gpu_opens_that_ones_node(visible: str, start: Start, controller: Controller) -> None:
    job = start(CUDA_VISIBLE_DEVICES=visible).start_up()
    minors = [gpu["minor"] for gpu in controller.inventory()]
    assert f"/dev/nvidia{minors[int(visible)]}" in descriptors(job.pid)


def test_a_process_that_has_loaded_the_library_only_has_nothing_open(start: Start) -> None:
    job = start()
    job.do("cuDriverGetVersion")
    assert descriptors(job.pid) == []
    assert mappings(job.pid) == []


@pytest.mark.parametrize("regions", [1, 3])
def test_each_region_of_managed_memory_maps_nvidia_uvm_once_more(regions: int, job: Job) -> None:
    before = len(mappings(job.pid, "/dev/nvidia-uvm"))
    for _ in range(regions):
        job.do("cuMemAllocManaged", 4 * MIB, enum("CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL"))
    assert len(mappings(job.pid, "/dev/nvidia-uvm")) == before + regions


def test_exported_vmm_memory_is_one_more_descriptor(job: Job) -> None:
    handle = job.do("cuMemCreate", 2 * MIB, prop(exportable=True), 0)
    before = len(device_files(job.pid))
    fd = job.do("cuMemExportToShareableHandle", handle, POSIX, 0)
    assert len(device_files(job.pid)) == before + 1
    assert os.readlink(f"/proc/{job.pid}/fd/{fd}").startswith(expected("descriptor of exported memory"))


@pytest.mark.parametrize("kind", ["plain", "vmm", "pinned"])
def test_memory_that_is_not_exported_opens_no_descriptor(kind: str, job: Job) -> None:
    before = len(device_files(job.pid))
    if kind == "plain":
        job.do("cuMemAlloc", 4 * MIB)
    elif kind == "vmm":
        job.do("cuMemCreate", 2 * MIB, prop(), 0)
    else:
        job.pinned(4 * MIB)
    assert len(device_files(job.pid)) == before


def test_a_forked_child_inherits_descriptors_and_mappings(job: Job) -> None:
    child = job.run("fork", [])["pid"]
    assert "/dev/nvidiactl" in descriptors(child)
    assert mappings(child)


def test_a_forked_child_keeps_them_while_its_parent_is_checkpointed(job: Job, controller: Controller) -> None:
    child = job.run("fork", [])["pid"]
    controller.suspend(job.pid)
    assert descriptors(job.pid) == []
    assert "/dev/nvidiactl" in descriptors(child)


@pytest.mark.parametrize("side", ["exporter", "importer"])
def test_memory_shared_by_legacy_ipc_alone_maps_no_file_in_dev_shm(side: str, start: Start) -> None:
    exporter, importer = start().start_up(), start().start_up()
    handle = exporter.do("cuIpcGetMemHandle", exporter.do("cuMemAlloc", 4 * MIB))
    importer.do("cuIpcOpenMemHandle", {"s": "CUipcMemHandle", "raw": handle}, 1)
    assert mappings((exporter if side == "exporter" else importer).pid, "/dev/shm/cuda.shm.") == []


@pytest.mark.parametrize("side", ["exporter", "importer"])
def test_an_event_shared_by_legacy_ipc_maps_a_file_in_dev_shm(side: str, start: Start) -> None:
    """As PyTorch shares them, beside the memory."""
    exporter, importer = start().start_up(), start().start_up()
    handle = exporter.do("cuIpcGetEventHandle", exporter.do("cuEventCreate", INTERPROCESS))
    importer.do("cuIpcOpenEventHandle", {"s": "CUipcEventHandle", "raw": handle})
    found = mappings((exporter if side == "exporter" else importer).pid, "/dev/shm/cuda.shm.")
    assert found
    assert all(re.fullmatch(SHARED_FILE.format(exporter.pid), path) for path in found)


# --- the job's own memory ---------------------------------------------------------------------------------------------


def test_while_checkpointed_the_device_memory_is_in_the_jobs_anonymous_memory(job: Job, controller: Controller) -> None:
    memory = job.do("cuMemAlloc", HELD)
    job.do("cuMemsetD8", memory, 1, HELD)
    job.do("cuCtxSynchronize")
    before = anonymous(job.pid)
    assert controller.lock(job.pid) == "SUCCESS"
    assert abs(anonymous(job.pid) - before) < 64 * MIB
    assert controller.checkpoint(job.pid) == "SUCCESS"
    assert anonymous(job.pid) - before >= HELD
    assert controller.restore(job.pid) == "SUCCESS"
    assert anonymous(job.pid) - before < HELD


def test_the_copy_is_one_anonymous_mapping_as_large_as_what_is_saved(job: Job, controller: Controller) -> None:
    job.do("cuMemAlloc", HELD)
    before = {line.split()[0] for line in Path(f"/proc/{job.pid}/maps").read_text().splitlines()}
    controller.suspend(job.pid)
    new = []
    for line in Path(f"/proc/{job.pid}/maps").read_text().splitlines():
        fields = line.split()
        low, high = (int(part, 16) for part in fields[0].split("-"))
        if fields[0] not in before and len(fields) == 5 and fields[1].startswith("rw") and high - low >= HELD:
            new.append(high - low)
    assert len(new) == 1


def test_the_copys_mapping_is_asked_of_the_c_library_once_and_populated(
    start: Start, controller: Controller, tmp_path: Path
) -> None:
    """So a preloaded library can answer it with memory of its own."""
    library, seen = tmp_path / "mappings_seen.so", tmp_path / "seen"
    source = Path(__file__).with_name("mappings_seen.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True, timeout=30)
    job = start(LD_PRELOAD=str(library), MAPPINGS_SEEN=str(seen)).start_up()
    job.do("cuMemAlloc", HELD)
    controller.lock(job.pid)
    seen.unlink(missing_ok=True)
    assert controller.checkpoint(job.pid) == "SUCCESS"
    asked = [line.split() for line in seen.read_text().splitlines()]
    assert [populated for size, populated in asked if int(size) >= HELD] == ["1"], asked


def test_pinned_memory_costs_nothing_more_while_checkpointed(start: Start, controller: Controller) -> None:
    grown = []
    for size in (4096, HELD):
        job = start().start_up()
        job.pinned(size)
        before = anonymous(job.pid)
        controller.suspend(job.pid)
        grown.append(anonymous(job.pid) - before)
    assert grown[1] - grown[0] < HELD // 2
