"""What containerd's record of a container says after its job has gone to another GPU, and what its next task gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from containers.runtimes import Container, cgroup_layouts
from test_containers_killed import workers
from test_containers_to_disk import Desk, begin, desk_of, gpus_of, may_open, nodes, until

from limosa.containers import containerd_record
from limosa.containers.containerd_api import Api

__all__ = ["desk_of"]
pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
LET, NOT_LET = "No such device or address", "Operation not permitted"  # no driver has that number; the filter


@pytest.fixture
def desk(desk_of: Callable[[str], Desk]) -> Desk:
    return desk_of("containerd")


def record_of(desk: Desk, one: Container) -> Any:
    return desk.runtime("containers", "info", one.id).json


def started_again(desk: Desk, one: Container) -> Container:
    """Ends a container's task and has ctr start another one."""
    ctr = desk.runtime
    ctr("tasks", "kill", "--signal", "KILL", one.id)
    until(lambda: one.name not in ctr._tasks())  # its shim has seen the end, too
    ctr("tasks", "delete", one.id, rc=None)
    ctr("tasks", "start", "--detach", "--log-uri", f"file://{one.log}", one.id)
    return ctr.known(one.name)


def is_on(desk: Desk, one: Container, gpu: int) -> None:
    one.goes_on()
    assert gpus_of(desk, one) == [gpu]
    assert nodes(one) == {f"nvidia{gpu}"}
    assert [may_open(desk, one, n) for n in (gpu, 1 - gpu)] == [LET, NOT_LET]


@pytest.mark.parametrize("cgroups", cgroup_layouts(), indirect=True)
def test_a_container_that_was_moved_is_started_again_on_its_new_gpu(cgroups: str, desk: Desk) -> None:
    one = desk.job()
    one.goes_on()
    called, before = desk.called(one), record_of(desk, one)
    (record,) = desk.says(0, "plan", "move", called, "--to", 1)["reasons"]
    gets = f"containerd's record of {called} changes as well: started again, it gets GPU 1"
    assert (record["id"], record["text"]) == ("container-record", gets)
    assert record_of(desk, one) == before, "a plan changes nothing"

    desk.node.switches.add("function=cuCheckpointProcessUnlock result=UNKNOWN")
    desk.says(21, "move", called, "--to", 1)
    assert record_of(desk, one) == before, "nor does a move that was undone"

    assert desk.says(0, "move", called, "--to", 1)["warnings"] == []
    is_on(desk, one, 1)
    after = record_of(desk, one)
    (new,) = [d for d in after["Spec"]["linux"]["devices"] if d["path"] == "/dev/nvidia1"]
    (old,) = [d for d in before["Spec"]["linux"]["devices"] if d["path"] == "/dev/nvidia0"]
    assert {**new, "path": old["path"], "minor": old["minor"]} == old
    again = started_again(desk, one)
    is_on(desk, again, 1)

    assert desk.says(0, "toggle", called)["state"] == "checkpointed"
    assert desk.says(0, "ps")["jobs"][0]["state"] == "checkpointed"
    assert desk.says(0, "toggle", called)["state"] == "running"
    is_on(desk, again, 1)
    desk.says(0, "suspend", called)
    assert desk.says(0, "resume", called, "--to", 0)["warnings"] == []
    is_on(desk, again, 0)
    same = record_of(desk, again)
    assert {**same, "UpdatedAt": ""} == {**before, "UpdatedAt": ""}
    is_on(desk, started_again(desk, again), 0)


def test_a_containerd_that_cannot_be_told_keeps_no_job_from_moving(desk: Desk) -> None:
    one = desk.job()
    one.goes_on()
    called, before = desk.called(one), record_of(desk, one)

    def moved(to: int, why: str, **options: Any) -> None:
        said = desk.limosa("move", "-o", "json", called, "--to", to, **options).json
        (record,) = said["warnings"]
        assert record["id"] == "container-record"
        assert f"{why})" in record["text"]
        is_on(desk, one, to)

    nowhere = {**desk.runtime.environment(), "CONTAINERD_ADDRESS": str(desk.place / "nowhere")}
    del nowhere["HOME"]
    moved(1, "No such file or directory", env=nowhere)
    assert record_of(desk, one) == before
    assert desk.says(0, "move", called, "--to", 0)["warnings"] == [], "it says that already"
    assert record_of(desk, one) == before

    def changed(change: Callable[[Any], None]) -> None:
        """Somebody else changes it, for the next task."""
        api = Api(str(desk.runtime.socket), "default")
        record = api.container(one.id)
        assert record is not None
        spec = msgspec.json.decode(record.spec)
        change(spec)
        api.specify(record, msgspec.json.encode(spec))

    def elsewhere(spec: Any) -> None:
        next(d for d in spec["linux"]["devices"] if d["path"] == "/dev/nvidia0")["path"] = "/dev/sda"

    changed(elsewhere)
    moved(1, "its record has a GPU as /dev/sda")
    changed(lambda spec: spec["linux"].pop("devices"))
    moved(0, "its record names other GPUs than it was given")


def killed_at_its_end(desk: Desk, one: Container, to: int, *, with_worker: bool) -> None:
    """A move is killed when the driver has brought its job back, and waits for its last call."""
    rule = desk.node.switches.add("function=cuCheckpointProcessUnlock delay=1 every=1")
    limosa = begin(desk, "move", desk.called(one), "--to", to)
    until(lambda: desk.node.switches.count(rule))
    os.kill(limosa.pid, signal.SIGSTOP)  # else it sees its worker die, and begins to undo
    for pid in workers(desk.node) if with_worker else []:
        os.kill(pid, signal.SIGKILL)
    limosa.kill()
    limosa.wait(60)
    desk.node.switches.remove(rule)


def test_who_recovers_a_killed_move_tells_the_containerd_that_it_was_to_tell(desk: Desk) -> None:
    """Its worker, or whoever calls recover, with another address in his environment or with none."""
    one = desk.job()
    one.goes_on()
    without = {name: value for name, value in desk.runtime.environment().items() if name != "CONTAINERD_ADDRESS"}
    del without["HOME"]

    def recovers(env: dict[str, str]) -> None:
        until(lambda: "nothing" in desk.limosa("recover", rc=None, env=env).stdout)

    def named() -> list[str]:
        devices = record_of(desk, one)["Spec"]["linux"]["devices"]
        return [d["path"] for d in devices if d["path"] in ("/dev/nvidia0", "/dev/nvidia1")]

    killed_at_its_end(desk, one, 1, with_worker=False)
    recovers(without)
    is_on(desk, one, 1)
    assert named() == ["/dev/nvidia1"]

    killed_at_its_end(desk, one, 0, with_worker=True)
    recovers({**without, "CONTAINERD_ADDRESS": str(desk.place / "nowhere")})
    is_on(desk, one, 0)
    assert named() == ["/dev/nvidia0"]

    killed_at_its_end(desk, one, 1, with_worker=True)
    desk.runtime.sockets.chmod(0o777)  # somebody else may have put another socket there since
    recovers(without)
    is_on(desk, one, 1)
    assert named() == ["/dev/nvidia0"]


GPUS = {minor: (f"/dev/nvidia{minor}", os.makedev(195, minor)) for minor in range(3)}


def node(minor: int, path: str = "") -> str:
    named = path or f"/dev/nvidia{minor}"
    return f'{{"path":"{named}","type":"c","major":195,"minor":{minor},"fileMode":438,"x":1e400}}'


def rule(minor: int, allow: str = "true") -> str:
    return f'{{"allow":{allow},"type":"c","major":195,"minor":{minor},"access":"rwm"}}'


def spec(nodes: list[str], rules: list[str]) -> bytes:
    of_linux = f'"devices":[{",".join(nodes)}],"resources":{{"devices":[{",".join(rules)}],"y":[1.0, 2]}}'
    return f'{{"z":{{"a" :1.50}},"linux":{{"cgroupsPath":"/x",{of_linux}}}}}'.encode()


ALL, CONTROL, DENIED = '{"allow":false,"access":"rwm"}', node(255, "/dev/nvidiactl"), rule(0, "false")


@pytest.mark.parametrize(
    ("minors", "nodes", "rules", "came"),
    [
        ([1], [CONTROL, node(0)], [ALL, rule(255), rule(0)], ([CONTROL, node(1)], [ALL, rule(255), rule(1)])),
        ([1, 2], [node(0), node(1)], [rule(0), rule(1)], ([node(2), node(1)], [rule(2), rule(1)])),
        ([1], [node(0)], [DENIED, rule(0)], ([node(1)], [DENIED, rule(1)])),
        ([0], [node(0)], [rule(0)], ([node(0)], [rule(0)])),
        ([1], [node(0)], [rule(0), rule(1, "false")], None),
        ([1], [node(0, "/dev/sda")], [rule(0)], None),
        ([1], [node(0), node(2)], [rule(0), rule(2)], None),
        ([1], [CONTROL], [], None),
        ([1], ["7"], [], None),
        ([1], [node(0)], ["[" * 100_000], None),
    ],
)
def test_nothing_of_a_record_changes_but_its_gpus(
    minors: list[int],
    nodes: list[str],
    rules: list[str],
    came: tuple[list[str], list[str]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(containerd_record, "node_and_number", GPUS.__getitem__)
    if came is None:
        with pytest.raises((ValueError, RecursionError)):
            containerd_record.changed(spec(nodes, rules), minors, GPUS)
    else:
        assert containerd_record.changed(spec(nodes, rules), minors, GPUS) == spec(*came)
