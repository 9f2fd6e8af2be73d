"""Memory is put away and taken back by the control socket: contents, addresses, failures in the middle, who may ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shim_turns import away, back
from soft_node import Node
from softgpu.far import Died, Far

from limosa.parking.names import names_of
from limosa.parking.protocol import MAGIC, MESSAGE, NOT_READY, VERSION, Stand
from limosa.parking.shim import GateStaysOpen, Shim, ShimError
from limosa.process.identity import Identity

MIB = 1 << 20
pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


def test_hello_and_list(job: Far, shim: Shim) -> None:
    assert shim.hello().stand == Stand.OPEN
    assert (shim.hello().n_memories, shim.hello().bytes) == (0, 0)
    address = job("large(4)")
    own = job("vmm(6, 2)")
    job("plain(1, 3)")
    first, second = shim.memories()
    assert (first.bytes, first.device, first.at, first.plain) == (4 * MIB, 0, address, True)
    assert (second.bytes, second.device, second.at, second.plain) == (6 * MIB, 0, own, False)
    assert first.id < second.id
    assert not first.shared
    assert not first.away
    assert (shim.hello().n_memories, shim.hello().bytes) == (2, 10 * MIB)
    assert shim.counts()["small"] == (1, MIB)


def test_more_than_one_packet_of_pieces(job: Far, shim: Shim) -> None:
    job("keep = [ok(cu.cuMemAlloc(2 << 20)) for _ in range(5)]")
    job("vmms = [ok(cu.cuMemCreate(2 << 20, made_of(), 0)) for _ in range(100)]")
    assert len(shim.memories()) == 105


def test_unmap_and_map_keep_contents_and_addresses(job: Far, shim: Shim) -> None:
    addresses = [job("large(4, 1)"), job("large(7, 2)"), job("vmm(2, 3)"), job("plain(1, 4)")]
    for _ in range(3):
        ids, fds = away(shim)
        assert shim.hello().stand == Stand.AWAY
        assert all(memory.away for memory in shim.memories())
        back(shim, ids, fds)
        assert job("intact()")
        assert [memory.at for memory in shim.memories()] == addresses[:3]
    assert job(f"says('cuMemFree', {addresses[0]})") == "SUCCESS"
    assert len(shim.memories()) == 2


def test_memory_goes_back_to_the_gpu_while_only_descriptors_hold_it(node: Node, job: Far, shim: Shim) -> None:
    job("large(32)")
    before = node.switches.used(0)
    ids, fds = away(shim)
    assert node.switches.used(0) == before, "the descriptors hold it"
    back(shim, ids, fds)
    assert job("intact()")
    assert job("says('cuMemFree', blocks[0][0])") == "SUCCESS"
    assert node.switches.used(0) == before - 32 * MIB


def test_calls_wait_while_it_is_away(job: Far, shim: Shim) -> None:
    job("large(4)")
    ids, fds = away(shim)
    pending = [job.send(f"said(cu.{call})") for call in ("cuCtxGetDevice()", "cuMemAlloc(4 << 20)", "cuMemGetInfo()")]
    with pytest.raises(TimeoutError):
        pending[0].value(0.5)
    assert not any(one.done for one in pending)
    back(shim, ids, fds)
    # A thread of its own has no context.
    assert [one.value() for one in pending] == ["INVALID_CONTEXT"] * 3


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("call", ["cuMemMap", "cuMemImportFromShareableHandle", "cuMemSetAccess"])
def test_a_failure_in_the_middle_of_a_map(node: Node, job: Far, shim: Shim, call: str, n: int) -> None:
    for seed in range(3):
        job(f"large(4, {seed})")
    ids, fds = away(shim)
    rule = node.switches.add(f"function={call} nth={n} caller={job.pid} result=2")
    with pytest.raises(ShimError):
        shim.map(ids, fds)
    assert node.switches.count(rule) >= n
    assert shim.hello().stand == Stand.AWAY
    with pytest.raises(ShimError):
        shim.open_gate()
    back(shim, ids, fds)
    assert job("intact()")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("came", [False, True])
def test_memory_that_the_driver_does_not_let_go_of(node: Node, job: Far, shim: Shim, n: int, came: bool) -> None:
    for seed in range(3):
        job(f"large(4, {seed})")
    if came:  # imported: left there, the driver would save it and never bring it back
        back(shim, *away(shim))
    shim.close_gate(60)
    pieces = shim.memories()
    fds = shim.export([memory.id for memory in pieces])
    rule = node.switches.add(f"function=cuMemRelease nth={n} caller={job.pid} result=2")
    with pytest.raises(ShimError):
        shim.unmap()
    node.switches.remove(rule)
    assert shim.hello().stand == Stand.AWAY
    assert shim.map([memory.id for memory in pieces], fds) == Stand.CLOSED
    shim.open_gate()
    assert job("intact()")
    before = node.switches.used(0)
    away(shim)
    assert node.switches.used(0) <= before
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_failure_in_the_middle_of_an_unmap(node: Node, job: Far, shim: Shim, n: int) -> None:
    for seed in range(3):
        job(f"large(4, {seed})")
    shim.close_gate(60)
    ids = [memory.id for memory in shim.memories()]
    node.switches.add(f"function=cuMemUnmap nth={n} caller={job.pid} result=999")
    with pytest.raises(ShimError):
        shim.unmap()
    assert shim.hello().stand == (Stand.CLOSED if n == 1 else Stand.AWAY)
    assert shim.map(ids, []) == Stand.CLOSED
    shim.open_gate()
    assert job("intact()")
    back(shim, *away(shim))
    assert job("intact()")


def test_an_export_that_fails_hands_out_nothing(node: Node, job: Far, shim: Shim) -> None:
    for seed in range(3):
        job(f"large(4, {seed})")
    before = len(os.listdir("/proc/self/fd"))
    its = len(os.listdir(f"/proc/{job.pid}/fd"))
    node.switches.add(f"function=cuMemExportToShareableHandle nth=2 caller={job.pid} result=2")
    with pytest.raises(ShimError):
        shim.export([memory.id for memory in shim.memories()])
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(os.listdir(f"/proc/{job.pid}/fd")) == its


def test_what_was_exported_by_the_job_is_left_alone(job: Far, shim: Shim) -> None:
    address = job("vmm(4, 1, exported=True)")
    job("large(4, 2)")
    shared, own = shim.memories()
    assert (shared.at, shared.shared, own.shared) == (address, True, False)
    assert shim.hello().bytes == own.bytes
    ids, fds = away(shim)
    assert ids == [own.id]
    back(shim, ids, fds)
    assert job("intact()")


def test_memory_of_two_devices_and_which_is_which(start: Callable[..., Far]) -> None:
    job = start()
    with Shim(Identity.of(job.pid)) as shim:
        job("large(4, 1)")
        job("context(1)")
        job("large(4, 2)")
        job("context(0)")
        assert [memory.device for memory in shim.memories()] == [0, 1]
        uuids = job("[bytes(ok(cu.cuDeviceGetUuid(n)).bytes).hex() for n in (0, 1)]")
        assert [uuid.removeprefix("GPU-").replace("-", "") for uuid in shim.devices()] == uuids
        back(shim, *away(shim))
        assert job("intact()")


def test_verbs_that_there_are_not(job: Far, shim: Shim) -> None:
    for verb in (0, 99, 65535):
        shim._socket.send(MESSAGE.pack(MAGIC, VERSION, verb, 7, 0, 0, 0, 0, 0))
        assert MESSAGE.unpack(shim._socket.recv(4096)[: MESSAGE.size])[4] == -38
    for packet in (
        b"x",
        MESSAGE.pack(MAGIC, VERSION + 1, 1, 7, 0, 0, 0, 0, 0),
        MESSAGE.pack(1, 1, 1, 7, 0, 0, 0, 0, 0),
    ):
        shim._socket.send(packet)
        assert MESSAGE.unpack(shim._socket.recv(4096)[: MESSAGE.size])[4] == -71
    assert shim.hello().stand == Stand.OPEN


def test_wrong_order_is_refused(job: Far, shim: Shim) -> None:
    job("large(4)")
    (memory,) = shim.memories()
    for wrong in (shim.unmap, lambda: shim.map([memory.id], []), lambda: shim.stack(1024)):
        with pytest.raises(ShimError):
            wrong()
    shim.close_gate(60)
    with pytest.raises(ShimError):
        shim.close_gate(60)
    with pytest.raises(ShimError):
        shim.export([memory.id + 1])
    with pytest.raises(ShimError):
        shim.map([memory.id + 1], [])
    ids, fds = [memory.id], shim.export([memory.id])
    assert shim.unmap() == Stand.AWAY
    with pytest.raises(ShimError):
        shim.open_gate()
    with pytest.raises(ShimError):
        shim.map([memory.id], [])
    back(shim, ids, fds)
    assert job("intact()")


def test_a_lost_connection_changes_nothing(job: Far) -> None:
    identity = Identity.of(job.pid)
    job("large(4)")
    with Shim(identity) as shim:
        ids, fds = away(shim)
    with Shim(identity) as shim:
        assert shim.hello().stand == Stand.AWAY
        back(shim, ids, fds)
    assert job("intact()")


def test_descriptors_do_not_pile_up(job: Far, shim: Shim) -> None:
    for seed in range(3):
        job(f"large(4, {seed})")
    back(shim, *away(shim))
    before = len(os.listdir(f"/proc/{job.pid}/fd"))
    for _ in range(10):
        back(shim, *away(shim))
    assert len(os.listdir(f"/proc/{job.pid}/fd")) == before
    assert job("[ok(cu.cuMemFree(address)) for address, _ in blocks] and None") is None
    assert len(os.listdir(f"/proc/{job.pid}/fd")) <= before - 3


def test_a_stack_limit_is_lowered_and_put_back(job: Far, shim: Shim) -> None:
    """As the driver has it meanwhile; what the application asks waits at the gate, and finds it as it was."""
    assert job("stack_beneath()") == 1024
    shim.close_gate(60)
    for bytes_, there in ((512, 512), (16, 512), (0, 1024), (16, 16), (0, 1024), (768, 768)):
        shim.stack(bytes_)
        assert job("stack_beneath()") == there
    pending = job.send("context() or ok(cu.cuCtxGetLimit(cu.CUlimit.CU_LIMIT_STACK_SIZE))")
    shim.open_gate()
    assert pending.value() == job("stack_beneath()") == 1024


ASK = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(sys.argv[1].replace("@", "\\0"))
s.settimeout(60)
try:
    s.send(bytes(48))
    print(len(s.recv(4096)))
except OSError as error:
    print(type(error).__name__)
"""


def test_another_user_is_not_heard(node: Node, job: Far) -> None:
    identity = Identity.of(job.pid)
    said = node.python(ASK, names_of(identity.pid)[0].address.replace("\0", "@")).stdout.strip()
    assert said in ("0", "BrokenPipeError", "ConnectionResetError")
    with Shim(identity) as shim:
        assert shim.hello().stand == Stand.OPEN


def test_it_ends_with_its_process(job: Far, shim: Shim) -> None:
    with pytest.raises(Died):
        job("os._exit(3)")
    with pytest.raises(ShimError):
        shim.hello()


def test_a_process_without_it_says_so(start: Callable[..., Far]) -> None:
    bare = start(shim=False)
    with pytest.raises(ShimError):
        Shim(Identity.of(bare.pid))
    assert bare("says('cuMemAlloc', 4 << 20)") == "SUCCESS"


def test_switched_off_by_a_variable(node: Node, library: Path) -> None:
    far = Far(node, env={"LD_PRELOAD": str(library), "LIMOSA_SHIM": "off"})
    far("start()")
    far("plain(4, 1)")
    assert far("intact()")
    with pytest.raises(ShimError):
        Shim(Identity.of(far.pid))


def test_a_gate_that_does_not_close(job: Far, shim: Shim) -> None:
    job("large(4)")
    job("spin()")
    with pytest.raises(GateStaysOpen) as caught:
        shim.close_gate(0.3)
    assert caught.value.fields["result"] == NOT_READY
    assert shim.hello().stand == Stand.OPEN
    assert job("said(cu.cuCtxGetDevice())") == "SUCCESS"
    with pytest.raises(GateStaysOpen):
        shim.close_gate(0.3)
    job("release()")
    back(shim, *away(shim))
    assert job("intact()")


# --- on a GPU that it did not see when it began -----------------------------------------------------------------------


def test_the_gpus_that_it_saw_at_first(node: Node, library: Path) -> None:
    far = Far(node, env={"LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": "1"})
    other = Far(node, env={"LD_PRELOAD": str(library)})
    for job in (far, other):
        job("start()")
    with Shim(Identity.of(far.pid)) as one, Shim(Identity.of(other.pid)) as both:
        first, second = both.devices()
        assert one.devices() == [second]
        assert (one.sees(first), one.sees(second)) == (False, True)
        assert (both.sees(first), both.sees(second)) == (True, True)


def test_made_anew_by_the_job_itself(node: Node, job: Far, shim: Shim) -> None:
    """What was made is another memory, at the same address; it is the job's own, and can be parked again."""
    address = job("large(4, 1)")
    job("vmm(6, 2)")
    ids, fds = away(shim)
    for wrong in ([ids[0] + 100], [0]):
        with pytest.raises(ShimError):
            shim.make(wrong)
    made = shim.make(ids)
    again = shim.make(ids)
    assert [os.fstat(one).st_ino for one in made] == [os.fstat(one).st_ino for one in again]
    assert [os.fstat(one).st_ino for one in made] != [os.fstat(one).st_ino for one in fds]
    assert all(memory.away for memory in shim.memories())
    for new, old, memory in zip(made, fds, shim.memories(), strict=True):
        os.pwrite(new, os.pread(old, memory.bytes, 0), 0)  # the mover's part; on software GPUs they are files
    assert shim.map(ids) == Stand.CLOSED
    assert not any(memory.imported for memory in shim.memories())
    shim.open_gate()
    for fd in [*fds, *made, *again]:
        os.close(fd)
    assert job("intact()")
    assert next(memory.at for memory in shim.memories()) == address
    back(shim, *away(shim))
    assert job("intact()")


def test_what_was_made_is_let_go_of_where_it_is_not_wanted(node: Node, job: Far, shim: Shim) -> None:
    job("large(4, 1)")
    job("large(4, 2)")
    before = node.switches.used(0)
    ids, fds = away(shim)
    for fd in shim.make(ids):
        os.close(fd)
    assert node.switches.used(0) == before + 8 * MIB
    assert shim.unmap() == Stand.AWAY
    assert node.switches.used(0) == before
    for fd in shim.make(ids[:1]):
        os.close(fd)
    back(shim, ids, fds)  # the old one is mapped in place of what was made
    assert node.switches.used(0) == before
    assert job("intact()")


def test_making_and_mapping_what_was_made_may_fail(node: Node, job: Far, shim: Shim) -> None:
    job("large(4, 1)")
    job("large(4, 2)")
    with pytest.raises(ShimError):
        shim.make([memory.id for memory in shim.memories()])  # it is not away
    ids, fds = away(shim)
    rule = node.switches.add(f"function=cuMemCreate nth=2 caller={job.pid} result=2")
    with pytest.raises(ShimError):
        shim.make(ids)
    node.switches.remove(rule)
    made = shim.make(ids)
    rule = node.switches.add(f"function=cuMemMap nth=2 caller={job.pid} result=999")
    with pytest.raises(ShimError, match=r"CUresult 999 \(map, device 0\)"):
        shim.map(ids)
    node.switches.remove(rule)
    assert shim.hello().stand == Stand.AWAY
    for fd in made:
        os.close(fd)
    assert shim.unmap() == Stand.AWAY
    back(shim, ids, fds)
    assert job("intact()")
