"""Tensor parallel by DTensor: heads and hidden units shared by two ranks (see common.py for the options).

torchrun --nproc-per-node=2 tensor_parallel.py --record FILE
"""

import torch
from common import begin, options, words_for
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

WIDTH, HEAD, LAYERS, WORDS, LENGTH = 256, 64, 4, 512, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, n, _ = x.shape
        seen = self.norm1(x)
        q, k, v = (part(seen).view(b, n, -1, HEAD).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.word(words) + self.place[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    record = begin(options(), eager=True)
    mesh = init_device_mesh(record.device.type, (2,))
    torch.manual_seed(7)
    model = Gpt().to(record.device)
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan.update({name: RowwiseParallel() for name in ("out", "down")})
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)  # plain tensors and DTensors side by side
    source = words_for(1000, record.device)  # the same on both
    last = False
    while not last:
        words = next(source)
        said = model(words[:, :-1])
        loss = functional.cross_entropy(said.reshape(-1, WORDS), words[:, 1:].reshape(-1))
        adam.zero_grad()
        loss.backward()
        adam.step()
        last = record.step(loss.item(), model.parameters())
    record.end()


if __name__ == "__main__":
    main()
