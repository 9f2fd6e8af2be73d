"""How long the driver needs for four ranks: all checkpointed, then all restored; or each restored when it has been.

    python tests/gpu/experiments/chained.py [--ranks 4] [--rounds 3]

Four processes of PyTorch that have talked over NCCL and closed their communicators, each on a GPU of its own; bare
driver calls, no Limosa. Each round sends every process to the next GPU, in turns by one way and by the other, and
prints when each call began and ended, in ms since the first one. Needs as many GPUs as ranks, cuda-bindings, root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

CHILD = r"""
import os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)).to(device)
if "--nccl" in sys.argv:
    dist.init_process_group("nccl", device_id=device)
    dist.all_reduce(torch.ones(1 << 20, device=device))
    torch.cuda.synchronize()
    dist.destroy_process_group()
def step():
    net(torch.ones(8, 3, 64, 64, device=device)).sum().backward()
    torch.cuda.synchronize()
step()
torch.cuda.empty_cache()
print("ready", torch.cuda.memory_reserved() >> 20, flush=True)
for line in sys.stdin:
    step()
    print("stepped", flush=True)
"""


def done(answer: Any) -> Any:
    if int(answer[0]):
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) > 1 else None


class Calls:
    """The driver's, each with the time when it began and ended."""

    def __init__(self, ranks: int) -> None:
        from cuda.bindings import driver as cuda

        self.cuda, self.times, self.since = cuda, [], 0.0  # type: Any, list[tuple[str, int, float, float]], float
        done(cuda.cuInit(0))
        self.uuids = [done(cuda.cuDeviceGetUuid(gpu)) for gpu in range(ranks)]

    def timed(self, name: str, rank: int, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        done(call())
        self.times.append((name, rank, began - self.since, time.monotonic() - self.since))

    def checkpoint(self, rank: int, pid: int) -> None:
        self.timed("checkpoint", rank, lambda: self.cuda.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, rank: int, pid: int) -> None:
        pairs = []
        for gpu, uuid in enumerate(self.uuids):
            pair = self.cuda.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = uuid, self.uuids[(gpu + 1) % len(self.uuids)]
            pairs.append(pair)
        args = self.cuda.CUcheckpointRestoreArgs()
        args.gpuPairs, args.gpuPairsCount = pairs, len(pairs)
        self.timed("restore", rank, lambda: self.cuda.cuCheckpointProcessRestore(pid, args))


def beside(ranks: int, call: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-nccl", action="store_true")
    options = parser.parse_args()
    jobs = []
    for rank in range(options.ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(options.ranks), "LOCAL_RANK": str(rank)}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
        argv = [sys.executable, "-c", CHILD, *([] if options.without_nccl else ["--nccl"])]
        jobs.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
    try:
        for job in jobs:
            print(job.stdout.readline().strip(), flush=True)
        print(subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout, flush=True)  # fmt: skip
        calls = Calls(options.ranks)

        def both(rank: int) -> None:
            calls.checkpoint(rank, jobs[rank].pid)
            calls.restore(rank, jobs[rank].pid)

        for turn in range(2 * options.rounds):
            way = ("all, then all", "each by itself")[turn % 2]
            for job in jobs:
                args = calls.cuda.CUcheckpointLockArgs()
                args.timeoutMs = 5000
                done(calls.cuda.cuCheckpointProcessLock(job.pid, args))
            calls.times, calls.since = [], time.monotonic()
            if turn % 2:
                beside(options.ranks, both)
            else:
                beside(options.ranks, lambda rank: calls.checkpoint(rank, jobs[rank].pid))
                beside(options.ranks, lambda rank: calls.restore(rank, jobs[rank].pid))
            whole = time.monotonic() - calls.since
            for job in jobs:
                done(calls.cuda.cuCheckpointProcessUnlock(job.pid, None))
            for job in jobs:
                print("step", file=job.stdin, flush=True)
                assert job.stdout.readline().strip() == "stepped"
            each = [[name, rank, round(1e3 * a), round(1e3 * b)] for name, rank, a, b in sorted(calls.times)]
            print(json.dumps({"way": way, "ms": round(1e3 * whole), "calls": each}), flush=True)
    finally:
        for job in jobs:
            job.kill()
            job.wait()


if __name__ == "__main__":
    main()
