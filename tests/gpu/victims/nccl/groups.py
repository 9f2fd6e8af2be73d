"""Several process groups at once: of all ranks and of one, split, made and ended on the way (see common.py).

    torchrun --nproc-per-node=1|2 groups.py --record FILE --kind plain|threads|graph

Every collective that PyTorch knows is used, each on another group, some of them at the same time; all_to_all only where
communicators block: else PyTorch 2.11 takes NCCL's "in progress" for its failure. threads: a second thread of each rank
has a group of its own, before each step: NCCL wants all ranks to use their communicators in one order (two threads at
once hung where nobody moved the job). graph: an all-reduce is captured in a CUDA graph and replayed.
"""

import os
import threading

import torch
import torch.distributed as dist
from common import begin, options

SIZE = 1 << 16


class Groups:
    """All of them, and what is computed with them."""

    def __init__(self, record):
        self.rank, self.device, self.cuda = record.rank, record.device, record.device.type == "cuda"
        self.n, self.all = dist.get_world_size(), [*range(dist.get_world_size())]
        self.second = dist.new_group(self.all)
        self.alone = [dist.new_group([rank]) for rank in self.all][self.rank]
        # Gloo cannot split.
        self.parted = dist.split_group(split_ranks=[self.all]) if self.cuda else dist.new_group(self.all)
        self.single = dist.split_group(split_ranks=[[rank] for rank in self.all]) if self.cuda else self.alone
        self.blocks = os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") != "1"
        self.scaled = None
        if self.cuda:
            from torch.distributed import _make_nccl_premul_sum

            self.scaled = _make_nccl_premul_sum(0.5)
        generator = torch.Generator().manual_seed(30 + self.rank)
        self.x = torch.randn(SIZE, generator=generator).to(self.device)

    def step(self, number):
        """Some of everything; the values stay small."""
        x, other = self.x, torch.zeros_like(self.x)
        whole = torch.empty(self.n * SIZE, device=self.device)
        half = torch.empty(SIZE // self.n, device=self.device)
        a, b = x.clone(), x * 0.5
        works = [
            dist.all_reduce(a, async_op=True),
            dist.all_reduce(b, op=dist.ReduceOp.MAX, group=self.second, async_op=True),
        ]
        works.append(dist.all_gather_into_tensor(whole, x, group=self.parted, async_op=True))
        for work in works:
            work.wait()
        dist.reduce_scatter_tensor(half, a + b, group=self.parted)
        dist.all_reduce(half, group=self.alone)
        dist.broadcast(half, self.rank, group=self.single)
        dist.broadcast(a, number % self.n, group=self.second)
        dist.reduce(b, (number + 1) % self.n)
        if self.cuda:
            if self.blocks:
                dist.all_to_all_single(other, x, group=self.second)
            dist.all_reduce(b, op=self.scaled, group=self.parted)
            with dist._coalescing_manager(group=self.second, device=self.device):
                dist.all_reduce(a, group=self.second)
                dist.all_reduce(b, group=self.second)
        parts = [torch.empty_like(half) for _ in self.all]
        dist.all_gather(parts, half, group=self.second)
        if number % 25 == 24:  # one that lives for a moment
            brief = dist.new_group(self.all)
            dist.all_reduce(half, group=brief)
            dist.destroy_process_group(brief)
        if number % 10 == 9:
            dist.barrier(group=self.second, **({"device_ids": [self.device.index]} if self.cuda else {}))
        whole = whole.view(self.n, -1).sum(0) + torch.cat(parts) + a + b + other
        self.x = torch.sin(whole + number)
        return self.x.sum().item()


class Beside:
    """A thread with a group of its own: as many rounds as there are steps."""

    def __init__(self, record):
        self.device = record.device
        self.group = dist.new_group([0, 1])
        self.y = torch.full((SIZE,), 1.0 + record.rank, device=self.device)
        self.total, self.stream = 0.0, None
        if self.device.type == "cuda":
            # One for all rounds: PyTorch has 32, and gives out the groups' own as soon as these are used up.
            self.stream = torch.cuda.Stream()
            torch.cuda.synchronize()

    def start(self):
        self.thread = threading.Thread(target=self.round)
        self.thread.start()

    def round(self):
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                dist.all_reduce(self.y, group=self.group)
                self.y.mul_(0.5).add_(0.125).remainder_(3.0)
            self.total = self.y.sum().item()

    def join(self):
        self.thread.join()
        return self.total


class Graph:
    """An all-reduce that is captured once and replayed."""

    def __init__(self, record):
        self.x = torch.full((SIZE,), 1.0 + record.rank, device=record.device)
        self.graph = None
        if record.device.type != "cuda":
            return
        self.once()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.once()

    def once(self):
        dist.all_reduce(self.x)
        self.x.mul_(0.5).add_(0.125).remainder_(3.0)

    def end(self):
        """NCCL waits for the graphs that have its operations before it closes a communicator."""
        self.graph = None

    def step(self):
        self.graph.replay() if self.graph is not None else self.once()
        return self.x.sum().item()


def main():
    chosen = options("plain", "threads", "graph")
    record = begin(chosen, eager=True)
    groups = Groups(record) if chosen.kind != "graph" else None
    beside = Beside(record) if chosen.kind == "threads" else None
    graph = Graph(record) if chosen.kind == "graph" else None
    last = False
    while not last:
        total = 0.0
        if beside is not None:
            beside.start()
            total += beside.join()
        total += graph.step() if graph is not None else groups.step(record.steps)
        last = record.step(total, [graph.x if graph is not None else groups.x])
    if graph is not None:
        graph.end()
    record.end()


if __name__ == "__main__":
    main()
