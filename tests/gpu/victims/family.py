"""Jobs of several processes: children with contexts of their own, a reader of shared CUDA memory, NCCL ranks."""

import os
import subprocess
import sys
import time

from stale import Stale


class Children:
    """Starts ``stamping.py`` once for each list of flags, as children that write to ``child-<n>.log``.

    They look for the same ``stop`` file; a child that ends before that is a failure.
    """

    def __init__(self, folder, flags, limit=120):
        self.folder = folder
        self.children = []
        for number, extra in enumerate(flags):
            ready = os.path.join(folder, f"ready-{number}")
            log = os.open(self._log(number), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            argv = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "stamping.py"), folder]
            self.children.append(
                (subprocess.Popen([*argv, "--ready", ready, *extra], stdout=log, stderr=log), ready, number)
            )
            os.close(log)
        end = time.monotonic() + limit
        for child, ready, number in self.children:
            while not os.path.exists(ready):
                if child.poll() is not None or time.monotonic() > end:
                    raise Stale(f"child {number} is not up: {self._words(number)}")
                time.sleep(0.02)

    def step(self):
        for child, _, number in self.children:
            if child.poll() is not None and not os.path.exists(os.path.join(self.folder, "stop")):
                raise Stale(f"child {number} has ended ({child.returncode}): {self._words(number)}")

    def check(self):
        for child, _, number in self.children:
            if child.wait(120) != 0:
                raise Stale(f"child {number} ended with {child.returncode}: {self._words(number)}")

    def _log(self, number):
        return os.path.join(self.folder, f"child-{number}.log")

    def _words(self, number):
        with open(self._log(number), encoding="utf-8", errors="replace") as file:
            return " | ".join(file.read().strip().splitlines()[-3:])


def read_shared(queue, done, folder):
    """The second process of :class:`Shared`: holds the tensor and reads it until told to stop."""
    tensor = queue.get()
    total = int(tensor.sum().item())
    with open(os.path.join(folder, "shared-up"), "w", encoding="ascii") as file:
        file.write(str(total))
    while not done.wait(0.05):
        int(tensor.sum().item())
    del tensor


class Shared:
    """A tensor shared with a second process by legacy CUDA IPC (``torch.multiprocessing``)."""

    def __init__(self, device, folder, limit=120):
        import torch
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("spawn")
        self.tensor = torch.ones(1 << 20, dtype=torch.int64, device=device)
        queue, self.done = context.SimpleQueue(), context.Event()
        self.process = context.Process(target=read_shared, args=(queue, self.done, folder), daemon=True)
        self.process.start()
        queue.put(self.tensor)
        self.queue = queue
        end = time.monotonic() + limit
        while not os.path.exists(os.path.join(folder, "shared-up")):
            if not self.process.is_alive() or time.monotonic() > end:
                raise Stale(f"the process that shares the tensor is not up ({self.process.exitcode})")
            time.sleep(0.02)

    def step(self):
        if not self.process.is_alive():
            raise Stale(f"the process that shares the tensor has ended ({self.process.exitcode})")
        self.tensor.add_(1)

    def check(self):
        self.done.set()
        self.process.join(60)
        if self.process.exitcode != 0:
            raise Stale(f"the process that shares the tensor ended with {self.process.exitcode}")


class Rank:
    """One of two NCCL ranks: an all-reduce in every step."""

    def __init__(self, rank, world, port, device):
        import torch
        import torch.distributed

        torch.cuda.set_device(device)
        torch.distributed.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=torch.device(device)
        )
        self.torch, self.rank, self.world = torch, rank, world
        self.value = torch.zeros(1 << 18, dtype=torch.int64, device=device)
        self.steps = 0
        self.step()

    def step(self):
        self.steps += 1
        self.value.fill_(self.steps * (self.rank + 1))
        self.torch.distributed.all_reduce(self.value)
        self.check()

    def check(self):
        wanted = self.steps * self.world * (self.world + 1) // 2
        if not bool((self.value == wanted).all().item()):
            raise Stale(f"rank {self.rank}: the sum is not {wanted}")

    def agreed(self, stop):
        """Whether any rank was told to stop: all end after the same step, or the last all-reduce never returns."""
        flag = self.torch.tensor([int(stop)], device=self.value.device)
        self.torch.distributed.all_reduce(flag)
        return bool(flag.item())
