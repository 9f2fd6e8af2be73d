"""Jobs under the shim whose memory the driver carries: each synchronise waits at the gate, where it would end them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from op_support import OTHER, Filler, on
from proofs import VICTIMS, Job, Prover, first_difference

from limosa import operation
from limosa.errors import LimosaError
from limosa.gpu import Inventory
from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_parked, pytest.mark.timeout(300, method="signal")]
STILL = [sys.executable, str(VICTIMS / "proof_still.py"), "FOLDER"]
JAX = [sys.executable, str(VICTIMS / "proof_jax.py"), "FOLDER"]
ONE = {"CUDA_VISIBLE_DEVICES": "0"}
POOL = ONE | {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}


def stand(job: Job) -> Stand:
    with Shim(Identity.of(job.pid)) as shim:
        return shim.hello().stand


def acts(prover: Prover, job: Job, to: int | None, act: Callable[[], Any], way: str = "driver") -> None:
    """The driver carries it, its gate is open afterwards, it goes on there."""
    result = prover.acts(job, act, None, 0)
    assert result is not None
    assert getattr(result, "way", way) == way, result
    assert stand(job) is Stand.OPEN
    assert to is None or on(job.pid) == {to}
    prover.record["moves"] += 1


def test_without_the_shim_it_ends(limosa: Callable[..., Any], tmp_path: Path, gpus: Inventory) -> None:
    """So the others here would notice."""
    folder = tmp_path / "bare"
    job = Job(limosa, folder, [word.replace("FOLDER", str(folder)) for word in STILL], {}, shim=False)
    job.until(lambda: job.steps() > 10, 60, "steps")
    with contextlib.suppress(LimosaError):
        operation.suspend(job.pid, timeout=60)
        time.sleep(2)
        operation.resume(job.pid, timeout=60)
    end = time.monotonic() + 10
    while job.alive():
        assert time.monotonic() < end, "it has not ended"
        time.sleep(0.05)
    assert "DONE" not in job.text()


@pytest.mark.parametrize(
    ("argv", "env"),
    [(STILL, {}), ([*STILL, "--kind", "pool"], {}), (JAX, POOL)],
    ids=["small", "pool", "jax"],
)
def test_moved_put_aside_and_on_disk_and_brought_back(
    prover: Prover, images: Path, argv: list[str], env: dict[str, str]
) -> None:
    job = prover.start(argv, env)
    parked = sum(one["parked"] for one in job.shims().values())
    assert parked == 0 or env, job.shims()
    way = "parked" if parked else "driver"
    for _ in range(2):
        if OTHER:
            acts(prover, job, OTHER, lambda: operation.move(job.pid, to=str(OTHER), timeout=60)[0].result, way)
        operation.suspend(job.pid, timeout=60)
        assert stand(job) is (Stand.AWAY if parked else Stand.CLOSED)
        stood = job.steps()
        time.sleep(3)
        assert job.steps() == stood
        acts(prover, job, 0, lambda: operation.resume(job.pid, to="0", timeout=60)[0].result, way)
    acts(prover, job, None, lambda: operation.checkpoint(job.pid, images / "copy", leave_running=True), way)
    for to in (OTHER, 0):
        image = images / f"last{to}"
        operation.checkpoint(job.pid, image)
        acts(prover, job, to, lambda image=image, to=to: operation.restore(image, to=str(to)), way)
    prover.twins_agree(job)


@pytest.mark.two_gpus
@pytest.mark.gpu_alone
@pytest.mark.parametrize("jax", [False, True], ids=["plain", "jax"])
def test_what_has_no_room_beside_itself_is_swapped_by_the_driver(
    prover: Prover, filler: Callable[..., Filler], jax: bool
) -> None:
    """Two jobs whose memory could be parked change places; others have taken the rest of both GPUs."""
    large = [*STILL, "--kind", "large", "--mib", "5900" if jax else "2048"]  # JAX takes 4 % of the GPU
    job = prover.start(JAX if jax else large, ONE, alone=True)
    other = prover.beside(large, {"CUDA_VISIBLE_DEVICES": "1"})
    others = filler(leave=1 << 30)
    others.fill(0, 1)
    for here in (1, 0, 1, 0):
        acts(prover, job, here, lambda: operation.move([job.pid, other.pid], swap=True, timeout=90)[0].result)
        assert stand(other) is Stand.OPEN
        other.goes_on()
        assert on(other.pid) == {1 - here}
    others.empty(0, 1)
    other.stop_at(other.steps() + 20)
    other.ends()
    prover.twins_agree(job)
    if not jax:
        assert first_difference(other.results(), prover.jobs[1].results()) is None
