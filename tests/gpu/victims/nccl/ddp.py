"""DistributedDataParallel in the ways people use it (see common.py for the options).

torchrun --nproc-per-node=2 ddp.py --record FILE --kind conv|accumulate|amp|workers|compile
"""

import os

import torch
from common import begin, options, words_for
from proof_torch import Cudnn, Gpt, Texts, loss_of
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

PARTS = 3  # of a batch whose gradients are gathered before the ranks speak to each other


def loaded(record):
    """What two workers of this rank make, which depends on their own generators."""
    texts = Texts()
    sampler = DistributedSampler(texts, shuffle=True, seed=5)
    loader = DataLoader(
        texts, 8, sampler=sampler, num_workers=2, persistent_workers=True, pin_memory=record.device.type == "cuda",
        generator=torch.Generator().manual_seed(50 + record.rank),
    )  # fmt: skip
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for words in loader:
            yield words.to(record.device, non_blocking=True)


def main():
    chosen = options("conv", "accumulate", "amp", "workers", "compile")
    # A cache of its own: another run that was ended in the middle may have left half a file.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.path.dirname(os.path.abspath(chosen.record)), "inductor")
    record = begin(chosen)
    torch.manual_seed(7)
    model = (Cudnn() if chosen.kind == "conv" else Gpt()).to(record.device)
    cards = [record.device.index] if record.device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(model, device_ids=cards)
    asked = torch.compile(model) if chosen.kind == "compile" else model
    torch.manual_seed(100 + record.rank)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4)
    amp = chosen.kind == "amp"
    scaler = torch.amp.GradScaler(record.device.type, enabled=amp)
    source = loaded(record) if chosen.kind == "workers" else words_for(1000 + record.rank, record.device)

    def part():
        with torch.autocast(record.device.type, dtype=torch.float16, enabled=amp):
            loss = loss_of(asked, next(source))
        scaler.scale(loss).backward()
        return loss

    last = False
    while not last:
        adam.zero_grad()
        if chosen.kind == "accumulate":
            with model.no_sync():
                for _ in range(PARTS - 1):
                    part()
        loss = part()
        scaler.step(adam)
        scaler.update()
        last = record.step(loss.item(), model.parameters())
    record.end()


if __name__ == "__main__":
    main()
