"""Hazards are pure functions: recordings of real jobs, and records of a few lines for what needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from limosa.errors import Reason
from limosa.process import hazards
from limosa.process.observation import (
    CgroupObservation,
    FdObservation,
    HostObservation,
    JobObservation,
    MapObservation,
    Peer,
    ProcessObservation,
    SocketObservation,
    SysvObservation,
    ThreadObservation,
)
from limosa.process.procfs import read_maps

RECORDINGS = Path(__file__).parent / "recordings"
ROOT = HostObservation(uid=0, caps=(1 << 41) - 1, mem_total=64 << 30, mem_available=32 << 30)


def process(pid: int = 100, **more: Any) -> ProcessObservation:
    base: dict[str, Any] = {"sid": 100, "pid_inside": pid, "name": "python", "ppid": 1 if pid == 100 else 100}
    return ProcessObservation(pid=pid, **{**base, **more})


def job(*processes: ProcessObservation, host: HostObservation = ROOT) -> JobObservation:
    return JobObservation(root=processes[0].pid, processes=list(processes), host=host)


def cuda(pid: int = 100, uvm: int = 1, gpus: int = 1, **more: Any) -> ProcessObservation:
    """A PyTorch process on a GPU, as facts of driver 580 describe it."""
    maps = [
        MapObservation(path="/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", bytes=90 << 20),
        MapObservation(path="/opt/venv/lib/libnccl.so.2", bytes=300 << 20),  # mapped in every PyTorch process
        MapObservation(path="/dev/nvidia-uvm", shared=True, bytes=uvm << 20, count=uvm),
        MapObservation(path="/dev/nvidiactl", shared=True, bytes=31 << 12, count=31),
        *more.pop("maps", []),
    ]
    fds = [FdObservation(fd=20, target="/dev/nvidia0", kind="device", device="195:0")]
    return process(pid, maps=maps, fds=fds, has_libcuda=True, n_uvm_maps=uvm, n_managed_maps=uvm - gpus, **more)


def threads(*names: str) -> list[ThreadObservation]:
    return [ThreadObservation(tid=100 + n, name=name) for n, name in enumerate(("python", *names))]


def ids(found: list[Reason]) -> dict[str, int]:
    return {reason.id: reason.exit_code for reason in found}


def everything(obs: JobObservation, **options: Any) -> dict[str, int]:
    return ids([*hazards.common_hazards(obs), *hazards.cuda_hazards(obs), *hazards.checkpoint_hazards(obs, **options)])


# --- recordings ------------------------------------------------------------------------------------------------

EXPECTED = {
    "plain": {},
    "multiprocessing": {},
    "descriptors": {},
    "torch-data-loader": {},
    "torchrun-gloo": {"io-uring": 13},  # libuv in the TCPStore, started without limosa run
    "pipe-to-tee": {"pipe-outside": 13},
    "tcp-outside": {"tcp-outside": 13},
}


def test_every_recording_is_judged():
    assert {path.stem for path in RECORDINGS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recording_is_judged_as_its_job_was_and_survives_json(name):
    data = (RECORDINGS / f"{name}.json").read_bytes()
    obs = JobObservation.from_json(data)
    assert everything(obs) == EXPECTED[name]
    assert JobObservation.from_json(obs.to_json()) == obs
    assert obs.to_json() + b"\n" == data


def test_the_recorded_gloo_ranks_need_cruis_tcp_code_and_nobodys_permission():
    obs = JobObservation.from_json((RECORDINGS / "torchrun-gloo.json").read_bytes())
    assert hazards.checkpoint_needs(obs).tcp_established
    assert "tcp-outside" not in everything(obs)


# --- CUDA --------------------------------------------------------------------------------------------------------


def test_a_plain_cuda_process_has_nothing_against_it():
    assert everything(job(cuda())) == {}
    assert everything(job(cuda(), cuda(101, threads=threads("cuda-EvtHandlr", "pin_memory")))) == {}


def test_managed_memory_is_a_uvm_mapping_beyond_one_a_gpu():
    found = hazards.cuda_hazards(job(cuda(), cuda(101, uvm=3)))
    assert ids(found) == {"managed-memory": 13}
    assert found[0].pid == 101
    assert "2 regions" in found[0].text
    assert hazards.cuda_hazards(job(cuda(uvm=2, gpus=2))) == []


def test_the_drivers_own_uvm_mappings_are_told_from_managed_memory(tmp_path):
    lines = [  # as seen on two H200, driver 580.159.04
        "204a00000-204c00000 rw-s 00000000 00:06 513 /dev/nvidia-uvm",
        "209e00000-20a000000 rw-s 00000000 00:06 513 /dev/nvidia-uvm",
    ]
    (tmp_path / "maps").write_text("\n".join(lines) + "\n")
    plain = read_maps(str(tmp_path))
    assert (plain.uvm, plain.managed) == (2, 0)
    lines += ["7f8622000000-7f8623000000 rw-s 7f8622000000 00:06 513 /dev/nvidia-uvm"]
    lines += ["7f8624000000-7f8624200000 rw-s 7f8624000000 00:06 513 /dev/nvidia-uvm"]
    (tmp_path / "maps").write_text("\n".join(lines) + "\n")
    assert read_maps(str(tmp_path)).managed == 2


def test_cuda_ipc_names_exporter_and_importer_and_new_drivers_allow_it():
    shared = [MapObservation(path="/dev/shm/cuda.shm.0.64.1", shared=True)]  # 0x64: process 100
    obs = job(cuda(maps=list(shared)), cuda(101, maps=list(shared)))
    found = hazards.cuda_hazards(obs)
    assert [(r.id, r.exit_code, r.pid) for r in found] == [("cuda-ipc", 13, 100), ("cuda-ipc", 13, 101)]
    assert "memory of process 100" in found[1].text
    assert not any(r.forceable for r in found)
    assert hazards.cuda_hazards(obs, driver_branch=610) == []
    assert len(hazards.cuda_hazards(obs, driver_branch=580)) == 2


def test_several_nccl_ranks_are_refused():
    ranks = [cuda(pid, threads=threads("pt_nccl_watchdg", "pt_nccl_heartbt")) for pid in (100, 101)]
    found = hazards.cuda_hazards(job(*ranks))
    assert ids(found) == {"nccl-ranks": 13}
    assert "100 (python), 101 (python)" in found[0].text
    assert found[0].forceable


def test_several_nccl_ranks_without_transports_that_are_lost_are_a_warning():
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    ranks = [cuda(pid, threads=threads("pt_nccl_watchdg"), env=env) for pid in (100, 101)]
    assert everything(job(*ranks)) == {"nccl-ranks": 0}
    ranks[1].env = {"NCCL_P2P_DISABLE": "1"}  # shared memory transport: the job is lost
    assert everything(job(*ranks)) == {"nccl-ranks": 13}


def test_one_nccl_rank_is_judged_by_where_its_peers_are():
    def judge(**more: Any) -> dict[str, int]:
        return ids(hazards.cuda_hazards(job(cuda(threads=threads("pt_nccl_watchdg"), **more))))

    assert judge(env={"WORLD_SIZE": "1"}) == {}
    assert judge(env={"WORLD_SIZE": "8"}) == {"nccl-ranks": 13}
    assert judge() == {"nccl-peers-unknown": 0}
    store = SocketObservation(fd=9, inode=1, family="inet", protocol="tcp", local="10.0.0.1:4", remote="10.0.0.2:29500")
    assert judge(sockets=[store]) == {"nccl-ranks": 13}
    own = SocketObservation(fd=9, inode=1, family="inet", protocol="tcp", remote="127.0.0.1:29500", peer_pids=[100])
    assert judge(sockets=[own]) == {"nccl-peers-unknown": 0}


def test_ncclss_shared_memory_tells_ranks_without_pytorch():
    ranks = [cuda(pid, maps=[MapObservation(path="/dev/shm/nccl-abc123", shared=True)]) for pid in (100, 101)]
    assert everything(job(*ranks)) == {"nccl-ranks": 13}


@pytest.mark.parametrize("path", ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs12", "/dev/gdrdrv"])
def test_memory_that_a_network_adapter_may_have(path):
    obs = job(cuda())
    assert hazards.cuda_hazards(obs) == []
    obs.processes[0].fds.append(FdObservation(fd=21, target=path, kind="device", device="231:192"))
    (found,) = hazards.cuda_hazards(obs)
    assert (found.id, found.exit_code, found.forceable, found.pid) == ("rdma", 13, True, obs.processes[0].pid)
    assert path in found.text
    assert hazards.cuda_hazards(obs, cuda_pids=[]) == []
    obs.processes[0].fds[-1].target = "/dev/infiniband/rdma_cm"  # asks who is there, registers nothing
    assert hazards.cuda_hazards(obs) == []


@pytest.mark.parametrize("name", ["jax_plugins/xla_cuda12/xla_cuda_plugin.so", "jaxlib/xla_extension.so"])
def test_jax_asks_the_driver_all_the_time_where_nothing_lets_it_wait(name):
    library = MapObservation(path=f"/opt/venv/lib/python3.12/site-packages/{name}", bytes=200 << 20)
    obs = job(cuda(maps=[library]))
    (found,) = hazards.cuda_hazards(obs)
    assert (found.id, found.exit_code, found.forceable, found.pid) == ("jax", 13, True, 100)
    assert hazards.cuda_hazards(obs, calm=[100]) == []
    assert hazards.cuda_hazards(job(process(maps=[library]))) == []  # it computes on the CPU


def test_an_mps_client_is_known_by_its_pipe_and_suspected_by_its_environment():
    pipe = SocketObservation(fd=5, inode=3, remote="/tmp/nvidia-mps/control", peer_inode=4, peer_pids=[7])
    assert ids(hazards.cuda_hazards(job(cuda(sockets=[pipe])))) == {"mps": 12}
    server = SocketObservation(fd=5, inode=3, peer_pids=[7], peers=[Peer(pid=7, name="nvidia-cuda-mps")])
    assert ids(hazards.cuda_hazards(job(cuda(sockets=[server])))) == {"mps": 12}
    env = {"CUDA_MPS_PIPE_DIRECTORY": "/var/mps"}
    assert ids(hazards.cuda_hazards(job(cuda(env=env)))) == {"mps-environment": 0}


def test_what_the_driver_says_counts_where_it_was_asked():
    obs = job(process(), cuda(101, uvm=2))
    assert ids(hazards.cuda_hazards(obs, cuda_pids={101})) == {"managed-memory": 13}
    assert hazards.cuda_hazards(obs, cuda_pids=set()) == []


def test_a_stopped_cuda_process_is_refused_and_a_cpu_one_comes_back_stopped():
    (on_gpu,) = hazards.common_hazards(job(cuda(state="T")))
    (on_cpu,) = hazards.common_hazards(job(process(state="T")))
    assert (on_gpu.id, on_gpu.exit_code, on_gpu.forceable) == ("stopped", 13, False)
    assert (on_cpu.id, on_cpu.exit_code) == ("comes-back-stopped", 0)
    beside = hazards.common_hazards(job(cuda(), process(101, state="T")))
    assert ids(beside) == {"stopped": 13}
    traced = hazards.common_hazards(job(cuda(state="t", tracer_pid=9, tracer_name="gdb")))
    assert "debugger 9 (gdb)" in traced[0].text
    assert everything(job(process(state="t", tracer_pid=9, tracer_name="gdb"))) == {"debugger": 13}


def test_workers_with_inherited_device_files_need_the_plugin():
    worker = process(101, fds=[FdObservation(fd=20, target="/dev/nvidia0", kind="device", device="195:0")])
    obs = job(cuda(), worker)
    assert everything(obs, cuda_pids=[100]) == {}
    assert everything(obs, cuda_pids=[100], plugin=False) == {"inherited-cuda": 24}
    assert everything(job(cuda()), cuda_pids=[100], plugin=False) == {}


# --- permission, namespaces, the rest ----------------------------------------------------------------------------

USER = HostObservation(uid=1000, caps=0)


def test_somebody_elses_process():
    assert everything(job(process(uid=0), host=USER)) == {"wrong-user": 11}
    assert everything(job(process(uid=1000), host=USER)) == {}
    assert everything(job(process(uid=1000))) == {}, "root may"
    assert everything(job(process(uid=1000, unreadable=["maps", "fd"]), host=USER)) == {"permission": 11}


@pytest.mark.parametrize(
    ("uid", "caps", "hint"),
    [
        (1000, 0, "run limosa with sudo"),
        (0, 0, "CAP_SYS_PTRACE, which root lacks here"),
        (0, 1 << 19, "on the host, outside of this container"),
    ],
)
def test_only_who_is_not_root_is_told_to_use_sudo(uid, caps, hint):
    (reason,) = hazards.common_hazards(
        job(process(uid=uid, unreadable=["maps"]), host=HostObservation(uid=uid, caps=caps))
    )
    assert hint in reason.hint


@pytest.mark.parametrize(
    ("scope", "caps", "refused"), [(0, 0, False), (1, 0, True), (1, 1 << 19, False), (3, 1 << 19, True)]
)
def test_yama_keeps_criu_away(scope, caps, refused):
    host = HostObservation(uid=1000, caps=caps, ptrace_scope=scope, ancestors=[5, 1])
    assert everything(job(process(uid=1000), host=host)) == ({"ptrace-scope": 11} if refused else {})


@pytest.mark.parametrize(
    ("uid", "gid", "lacks", "refused"),
    [(1000, 0, 24, True), (0, 1000, 24, True), (0, 0, 24, False), (1000, 1000, 25, False)],
)
def test_limits_of_another_users_process_cannot_be_read_without_a_capability(uid, gid, lacks, refused):
    host = HostObservation(uid=0, caps=ROOT.caps & ~(1 << lacks))
    assert everything(job(process(uid=uid, gid=gid), host=host)) == ({"resource-limits": 11} if refused else {})


def test_limosas_own_ancestors():
    host = HostObservation(uid=0, caps=ROOT.caps, ancestors=[777, 100, 1])
    assert everything(job(process(), host=host)) == {"own-ancestor": 2}


def test_descriptors_of_kinds_that_need_other_machines():
    def judge(**fd: Any) -> dict[str, int]:
        return everything(job(process(fds=[FdObservation(fd=7, **fd)])))

    assert judge(target="anon_inode:[infinibandevent]", kind="anon") == {"anonymous-inode": 13}
    assert judge(target="anon_inode:bpf-map", kind="anon") == {"anonymous-inode": 13}
    assert judge(target="/dev/dri/renderD128", kind="device", device="226:128") == {"device": 13}
    assert judge(target="/dev/sda", kind="block", device="8:0") == {"device": 13}
    assert judge(target="/dev/ttyS0", kind="tty", device="4:64") == {"device": 13, "terminal": 13}
    assert judge(target="/dev/null", kind="device", device="1:3") == {}
    assert judge(target="/dev/nvidia-caps/nvidia-cap1", kind="device", device="237:1") == {}
    assert judge(target="/data/f", kind="file", mounted=False) == {"unmounted-file": 13}
    assert judge(target="/dev/null", kind="device", device="1:3", mounted=False) == {"unmounted-file": 13}


def test_mappings_of_devices():
    def judge(path: str) -> dict[str, int]:
        return everything(job(process(maps=[MapObservation(path=path, shared=True)])))

    assert judge("/dev/infiniband/uverbs0") == {"device": 13}
    assert judge("/dmabuf:") == {"anonymous-inode": 13}
    assert judge("anon_inode:[perf_event]") == {"anonymous-inode": 13}
    assert judge("anon_inode:[io_uring]") == {"io-uring": 13}
    for path in ("/dev/zero", "/dev/shm/torch_1", "/dev/nvidia0", "/dev/hugepages/x", "[heap]", "/opt/dev/x"):
        assert judge(path) == {}


def test_a_unix_socket_whose_peer_cannot_be_asked_is_a_warning():
    seen = SocketObservation(fd=4, inode=9, peer_known=False)
    assert everything(job(process(sockets=[seen]))) == {"peer-unknown": 0}
    hidden = SocketObservation(fd=4, inode=9, peer_inode=10)
    assert everything(job(process(sockets=[hidden]))) == {"peer-unknown": 0}
    fd = FdObservation(fd=4, target="socket:[9]", kind="socket")
    some = HostObservation(uid=1000, hidden_processes=7)  # one of those has it
    found = everything(job(process(uid=1000, sockets=[hidden], fds=[fd]), host=some))
    assert found == {"socket-outside": 13, "peers-hidden": 0}


def test_a_connection_within_the_machine_whose_other_end_is_gone_is_with_nobody():
    def judge(host: HostObservation = ROOT, **more: Any) -> dict[str, int]:
        seen = SocketObservation(fd=4, inode=9, family="inet", protocol="tcp", local="10.0.0.1:7", **more)
        return everything(job(process(uid=host.uid, sockets=[seen]), host=host))

    assert judge(remote="10.0.0.1:9", state="close-wait") == {}
    assert judge(remote="10.0.0.2:9", state="close-wait") == {"tcp-outside": 13}
    assert judge(remote="10.0.0.1:9", peer_inode=8) == {}
    some = HostObservation(uid=1000, hidden_processes=3)
    assert judge(remote="10.0.0.1:9", peer_inode=8, host=some) == {"tcp-outside": 13}


def test_a_socket_that_cannot_be_told_is_a_warning_and_a_strange_one_is_refused():
    assert everything(job(process(sockets=[SocketObservation(fd=4, inode=9, family="unknown")]))) == {"socket-kind": 0}
    assert everything(job(process(sockets=[SocketObservation(fd=4, inode=9, family="vsock")]))) == {"socket-kind": 13}


def test_system_v_semaphores_are_a_warning_and_queues_may_be_forced():
    uncertain = SysvObservation(kind="sem", id=4, evidence="creator's user", certain=False)
    assert everything(job(process(sysv_ipc=[uncertain]))) == {"sysv-semaphores": 0}
    queue = hazards.checkpoint_hazards(job(process(sysv_ipc=[SysvObservation(kind="msg", id=4)])))
    memory = hazards.checkpoint_hazards(job(process(sysv_ipc=[SysvObservation(kind="shm", id=4)])))
    assert [(r.id, r.forceable) for r in queue + memory] == [("sysv-ipc", True), ("sysv-ipc", False)]


def test_namespaces_told_apart():
    host = HostObservation(uid=0, caps=ROOT.caps, namespaces={"mnt": 1, "pid": 2, "user": 3})

    def judge(inside: int = 100, **other: int) -> dict[str, int]:
        return everything(
            job(process(namespaces={"mnt": 1, "pid": 2, "user": 3, **other}, pid_inside=inside), host=host)
        )

    assert judge() == {}
    assert judge(mnt=9) == {"mount-namespace": 13}
    assert judge(user=9) == {"user-namespace": 13}
    assert judge(pid=9, inside=5) == {"pid-namespace": 13}
    assert judge(pid=9, inside=1) == {}


def test_a_pipe_shared_by_many_is_told_once():
    def held(pid: int) -> ProcessObservation:
        peers = [Peer(pid=9, name="tee", fd=0, access="r"), Peer(pid=8, name="bash", fd=1, access="w")]
        return process(pid, fds=[FdObservation(fd=fd, target="pipe:[7]", kind="pipe", peers=peers) for fd in (1, 2)])

    (reason,) = hazards.checkpoint_hazards(job(held(100), held(101), held(102)))
    assert reason.text == (
        "descriptor 1, 2 of process 100 (python) and 2 more processes is a pipe read by process 9 (tee) and written by "
        "process 8 (bash), which is not part of the job"
    )


def test_tcp_close_says_that_it_closes_inner_connections_too():
    inner = SocketObservation(fd=4, inode=9, family="inet", protocol="tcp", remote="127.0.0.1:5", peer_pids=[100])
    assert everything(job(process(sockets=[inner])), tcp_close=True) == {"tcp-close-inside": 0}
    assert everything(job(process(sockets=[inner]))) == {}


# --- room --------------------------------------------------------------------------------------------------------

GIB = 1 << 30


def limited(pid: int, limit: int, used: int, path: str = "/sys/fs/cgroup/job") -> ProcessObservation:
    level = CgroupObservation(path=path, limit_bytes=limit, used_bytes=used)
    return process(pid, cgroup=level, cgroup_levels=[level])


def test_a_cgroup_without_room_is_refused_and_may_be_forced():
    (reason,) = hazards.memory_hazards(job(limited(100, 8 * GIB, 5 * GIB)), 4 * GIB)
    assert (reason.id, reason.exit_code, reason.forceable) == ("cgroup", 15, True)
    assert "3.00 GiB left of 8.00 GiB" in reason.text
    assert "4.00 GiB" in reason.text
    assert hazards.memory_hazards(job(limited(100, 8 * GIB, 5 * GIB)), 2 * GIB) == []


def test_the_needs_of_processes_in_one_cgroup_add_up():
    obs = job(limited(100, 8 * GIB, 5 * GIB), limited(101, 8 * GIB, 5 * GIB))
    assert ids(hazards.memory_hazards(obs, {100: 2 * GIB, 101: 2 * GIB})) == {"cgroup": 15}
    apart = job(limited(100, 8 * GIB, 5 * GIB, "/a"), limited(101, 8 * GIB, 5 * GIB, "/b"))
    assert hazards.memory_hazards(apart, {100: 2 * GIB, 101: 2 * GIB}) == []


def test_the_host_is_looked_at_again_only_when_asked_to():
    obs = job(process())
    assert ids(hazards.memory_hazards(obs, 40 * GIB)) == {"host-memory": 15}
    asked: list[int] = []

    def grow(needed: int) -> int:
        asked.append(needed)
        return 41 * GIB

    assert hazards.memory_hazards(obs, 40 * GIB, probe=True, grow=grow) == []
    assert asked == [40 * GIB]
    assert hazards.memory_hazards(obs, 16 * GIB, probe=True, grow=grow) == []
    assert asked == [40 * GIB]
    assert hazards.memory_hazards(obs, 0) == []


# --- ranks that have not begun -----------------------------------------------------------------------------------


def rank(pid: int, number: int, **more: Any) -> ProcessObservation:
    return process(pid, env={"RANK": str(number), "WORLD_SIZE": "2"}, **more)


LAUNCHED = [process(100), rank(101, 0), rank(102, 1), rank(103, 0, ppid=101), rank(104, 1, ppid=102)]
"""An agent, two ranks, and a worker of each, which has inherited the environment."""


@pytest.mark.parametrize(
    ("cuda_pids", "late"),
    [((), []), ((101,), [102]), ((103,), [102]), ((101, 102), []), ((101, 104), []), ((100,), [])],
    ids=["none", "one", "a worker of one", "both", "both, one by its worker", "the agent"],
)
def test_a_rank_that_has_not_begun_is_found_where_others_have(cuda_pids: tuple[int, ...], late: list[int]) -> None:
    assert [one.pid for one in hazards.late_ranks(job(*LAUNCHED), cuda_pids)] == late


def test_who_has_ended_or_is_alone_is_no_late_rank() -> None:
    ended = job(process(100), rank(101, 0), rank(102, 1, state="Z"))
    alone = job(process(100), cuda(101, env={"RANK": "0", "WORLD_SIZE": "1"}), process(102, env={"RANK": "1"}))
    assert hazards.late_ranks(ended, [101]) == hazards.late_ranks(alone, [101]) == []
