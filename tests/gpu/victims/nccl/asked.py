"""A training that makes a step only when it is asked to: how long one takes, for bench/nccl_cost.py.

    torchrun --nproc-per-node=2 asked.py FOLDER --kind ddp|fsdp [--backend gloo]

FOLDER/order holds ``<number> <steps>``; both ranks make as many, and rank 0 writes ``<number> <ms a step>`` to
FOLDER/answer. While nobody asks, nobody computes.
"""

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from common import device_of
from torch import nn
from torch.nn import functional

IDLE = 600  # seconds without an order after which nobody is there any more
# FSDP2 has a model that is worth it. With DDP's the GPUs wait for Python, whose steps differ by several per cent (two
# H200: two jobs without the shim by 2.5, in the middle half of all comparisons by -6.8 to 1.6).
WIDTH = {"ddp": 768, "fsdp": 2048}


class Gpt(nn.Module):
    def __init__(self, width, depth, heads, tokens, words):
        super().__init__()
        self.word, self.place = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        seen = self.word(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            seen = block(seen, src_mask=mask, is_causal=True)
        return self.head(seen)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kind", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    options = parser.parse_args()
    device = device_of(options)
    tiny = device.type == "cpu"
    width = 64 if tiny else WIDTH[options.kind]
    depth, heads, tokens, batch, words = (2, 2, 32, 2, 256) if tiny else (12, width // 64, 1024, 16, 50304)
    dist.init_process_group(options.backend)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    model = Gpt(width, depth, heads, tokens, words).to(device)
    if options.kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=None if tiny else [device.index])
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randint(words, (batch, tokens), device=device)

    def step():
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x).view(-1, words), x.view(-1))
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    def settle():
        if not tiny:
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    settle()
    gc.collect()
    gc.disable()
    print("READY", flush=True)
    last, heard = "", time.monotonic()
    while time.monotonic() - heard < IDLE:
        try:
            with open(os.path.join(options.folder, "order"), encoding="ascii") as file:
                number, count = file.read().split()
        except (FileNotFoundError, ValueError):
            number, count = last, "0"
        if number == last:
            time.sleep(0.001)
            continue
        last, heard = number, time.monotonic()
        if count == "0":
            break
        dist.barrier(**({} if tiny else {"device_ids": [device.index]}))
        settle()
        begun = time.perf_counter()
        for _ in range(int(count)):
            step()
        settle()
        spent = (time.perf_counter() - begun) / int(count) * 1e3
        if dist.get_rank() == 0:
            with open(os.path.join(options.folder, "answer.new"), "w", encoding="ascii") as file:
                file.write(f"{number} {spent:.6f}")
            os.replace(os.path.join(options.folder, "answer.new"), os.path.join(options.folder, "answer"))
    os._exit(0)


if __name__ == "__main__":
    main()
