"""Two jobs that really fill their GPUs change places: what they hold together fits on neither (minutes; not core)."""

from __future__ import annotations

import pytest
from op_support import GIB, on

from limosa.gpu import Inventory

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone, pytest.mark.slow, pytest.mark.timeout(400, method="signal")]


def test_two_large_jobs_change_places(stamping, do, gpus: Inventory):
    gigabytes = int(0.55 * min(gpu.memory_total for gpu in gpus.gpus[:2]) / GIB)
    first = stamping("--gb", gigabytes)
    second = stamping("--gb", gigabytes, "--device", "cuda:1")
    do("move", first.pid, "--to", 1, rc=14)
    do("move", first.pid, second.pid, "--swap", limit=300)
    assert (on(first.pid), on(second.pid)) == ({1}, {0})
    for victim in (first, second):
        victim.goes_on()
        victim.finish()
