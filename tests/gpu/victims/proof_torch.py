"""PyTorch at work, in the ways people use it: a small GPT that is trained, or only asked.

    python proof_torch.py FOLDER --kind adamw|amp|compile|cudnn|graphs|inference|parallel|workers [--gb 1] [--hold N]
    torchrun --nproc-per-node=2 proof_torch.py FOLDER --kind torchrun      (DDP over gloo, all ranks on one GPU)

``parallel`` is DataParallel on two GPUs: one process, with NCCL inside.

Every step's loss is traced, and with every hundredth the parameters' own bits. ``--gb`` more lies there untouched, and
is compared then, too.
"""

import argparse
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from proof import Trace, digest, done
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

WIDTH, HEADS, LAYERS, LENGTH, BATCH, WORDS = 256, 4, 4, 64, 16, 512
EVERY = 100


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, n, width)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words):
        x = self.word(words) + self.place.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Cudnn(nn.Module):
    """What cuDNN does: convolutions, normalising a batch, an LSTM with dropout."""

    def __init__(self, width=128):
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.flat = nn.Conv1d(width, 2 * width, 5, padding=2)
        self.norm = nn.BatchNorm1d(2 * width)
        self.square = nn.Conv2d(1, 8, 3, padding=1)
        self.lstm = nn.LSTM(2 * width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words):
        x = functional.relu(self.norm(self.flat(self.word(words).transpose(1, 2))))
        x = self.square(x.unsqueeze(1)).mean(1).transpose(1, 2)
        return self.head(self.lstm(x)[0])


def loss_of(model, words):
    said = model(words[:, :-1])
    return functional.cross_entropy(said.reshape(-1, WORDS), words[:, 1:].reshape(-1))


class Texts(Dataset):
    """Texts that depend on the worker's own generator: never the same twice."""

    def __len__(self):
        return 64 * BATCH

    def __getitem__(self, index):
        return (torch.randint(0, WORDS, (LENGTH,)) + index) % WORDS


def batches(options, rank):
    """Batches on the GPU, for ever."""
    if options.kind == "workers":
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(
            Texts(), BATCH, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=options.device != "cpu",
            generator=generator,
        )  # fmt: skip
        while True:
            for words in loader:
                yield words.to(options.device, non_blocking=True)
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        yield torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator).to(options.device)


def bits(model):
    """The parameters, as they are."""
    return digest(*(p.detach().cpu().contiguous().numpy() for p in model.parameters()))


class Training:
    """One step: forward, backward, AdamW."""

    def __init__(self, options, model):
        self.model, self.kind = model, options.kind
        self.amp = torch.amp.GradScaler(options.device) if options.kind == "amp" else None
        self.adam = torch.optim.AdamW(model.parameters(), lr=3e-4, capturable=options.kind == "graphs")
        self.loss_of = torch.compile(loss_of) if options.kind == "compile" else loss_of

    def step(self, words):
        if self.amp is None:
            loss = self.loss_of(self.model, words)
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()
            return loss
        with torch.autocast(words.device.type, dtype=torch.float16):
            loss = self.loss_of(self.model, words)
        self.adam.zero_grad()
        self.amp.scale(loss).backward()
        self.amp.step(self.adam)
        self.amp.update()
        return loss


class Graph:
    """The same step, captured once and replayed."""

    def __init__(self, training, words):
        self.words = words.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                training.step(self.words)
        torch.cuda.current_stream().wait_stream(side)
        training.adam.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = training.step(self.words)

    def step(self, words):
        self.words.copy_(words)
        self.graph.replay()
        return self.loss


class Inference:
    """Weights that nobody writes, read again and again."""

    def __init__(self, model):
        self.model = model.eval()

    def step(self, words):
        with torch.inference_mode():
            said = self.model(words)
            return said.amax() + said.argmax(dim=-1).double().mean().float()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    rank = int(os.environ.get("RANK", "0")) if options.kind == "torchrun" else 0
    trace = Trace(options.folder, options.hold, f"trace-{rank}" if rank else "trace")
    torch.manual_seed(7)
    large = options.kind == "inference"
    model = Gpt(1024, 12) if large else Cudnn() if options.kind == "cudnn" else Gpt()
    model = model.to(options.device)
    if options.kind == "torchrun":
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    if options.kind == "parallel":
        model = nn.DataParallel(model, [0, 1])
    torch.manual_seed(100 + rank)
    rest = [
        torch.full((64 << 20,), i + 1, dtype=torch.int32, device=options.device) for i in range(int(options.gb * 4))
    ]
    made = Inference(model) if large else Training(options, model)
    source = batches(options, rank)
    if options.kind == "graphs":
        made = Graph(made, next(source))
    last = False
    while not last:
        loss = made.step(next(source))
        more = []
        if trace.steps % EVERY == EVERY - 1:
            more.append(bits(model))
            assert all(bool((r == i + 1).all()) for i, r in enumerate(rest)), "memory that nobody has written changed"
        last = trace.step(float(loss.item()).hex(), *more)
    assert all(bool((r == i + 1).all()) for i, r in enumerate(rest)), "memory that nobody has written changed"
    if options.kind == "torchrun":
        torch.distributed.barrier()
    done()


if __name__ == "__main__":
    main()
