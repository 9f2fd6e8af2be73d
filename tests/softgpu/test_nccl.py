"""libnccl.so.2 of the software GPU: several processes, a rank each, in a node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from soft_node import Node
from softgpu.far import Died, Far, until

from limosa_softgpu.build import SOFTGPU
from limosa_softgpu.faults import functions

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent
MIB = 1 << 20
LOADED = "from nccl_words import *; import nccl_words as W"
CUDA_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 1, 3, 4, 5, 6, 7


class Ranks:
    """Processes in a node, each a rank with a GPU of its own and, unless ``connected`` is false, one communicator."""

    def __init__(self, node: Node, n: int, *, connected: bool = True, env: list[dict[str, str]] | None = None):
        self.node = node
        self.far = [Far(node, env=env[rank] if env else None) for rank in range(n)]
        self.each("begin({rank}, {n})", loads=True)
        if connected:
            self.connect()

    def connect(self) -> None:
        unique = self.far[0]("unique()")
        assert all(self.each(f"W.connect({unique!r})"))

    def send(self, code: str, ranks: list[int] | None = None) -> list[Any]:
        ranks = list(range(len(self.far))) if ranks is None else ranks
        return [
            self.far[r].send(code.replace("{rank}", str(r)).replace("{n}", str(len(self.far))), main=True)
            for r in ranks
        ]

    def each(self, code: str, ranks: list[int] | None = None, *, loads: bool = False, limit: float = 90) -> list[Any]:
        """What every rank says to the same; ``{rank}`` and ``{n}`` are put in."""
        if loads:
            self.send(LOADED, ranks)
        return [pending.value(limit) for pending in self.send(code, ranks)]

    def rest(self, ranks: list[int] | None = None) -> None:
        """Waits until their communicators are in progress with nothing."""
        for far in self.far if ranks is None else [self.far[r] for r in ranks]:
            until(lambda far=far: far("N.async_error(W.comm)") == 0)

    def meetings(self) -> list[str]:
        return os.listdir(os.path.join(self.node.folder, "nccl"))


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks with a communicator, for many questions."""
    with Node(gpus=request.param, memory="1GiB") as node:
        yield Ranks(node, request.param)


@pytest.fixture
def two(new_node: Callable[..., Node]) -> Ranks:
    return Ranks(new_node(memory="128MiB"), 2)


@pytest.fixture
def apart(new_node: Callable[..., Node]) -> Ranks:
    """Two that have no communicator yet."""
    return Ranks(new_node(memory="128MiB"), 2, connected=False)


def not_blocking(new_node: Callable[..., Node], n: int) -> Ranks:
    """They have a communicator that does not block, and is ready."""
    ranks = Ranks(new_node(gpus=n, memory="128MiB"), n, connected=False)
    unique = ranks.far[0]("unique()")
    assert ranks.each(f"init_aside({unique!r})") == [IN_PROGRESS] * n
    ranks.rest()
    return ranks


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "bf"])
def test_every_operator_on_every_type(ranks: Ranks, kind: str) -> None:
    for op in range(5):
        assert all(ranks.each(f"check('AllReduce', {kind!r}, 3001, {op})")), op


@pytest.mark.parametrize(
    "name", ["AllReduce", "Reduce", "ReduceScatter", "Broadcast", "Bcast", "AllGather", "Gather", "AlltoAll", "Scatter"]
)
def test_every_collective(ranks: Ranks, name: str) -> None:
    for count in (1, 1000, 300_000):
        for root in {0, len(ranks.far) - 1}:
            assert all(ranks.each(f"check({name!r}, 'f4', {count}, 0, {root})")), (count, root)
    if name not in ("Bcast", "AlltoAll", "Scatter"):
        assert all(ranks.each(f"check({name!r}, 'i8', 200_000, 0, 0, in_place=True)"))


@pytest.mark.parametrize("kind", ["f4", "f8", "i4"])
def test_a_sum_of_multiples(ranks: Ranks, kind: str) -> None:
    for device in (False, True):
        assert all(ranks.each(f"pre_multiplied({kind!r}, device={device})"))


@pytest.mark.parametrize(("count", "times"), [(1, 1), (1000, 5), (500_000, 2)])
def test_sends_and_receives_of_a_group_go_together(ranks: Ranks, count: int, times: int) -> None:
    assert all(ranks.each(f"ring({count}, {times})"))


def test_groups_of_several_streams(ranks: Ranks) -> None:
    for count in (10, 300_000):
        assert all(ranks.each(f"grouped({count})"))


def test_what_a_communicator_says_of_itself(ranks: Ranks) -> None:
    n = len(ranks.far)
    said = ranks.each("[N.number('ncclComm' + what, W.comm) for what in ('Count', 'UserRank', 'CuDevice')]")
    assert said == [[n, rank, rank] for rank in range(n)]
    assert ranks.far[0]("result('ncclGetVersion', ctypes.byref(x := ctypes.c_int())), x.value") == [0, 22809]
    assert ranks.far[0]("[N.libnccl.ncclGetErrorString(i).decode() for i in (0, 5, 99)]") == [
        "no error",
        "invalid usage",
        "unknown result code",
    ]


def test_it_is_asynchronous_and_in_order(two: Ranks) -> None:
    assert two.far[0]("[all_reduce(), N.query(W.stream)]") == [0, 600]
    time.sleep(0.3)
    assert two.far[0]("N.query(W.stream)") == 600
    assert two.far[1]("all_reduce()") == 0
    assert all(two.each("summed()"))


# --- coming to life ---------------------------------------------------------------------------------------------------


def test_splits(ranks: Ranks) -> None:
    n = len(ranks.far)
    ranks.each("W.world = W.comm")
    for _ in range(2):
        ranks.each("W.comm = N.split(W.world, {rank} % 2, -{rank})")
        said = ranks.each("[N.number('ncclComm' + what, W.comm) for what in ('Count', 'UserRank')]")
        of = {parity: [r for r in reversed(range(n)) if r % 2 == parity] for parity in (0, 1)}
        assert said == [[len(of[r % 2]), of[r % 2].index(r)] for r in range(n)]
        assert set(ranks.each("destroy()")) == {0}
    ranks.each("W.comm = N.split(W.world, 0 if {rank} else -1, 0)")
    assert ranks.far[0]("W.comm") == 0
    assert ranks.each("N.number('ncclCommCount', W.comm)", list(range(1, n))) == [n - 1] * (n - 1)
    assert set(ranks.each("destroy()")) == {0}
    ranks.each("W.comm = W.world")
    assert all(ranks.each("check('AllReduce', 'f4', 10)"))


def test_without_a_rank_the_others_go_on(new_node: Callable[..., Node]) -> None:
    ranks = Ranks(new_node(gpus=3, memory="64MiB"), 3)
    assert ranks.each("all_reduce()", [1]) == [0]
    os.kill(ranks.far[0].pid, signal.SIGKILL)
    ranks.far[0].died()
    ranks.each("W.made = ctypes.c_void_p(); W.out = (ctypes.c_int * 1)(0)", [1, 2])
    shrink = "result('ncclCommShrink', W.comm, W.out, 1, ctypes.byref(W.made), None, 1)"
    assert ranks.each(shrink, [1, 2]) == [0, 0]
    assert ranks.each("result('ncclCommAbort', W.comm)", [1, 2]) == [0, 0]
    ranks.each("W.comm = W.made.value; W.n = 2; W.rank = {rank} - 1", [1, 2])
    assert ranks.each("check('AllReduce', 'f4', 1000)", [1, 2]) == [True, True]


def test_an_init_that_does_not_block(apart: Ranks) -> None:
    unique = apart.far[0]("unique()")
    assert apart.far[0](f"init_aside({unique!r})") == IN_PROGRESS
    time.sleep(0.2)
    assert apart.far[0]("N.async_error(W.comm)") == IN_PROGRESS
    assert apart.far[0]("all_reduce()") == INVALID_ARGUMENT
    assert apart.far[1](f"init_aside({unique!r})") == IN_PROGRESS
    apart.rest()
    assert all(apart.each("check('AllReduce', 'f4', 10)"))
    assert apart.each("result('ncclCommFinalize', W.comm)") == [IN_PROGRESS, IN_PROGRESS]
    apart.rest()
    assert apart.each("destroy()") == [0, 0]


@pytest.mark.parametrize("n", [2, 3], ids=["split", "shrink"])
def test_a_child_of_what_does_not_block_has_no_handle_before_it_is_done(new_node: Callable[..., Node], n: int) -> None:
    """Its parent is in progress as long; the shrink leaves the third rank out."""
    ranks, two = not_blocking(new_node, n), [0, 1]
    ranks.each("W.made = ctypes.c_void_p(); W.out = (ctypes.c_int * 1)(2)")
    child = "result('ncclCommSplit', W.comm, 0, {rank}, ctypes.byref(W.made), None)"
    if n == 3:
        child = "result('ncclCommShrink', W.comm, W.out, 1, ctypes.byref(W.made), None, 0)"
    assert ranks.each(child, [0]) == [0]  # NCCL says so, too
    time.sleep(0.2)
    assert ranks.far[0]("[W.made.value, N.async_error(W.comm)]") == [None, IN_PROGRESS]
    assert ranks.each(child, [1]) == [0]
    ranks.rest(two)
    assert ranks.each("N.number('ncclCommCount', W.made.value)", two) == [2, 2]
    ranks.each("W.comm = W.made.value; W.n = 2", two)
    assert ranks.each("check('AllReduce', 'f4', 1000)", two) == [True, True]


def test_what_does_not_block_goes_on_behind_its_calls(new_node: Callable[..., Node]) -> None:
    """The first collective until the others have called it; until then nothing else is ordered, and it does not end."""
    ranks = not_blocking(new_node, 2)
    assert ranks.each("all_reduce()", [0]) == [IN_PROGRESS]
    time.sleep(0.2)
    refused = "[N.async_error(W.comm), all_reduce(), result('ncclCommDestroy', W.comm)]"
    assert ranks.each(refused, [0]) == [[IN_PROGRESS, INVALID_ARGUMENT, INVALID_ARGUMENT]]
    assert ranks.each("all_reduce()", [1]) == [IN_PROGRESS]
    ranks.rest()
    assert ranks.each("[result('ncclGroupStart'), all_reduce(), all_reduce()]") == [[0, 0, 0], [0, 0, 0]]
    assert ranks.each("result('ncclGroupEnd')") == [IN_PROGRESS, IN_PROGRESS]
    ranks.rest()
    assert ranks.each("[summed(), destroy()]") == [[True, 0], [True, 0]]


def test_what_goes_on_behind_its_calls_is_slow_and_fails(new_node: Callable[..., Node]) -> None:
    ranks = not_blocking(new_node, 2)
    rule = ranks.node.switches.add("function=step:nccl-launch hang")
    assert ranks.each("all_reduce()") == [IN_PROGRESS, IN_PROGRESS]
    time.sleep(0.2)
    assert ranks.each("[N.async_error(W.comm), N.query(W.stream)]") == [[IN_PROGRESS, 0]] * 2, "not on the stream yet"
    ranks.node.switches.remove(rule)
    ranks.rest()
    assert all(ranks.each("summed()"))
    ranks.node.switches.add(f"function=step:nccl-launch result=ncclRemoteError caller={ranks.far[0].pid}")
    assert ranks.each("all_reduce()") == [IN_PROGRESS, IN_PROGRESS]
    until(lambda: ranks.far[0]("N.async_error(W.comm)") == REMOTE_ERROR)
    until(lambda: ranks.far[1]("[N.async_error(W.comm), N.query(W.stream)]") == [0, 600])
    assert ranks.each("result('ncclCommAbort', W.comm)") == [0, 0]


def test_an_init_whose_peer_does_not_come_is_aborted(apart: Ranks) -> None:
    far = apart.far[0]
    blocks = apart.node.blocks()
    assert far("init_aside(unique())") == IN_PROGRESS
    until(apart.meetings)
    assert far("result('ncclCommAbort', W.comm)") == 0
    assert (apart.meetings(), apart.node.blocks()) == ([], blocks)


def test_ranks_that_were_killed_before_they_met_leave_nothing_for_long(apart: Ranks) -> None:
    apart.far[0].send("W.connect(unique())")
    until(apart.meetings)
    os.kill(apart.far[0].pid, signal.SIGKILL)
    apart.far[0].died()
    assert apart.meetings()
    apart.far[1]("unique()")
    assert apart.meetings() == []


def test_all_ranks_in_one_process(node: Node) -> None:
    far = Far(node)
    far(LOADED)
    far("N.device(0)")
    before = node.blocks()
    assert far("all_in_one(2)")
    assert len(node.blocks()) - len(before) <= 3  # a context, and what the test has allocated


def test_many_ids_for_one_communicator(apart: Ranks) -> None:
    ids = apart.far[0]("[unique(), unique()]")
    assert apart.each(f"init_scalable({ids!r})") == [0, 0]
    assert all(apart.each("check('AllReduce', 'f4', 10)"))


def test_no_gpu_twice(apart: Ranks) -> None:
    apart.each("N.device(0)")
    unique = apart.far[0]("unique()")
    assert apart.each(f"init_aside({unique!r}, 1)") == [INVALID_USAGE, INVALID_USAGE]
    assert apart.meetings() == []


@pytest.mark.parametrize("env", [[{"NCCL_P2P_DISABLE": "1"}] * 2, [{}, {"NCCL_P2P_DISABLE": "1"}]])
def test_by_the_hosts_memory_where_the_device_cannot(new_node: Callable[..., Node], env: list[dict[str, str]]) -> None:
    ranks = Ranks(new_node(memory="128MiB"), 2, env=env)
    assert all(ranks.each("check('AllReduce', 'f4', 300_000)"))
    assert all(ranks.each("ring(300_000)"))


def test_ranks_that_see_one_gpu_each(new_node: Callable[..., Node]) -> None:
    node = new_node(memory="128MiB")
    ranks = Ranks.__new__(Ranks)
    ranks.node = node
    ranks.far = [Far(node, env={"CUDA_VISIBLE_DEVICES": str(rank)}) for rank in range(2)]
    ranks.each("begin({rank}, {n}, 0)", loads=True)
    ranks.connect()
    assert all(ranks.each("check('AllReduce', 'f4', 300_000)"))


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calls",
    [
        ("check('AllReduce', 'f4', 10)", "check('AllReduce', 'f4', 11)"),
        ("check('AllReduce', 'f4', 10)", "check('AllReduce', 'i4', 10)"),
        ("check('AllReduce', 'f4', 10, 0)", "check('AllReduce', 'f4', 10, 2)"),
        ("check('AllReduce', 'f4', 10)", "check('AllGather', 'f4', 10)"),
        ("check('Broadcast', 'f4', 10, 0, 0)", "check('Broadcast', 'f4', 10, 0, 1)"),
        (
            "result('ncclSend', mine(given(0, 10, 'f4')), 10, 7, 1, W.comm, W.stream)",
            "result('ncclRecv', N.memory(100), 11, 7, 0, W.comm, W.stream)",
        ),
    ],
)
def test_ranks_that_do_not_do_the_same(two: Ranks, calls: tuple[str, str]) -> None:
    pending = [far.send(code, main=True) for far, code in zip(two.far, calls, strict=True)]
    assert all(one.value() in (False, True, 0) for one in pending)
    for far in two.far:
        until(lambda far=far: far("N.async_error(W.comm)") == INVALID_USAGE)
        assert far("all_reduce()") == INVALID_USAGE
    assert two.each("result('ncclCommAbort', W.comm)") == [0, 0]
    two.connect()
    assert all(two.each("check('AllReduce', 'f4', 10)"))


def test_communicators_in_different_orders_hang_until_they_are_aborted(two: Ranks) -> None:
    two.each("W.other = N.split(W.comm, 0, {rank})")
    two.far[0]("[all_reduce(), all_reduce(of=W.other)]")
    two.far[1]("[all_reduce(of=W.other), all_reduce()]")
    time.sleep(0.5)
    assert two.each("N.query(W.stream)") == [600, 600]
    assert two.each("[N.async_error(W.comm), N.async_error(W.other)]") == [[0, 0], [0, 0]]
    assert two.each("[result('ncclCommAbort', W.comm), result('ncclCommAbort', W.other)]") == [[0, 0], [0, 0]]
    two.each("N.synchronize(W.stream)")
    two.connect()
    assert all(two.each("check('AllReduce', 'f4', 10)"))


def test_a_peer_that_was_killed_is_waited_for_until_the_abort(two: Ranks) -> None:
    two.far[0]("all_reduce()")
    os.kill(two.far[1].pid, signal.SIGKILL)
    two.far[1].died()
    time.sleep(0.3)
    assert two.far[0]("[N.query(W.stream), N.async_error(W.comm)]") == [600, 0]
    assert two.far[0]("result('ncclCommAbort', W.comm)") == 0
    two.far[0]("N.synchronize(W.stream)")


def test_destroy_waits_for_ranks_that_live(two: Ranks) -> None:
    pending = two.send("destroy()", [0])[0]
    time.sleep(0.3)
    assert not pending.done
    os.kill(two.far[1].pid, signal.SIGKILL)
    assert pending.value() == 0


def test_a_destroy_that_waits_is_aborted(two: Ranks) -> None:
    far = two.far[0]
    begun = two.node.switches.add("function=ncclCommDestroy delay=0")
    pending = two.send("destroy()", [0])[0]
    until(lambda: two.node.switches.count(begun) > 0)
    time.sleep(0.2)
    assert far.send("N.async_error(W.comm)").value() == 0
    assert far.send("result('ncclCommAbort', W.comm)").value() == 0
    assert pending.value() in (0, INTERNAL_ERROR)
    assert two.each("destroy()") == [INVALID_ARGUMENT, 0]


def test_an_init_without_device_memory_fails_on_all(apart: Ranks) -> None:
    blocks = apart.node.blocks()
    apart.node.switches.add("function=cuMemCreate memory=device nth=1")
    unique = apart.far[0]("unique()")
    assert sorted(apart.each(f"init_aside({unique!r}, 1)")) == [CUDA_ERROR, REMOTE_ERROR]
    assert (apart.meetings(), apart.node.blocks()) == ([], blocks)
    apart.connect()
    assert all(apart.each("check('AllReduce', 'f4', 10)"))


def test_destroy_waits_for_ones_own_work(two: Ranks) -> None:
    two.far[0]("all_reduce()")
    pending = two.send("destroy()", [0])[0]
    time.sleep(0.2)
    assert not pending.done
    assert two.far[1]("[all_reduce(), destroy()]") == [0, 0]
    assert pending.value() == 0
    assert all(two.each("summed()"))


@pytest.mark.parametrize("handle", ["None", "12345", "W.gone", "ctypes.addressof(W.room)"])
def test_handles_that_are_none(two: Ranks, handle: str) -> None:
    far = two.far[0]
    two.each("W.gone = N.split(W.comm, {rank}, 0); W.room = ctypes.create_string_buffer(4096)")
    assert two.each("result('ncclCommDestroy', W.gone)") == [0, 0]
    assert far(f"all_reduce(of=({handle}) or 1)") == INVALID_ARGUMENT
    assert far(f"result('ncclCommGetAsyncError', {handle}, ctypes.byref(ctypes.c_int()))") == INVALID_ARGUMENT
    assert far(f"result('ncclCommDestroy', {handle})") == (0 if handle == "None" else INVALID_ARGUMENT)
    assert far("result('ncclAllReduce', None, 1, 10, 7, 0, W.comm, W.stream)") == INVALID_ARGUMENT
    for wrong in ("10, 77, 0", "10, 7, 99", "10, 10, 0", "10, 7, -1"):
        assert far(f"result('ncclAllReduce', 1, 1, {wrong}, W.comm, W.stream)") == INVALID_ARGUMENT
    assert far("result('ncclBroadcast', 1, 1, 10, 7, 2, W.comm, W.stream)") == INVALID_ARGUMENT
    assert far("result('ncclGroupEnd')") == INVALID_USAGE
    assert all(two.each("check('AllReduce', 'f4', 10)"))


def test_a_group_with_a_call_that_fails_does_nothing(two: Ranks) -> None:
    far = two.far[0]
    far("N.nccl('ncclGroupStart')")
    assert far("[all_reduce(), all_reduce(of=1)]") == [0, INVALID_ARGUMENT]
    assert far("result('ncclGroupEnd')") == INVALID_ARGUMENT
    assert far("N.query(W.stream)") == 0
    far("N.nccl('ncclGroupStart')")
    assert far("[all_reduce(), result('ncclGroupSimulateEnd', None)]") == [0, 0]
    assert far("N.query(W.stream)") == 0
    assert all(two.each("check('AllReduce', 'f4', 10)"))


def test_nothing_is_captured(two: Ranks) -> None:
    far = two.far[0]
    far("W.captured = N.stream(); N.cu('cuStreamBeginCapture_v2', ctypes.c_void_p(W.captured), 2)")
    assert far("all_reduce(on=W.captured)") == INVALID_USAGE
    assert all(two.each("check('AllReduce', 'f4', 10)"))


def test_memory_of_nccls_own(two: Ranks) -> None:
    far = two.far[0]
    far("W.memory, W.handle = ctypes.c_void_p(), ctypes.c_void_p()")
    assert far("result('ncclMemAlloc', ctypes.byref(W.memory), 3 << 20)") == 0
    far("N.put(W.memory.value, b'x' * 100)")
    assert far("result('ncclCommRegister', W.comm, W.memory.value, 100, ctypes.byref(W.handle))") == 0
    assert far("[result('ncclCommDeregister', W.comm, W.handle.value) for _ in range(2)]") == [0, INVALID_ARGUMENT]
    assert far("result('ncclCommWindowRegister', W.comm, W.memory.value, 100, ctypes.byref(W.handle), 1)") == 0
    assert far("[result('ncclMemFree', W.memory.value) for _ in range(2)]") == [0, INVALID_ARGUMENT]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_every_function_is_listed() -> None:
    ran = subprocess.run(
        ["nm", "-D", "--defined-only", SOFTGPU / "libnccl.so.2"], capture_output=True, text=True, check=True
    )
    there = {line.split()[-1] for line in ran.stdout.splitlines()}
    assert there == set(re.findall(r"FUNCTION\((\w+)\)", (SOFTGPU / "nccl_functions.list").read_text()))
    assert there <= functions()


def test_calls_that_fail(two: Ranks) -> None:
    two.node.switches.add("function=ncclAllReduce result=ncclSystemError nth=2")
    assert two.far[0]("[all_reduce(), all_reduce()]") == [0, 2]
    assert two.far[1]("all_reduce()") == 0
    assert two.each("N.synchronize(W.stream)") == [None, None]
    rule = two.node.switches.add("function=ncclCommInit* after=ncclInternalError every=1")
    unique = two.far[0]("unique()")
    for pending in two.send(f"W.connect({unique!r})"):
        with pytest.raises(Exception, match="ncclCommInitRankConfig: 3"):
            pending.value()
    assert two.node.switches.count(rule) == 2


def test_calls_that_are_slow_hang_and_kill(two: Ranks) -> None:
    two.node.switches.add("function=ncclAllReduce delay=0.5")
    begin = time.monotonic()
    assert two.each("all_reduce()") == [0, 0]
    assert time.monotonic() - begin >= 0.5
    rule = two.node.switches.add("function=ncclAllReduce hang")
    pending = two.send("all_reduce()")
    until(lambda: any(one.done for one in pending))
    time.sleep(0.2)
    assert sorted(one.done for one in pending) == [False, True]
    two.node.switches.remove(rule)
    assert [one.value() for one in pending] == [0, 0]
    two.node.switches.add("function=ncclCommDestroy crash=caller")
    with pytest.raises(Died):
        two.far[0]("destroy()")


def test_collectives_that_are_slow_fail_and_kill_on_the_stream(two: Ranks) -> None:
    rule = two.node.switches.add("function=step:nccl-collective hang")
    assert two.each("all_reduce()") == [0, 0]
    assert 600 in two.each("N.query(W.stream)"), "it is on the stream that it is slow"
    two.node.switches.remove(rule)
    assert all(two.each("summed()"))
    rule = two.node.switches.add("function=step:nccl-collective delay=0.3 every=1")
    begin = time.monotonic()
    assert two.each("all_reduce()") == [0, 0]
    assert all(two.each("summed()"))
    assert time.monotonic() - begin >= 0.3
    two.node.switches.remove(rule)
    two.node.switches.add(f"function=step:nccl-collective result=ncclRemoteError caller={two.far[0].pid}")
    assert two.each("all_reduce()") == [0, 0]
    until(lambda: two.far[0]("N.async_error(W.comm)") == REMOTE_ERROR)
    assert two.far[1]("[N.async_error(W.comm), N.query(W.stream)]") == [0, 600]
    assert two.each("result('ncclCommAbort', W.comm)") == [0, 0]
    two.connect()
    two.node.switches.add(f"function=step:nccl-sendrecv crash=caller caller={two.far[1].pid}")
    two.send("ring(10)")
    assert two.far[1].died() == -signal.SIGKILL


# --- what is left, and the driver's checkpoint ------------------------------------------------------------------------


def of_the_node(pid: int) -> list[str]:
    """Mappings and descriptors of device memory and of communicators."""
    with open(f"/proc/{pid}/maps") as file:
        found = [line.split(maxsplit=5)[-1] for line in file if "/dev/nvidia-soft/" in line]
    return sorted(found + [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")])


def test_nothing_is_left(apart: Ranks) -> None:
    apart.each("W.own = mine(given(0, 10, 'f4'))")
    apart.each(
        "(N.cu('cuLaunchHostFunc', ctypes.c_void_p(W.stream), ctypes.CDLL(None).sync, None), N.synchronize(W.stream))"
    )
    seen = [(of_the_node(far.pid), len(os.listdir(f"/proc/{far.pid}/task"))) for far in apart.far]
    blocks, used = apart.node.blocks(), [apart.node.switches.used(gpu) for gpu in (0, 1)]
    for _ in range(3):
        apart.connect()
        assert len(apart.node.blocks()) == len(blocks) + 2
        assert apart.meetings() == []
        apart.each("[N.nccl('ncclAllReduce', W.own, W.own, 10, 7, 0, W.comm, W.stream) for _ in range(20)]")
        apart.each("[result('ncclCommDestroy', N.split(W.comm, 0, 0)), destroy()]")
        assert [(of_the_node(far.pid), len(os.listdir(f"/proc/{far.pid}/task"))) for far in apart.far] == seen
        assert (apart.node.blocks(), [apart.node.switches.used(gpu) for gpu in (0, 1)]) == (blocks, used)


def test_a_rank_that_is_locked_holds_up_the_others(two: Ranks) -> None:
    controller = Far(two.node)
    controller("ok(cu.cuInit(0))")
    assert controller.lock(two.far[0].pid, 1000) == "SUCCESS"
    assert two.far[1]("all_reduce()") == 0
    assert controller.lock(two.far[1].pid, 500) == "NOT_READY"
    pending = two.send("all_reduce()", [0])
    assert controller.unlock(two.far[0].pid) == "SUCCESS"
    assert pending[0].value() == 0
    assert all(two.each("summed()"))


def test_a_living_communicator_is_not_restored(two: Ranks) -> None:
    controller = Far(two.node)
    controller("ok(cu.cuInit(0))")
    for far in two.far:
        controller.suspend(far.pid)
    assert [controller.restore(far.pid) for far in two.far] == ["NOT_SUPPORTED", "NOT_SUPPORTED"]


def test_destroyed_checkpointed_restored_with_the_gpus_swapped_and_made_again(two: Ranks) -> None:
    controller = Far(two.node)
    controller("ok(cu.cuInit(0))")
    gpus = controller("[bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in (0, 1)]")
    swapped = list(zip(gpus, reversed(gpus), strict=True))
    for _ in range(2):
        assert all(two.each("check('AllReduce', 'f4', 300_000)"))
        assert two.each("destroy()") == [0, 0]
        for far in two.far:
            controller.suspend(far.pid)
        for far in two.far:
            controller.resume(far.pid, swapped)
        two.connect()
    assert all(two.each("check('AllReduce', 'f4', 300_000)"))


# --- a whole job ------------------------------------------------------------------------------------------------------


def job(node: Node, folder: Path, n: int, *options: object) -> dict[str, list[str]]:
    """What the ranks wrote: lines without their times."""
    folder.mkdir()
    node.run([sys.executable, HERE / "nccl_agent.py", folder, "--ranks", n, *options], limit=180)
    assert (folder / "verdict").read_text() == "right"
    return {
        path.name: [line.rpartition(" ")[0] for line in path.read_text().splitlines()]
        for path in folder.glob("rank-*")
        if path.suffix != ".out"
    }


def test_a_job_comes_to_the_same_twice(new_node: Callable[..., Node], tmp_path: Path) -> None:
    node = new_node(gpus=4, memory="128MiB")
    size = ["--steps", 12, "--elements", 50_000]
    first = job(node, tmp_path / "first", 4, *size, "--watchdog")
    again = job(
        node, tmp_path / "again", 4, *size, "--groups", "--skew", 20, "--barrier-every", 3, "--nonblocking", "--capture"
    )
    assert first == again
    assert {name: len(lines) for name, lines in first.items()} == {f"rank-{rank}": 12 for rank in range(4)}
    with_ring = job(node, tmp_path / "ring", 3, *size, "--p2p", "--threads", "--watchdog")
    assert with_ring == job(node, tmp_path / "ring-again", 3, *size, "--p2p", "--threads", "--groups", "--skew", 10)
    assert len(with_ring) == 6


def test_a_job_whose_rank_fails_ends(node: Node, tmp_path: Path) -> None:
    rule = node.switches.add("function=step:nccl-collective crash=caller nth=9")
    ran = node.run([sys.executable, HERE / "nccl_agent.py", tmp_path, "--ranks", 2, "--steps", 50], rc=1, limit=120)
    assert ran.stdout == ""
    assert re.fullmatch(r"rank \d ended with -9", (tmp_path / "verdict").read_text())
    assert node.switches.count(rule) >= 9
