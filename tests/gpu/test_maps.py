"""Maps against the real driver: what a job can open decides, whatever it was told to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from limosa.errors import InvalidMap
from limosa.gpu import Driver, Inventory, complete_map, identity_map, inventory, openable, opened
from limosa.gpu.facts import can_change_gpus

VICTIMS = Path(__file__).parent / "victims"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def held(pid: int) -> dict[str, int]:
    return inventory().held({pid})


def cycle(driver: Driver, pid: int, mapping: dict[str, str]) -> None:
    driver.lock(pid, 5000, limit=60)
    driver.checkpoint(pid, limit=120)
    driver.restore(pid, mapping, limit=120)
    driver.unlock(pid)


def test_the_inventory_is_what_the_machine_has(gpus: Inventory):
    assert can_change_gpus(gpus)
    assert not gpus.software
    assert not gpus.mps
    for gpu in gpus.gpus:
        assert gpu.minor is not None
        assert gpu.pci_bus_id
        assert gpu.compute_mode == "default"
        assert not gpu.mig
        assert 0 < gpu.memory_free <= gpu.memory_total


def test_a_job_that_sees_one_gpu_can_open_all_and_moves_with_the_full_map(
    stamping, driver: Driver, gpus: Inventory, capsys
):
    victim = stamping("--gb", 0.5, env={"CUDA_VISIBLE_DEVICES": "0"})
    with capsys.disabled():  # a measurement: whether the open nodes could stand for what can be opened
        print(f"\nwith CUDA_VISIBLE_DEVICES=0 it holds the nodes of {[gpu.index for gpu in opened(gpus, victim.pid)]}")
    can_open = openable(gpus, victim.pid)
    assert can_open == gpus.gpus
    first, second = gpus.gpus[0].uuid, gpus.gpus[1].uuid
    assert set(held(victim.pid)) == {first}
    for source, destination in ((first, second), (second, first)):
        cycle(driver, victim.pid, complete_map({source: destination}, can_open, held(victim.pid), gpus.gpus))
        assert set(held(victim.pid)) == {destination}
        victim.goes_on()
    victim.finish()


def test_the_identity_over_all_that_can_be_opened_is_accepted(stamping, driver: Driver, gpus: Inventory):
    victim = stamping("--gb", 0.5)
    cycle(driver, victim.pid, identity_map(openable(gpus, victim.pid)))
    assert set(held(victim.pid)) == {gpus.gpus[0].uuid}
    assert opened(gpus, victim.pid) == gpus.gpus
    victim.goes_on()
    victim.finish()


def test_a_job_with_one_gpus_node_has_a_map_of_one_pair(start, driver: Driver, gpus: Inventory, tmp_path):
    others = [gpu for gpu in gpus.gpus if gpu.index != 0]
    hide = " && ".join(f"mount --bind /dev/null /dev/nvidia{gpu.minor}" for gpu in others)
    folder = tmp_path / "hidden"
    program = [sys.executable, str(VICTIMS / "stamping.py"), str(folder), "--gb", "0.5"]
    victim = start(["unshare", "-m", "sh", "-c", f'{hide} && exec "$0" "$@"', *program], folder=folder, limit=180)
    victim.goes_on()
    can_open = openable(gpus, victim.pid)
    assert [gpu.index for gpu in can_open] == [0]
    with pytest.raises(InvalidMap, match="cannot open the device node of GPU 1"):
        complete_map({gpus.gpus[0].uuid: gpus.gpus[1].uuid}, can_open, held(victim.pid), gpus.gpus)
    cycle(driver, victim.pid, identity_map(can_open))
    victim.goes_on()

    # What it can open may change while it is checkpointed: the second GPU's node comes back, the first one's goes.
    driver.lock(victim.pid, 5000, limit=60)
    driver.checkpoint(victim.pid, limit=120)
    second = gpus.gpus[1]
    swap = f"umount /dev/nvidia{second.minor} && mount --bind /dev/null /dev/nvidia{gpus.gpus[0].minor}"
    subprocess.run(["nsenter", "-t", str(victim.pid), "-m", "sh", "-c", swap], check=True, timeout=30)
    now = openable(gpus, victim.pid)
    assert [gpu.index for gpu in now] == [1]
    mapping = complete_map({}, can_open, {gpus.gpus[0].uuid: 1}, gpus.gpus, destinations=now)
    assert mapping == {gpus.gpus[0].uuid: second.uuid}
    driver.restore(victim.pid, mapping, limit=120)
    driver.unlock(victim.pid)
    assert set(held(victim.pid)) == {second.uuid}
    victim.goes_on()
    victim.finish()
