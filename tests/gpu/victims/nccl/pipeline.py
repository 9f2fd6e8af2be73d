"""A pipeline of two stages, each on its rank, a batch in four parts (see common.py for the options).

    torchrun --nproc-per-node=2 pipeline.py --record FILE --kind hand|batched|schedule

hand: send and recv one by one; batched: batch_isend_irecv, forward of one part and backward of the one before at once;
schedule: torch.distributed.pipelining, 1F1B.
"""

import torch
import torch.distributed as dist
from common import begin, options, words_for
from torch import nn
from torch.nn import functional

WIDTH, WORDS, BATCH, LENGTH, PARTS = 256, 512, 8, 63, 4


def block():
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.one, self.two = nn.Embedding(WORDS, WIDTH), block(), block()

    def forward(self, words):
        return self.two(self.one(self.word(words)))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = block(), block(), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.two(self.one(x)))


def loss_of(said, wanted):
    return functional.cross_entropy(said.reshape(-1, WORDS), wanted.reshape(-1))


class Hand:
    """One part after the other, by send and recv."""

    def __init__(self, stage, record):
        self.stage, self.rank, self.device = stage, record.rank, record.device

    def room(self):
        return torch.empty(BATCH // PARTS, LENGTH, WIDTH, device=self.device)

    def step(self, seen, wanted):
        """The loss, of the second stage; what the first can say is how large the gradients are that it got."""
        if self.rank == 0:
            outs = []
            for part in seen.chunk(PARTS):
                outs.append(self.stage(part))
                dist.send(outs[-1].detach(), 1)
            total = 0.0
            for out in outs:
                gradient = self.room()
                dist.recv(gradient, 1)
                out.backward(gradient)
                total += gradient.abs().sum().item()
            return total
        ins, losses = [], []
        for part in wanted.chunk(PARTS):
            x = self.room()
            dist.recv(x, 0)
            ins.append(x.requires_grad_())
            losses.append(loss_of(self.stage(x), part) / PARTS)
        for x, loss in zip(ins, losses, strict=True):
            loss.backward()
            dist.send(x.grad, 0)
        return sum(loss.item() for loss in losses)


class Batched(Hand):
    """The activations of a part go one way while the gradients of the part before come back."""

    def both(self, *operations):
        if operations:
            for work in dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations]):
                work.wait()

    def step(self, seen, wanted):
        total, before, gradient = 0.0, None, None
        if self.rank == 0:
            for part in (*seen.chunk(PARTS), None):
                send = []
                if part is not None:
                    out = self.stage(part)
                    send = [(dist.isend, out.detach(), 1)]
                if before is not None:
                    gradient = self.room()
                    send.append((dist.irecv, gradient, 1))
                self.both(*send)
                if before is not None:
                    before.backward(gradient)
                    total += gradient.abs().sum().item()
                before = out if part is not None else None
            return total
        for part in (*wanted.chunk(PARTS), None):
            x = self.room() if part is not None else None
            receive = [(dist.irecv, x, 0)] if x is not None else []
            if before is not None:
                receive.append((dist.isend, before.grad, 0))
            self.both(*receive)
            if x is not None:
                loss = loss_of(self.stage(x.requires_grad_()), part) / PARTS
                loss.backward()
                total += loss.item()
            before = x
        return total


class Schedule:
    """PyTorch's own."""

    def __init__(self, stage, record):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.stage, self.rank = stage, record.rank
        made = PipelineStage(stage, record.rank, 2, record.device)
        self.schedule = Schedule1F1B(made, PARTS, loss_fn=loss_of)

    def step(self, seen, wanted):
        if self.rank == 0:
            self.schedule.step(seen)
            return sum(p.grad.abs().sum().item() for p in self.stage.parameters())
        losses = []
        self.schedule.step(target=wanted, losses=losses)
        return sum(loss.item() for loss in losses)


def main():
    chosen = options("hand", "batched", "schedule")
    record = begin(chosen)
    torch.manual_seed(7 + record.rank)
    stage = (Second() if record.rank else First()).to(record.device)
    stepped = {"hand": Hand, "batched": Batched, "schedule": Schedule}[chosen.kind](stage, record)
    adam = torch.optim.AdamW(stage.parameters(), lr=3e-4)
    source = words_for(1000, record.device, BATCH, LENGTH + 1, WORDS)  # the same on both
    last = False
    while not last:
        words = next(source)
        adam.zero_grad()
        loss = stepped.step(words[:, :-1].contiguous(), words[:, 1:].contiguous())
        adam.step()
        last = record.step(loss, stage.parameters())
    record.end()


if __name__ == "__main__":
    main()
