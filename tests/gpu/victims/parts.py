"""What else a job may hold beside plain device memory; each part is stepped and checked with the pages."""

import torch
from pages import Pages
from stale import Stale


class Pinned:
    """Pinned host memory that travels to the device and back in every step."""

    def __init__(self, device, size=16 << 20):
        self.host = torch.zeros(size // 8, dtype=torch.int64, pin_memory=True)
        self.back = torch.zeros(size // 8, dtype=torch.int64, pin_memory=True)
        self.there = torch.zeros(size // 8, dtype=torch.int64, device=device)
        self.epoch = 0

    def step(self):
        self.check()
        self.epoch += 1
        self.host.fill_(self.epoch)
        self.there.copy_(self.host, non_blocking=True)
        self.back.copy_(self.there, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def check(self):
        for name, memory in (("host", self.host), ("back", self.back), ("device", self.there)):
            low, high = int(memory.min().item()), int(memory.max().item())
            if (low, high) != (self.epoch, self.epoch):
                raise Stale(f"pinned {name}: {low}..{high}, not {self.epoch}")


class Graph:
    """A CUDA graph captured once: each replay adds to a counter and multiplies matrices."""

    def __init__(self, device):
        self.counter = torch.zeros(1024, dtype=torch.int64, device=device)
        self.matrix = torch.full((256, 256), 1 / 256, device=device)
        self.product = torch.zeros_like(self.matrix)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._work()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._work()
        self.replays = int(self.counter[0].item())

    def _work(self):
        self.counter.add_(1)
        torch.mm(self.matrix, self.matrix, out=self.product)

    def step(self):
        self.graph.replay()
        self.replays += 1
        self.check()

    def check(self):
        low, high = int(self.counter.min().item()), int(self.counter.max().item())
        if (low, high) != (self.replays, self.replays):
            raise Stale(f"graph: the counter is {low}..{high} after {self.replays} replays")
        if abs(float(self.product.sum().item()) - 256.0) > 0.1:
            raise Stale("graph: the product is wrong")


class SecondGpu:
    """Pages on the second GPU as well, and a copy from the first to it and back in every step."""

    def __init__(self, size):
        self.pages = Pages("cuda:1", size)
        self.first = torch.zeros(1 << 20, dtype=torch.int64, device="cuda:0")
        self.epoch = 0

    def step(self):
        self.pages.step()
        self.epoch += 1
        self.first.fill_(self.epoch)
        back = self.first.to("cuda:1").to("cuda:0")
        if not bool((back == self.epoch).all().item()):
            raise Stale("a copy to the second GPU and back is not what it was")

    def check(self):
        self.pages.check()


class Managed:
    """Managed memory, which the driver cannot checkpoint: the job must go on all the same."""

    def __init__(self, device, size=16 << 20):
        from cuda.bindings import driver

        torch.zeros(1, device=device)  # the primary context, made current
        self.driver = driver
        error, self.pointer = driver.cuMemAllocManaged(size, int(driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL))
        assert int(error) == 0, error
        self.size = size
        self.value = 0

    def step(self):
        self.value = (self.value + 1) % 256
        (error,) = self.driver.cuMemsetD8(self.pointer, self.value, self.size)
        assert int(error) == 0, error
        self.check()

    def check(self):
        import ctypes

        torch.cuda.synchronize()
        held = set(ctypes.string_at(int(self.pointer), 4096))
        if held != {self.value}:
            raise Stale(f"managed memory holds {held}, not {self.value}")


class Busy:
    """Kernels that run for ``seconds`` each, one after the other: a lock has to wait for them."""

    def __init__(self, seconds):
        self.cycles = int(seconds * 1.7e9)

    def step(self):
        torch.cuda._sleep(self.cycles)
        torch.cuda.synchronize()

    def check(self):
        pass
