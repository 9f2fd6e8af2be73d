"""What the jobs of several ranks share: options, the process group, a record of every step that a twin must repeat.

    torchrun --nproc-per-node=2 NAME.py --record FILE [--kind …] [--steps N] [--pause S] [--hold N] [--gigabytes N]
        [--backend gloo]

Rank 0 writes FILE, rank N writes FILE-N: ``<step> <CLOCK_MONOTONIC> <loss as float.hex()>`` for each step, and with
every 50th the digest of all parameters of this rank. The job ends after ``--steps``, or after the step whose number is
in the file ``until`` beside FILE (every rank looks after every step: name one that is still some steps off). With
``--hold N`` it waits after N steps until that file, or one called ``go``, is there. ``--gigabytes`` more lie on each
rank's device untouched, and are compared with what was written at first. On a processor (``--backend gloo``) all is
the same.
"""

import argparse
import datetime
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# NVLink multicast stays off: nothing here needs it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
from proof import Trace, digest, done

EVERY, PIECE = 50, 64 << 20


def options(*kinds, pause=0.005):
    """The command line; the first kind is the usual one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", required=True)
    parser.add_argument("--kind", choices=kinds or ("plain",), default=(kinds or ("plain",))[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--pause", type=float, default=pause, help="seconds after each step")
    parser.add_argument("--gigabytes", type=float, default=0.25)
    parser.add_argument("--hold", type=int, default=0)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    return parser.parse_args()


def same_bits():
    """Two runs are to give the same bits; whether they do, the twins show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def bits(tensors):
    """The digest of tensors; of a DTensor, of this rank's part."""
    own = (getattr(t, "_local_tensor", t).detach() for t in tensors)
    return digest(*(t.cpu().contiguous().view(-1).view(torch.uint8).numpy() for t in own))


class Ballast:
    """Memory that lies there and that nobody writes again."""

    def __init__(self, gigabytes, device):
        count = round(gigabytes * 10**9 / (4 * PIECE)) if gigabytes else 0
        self.pieces = [torch.full((PIECE,), i + 1, dtype=torch.int32, device=device) for i in range(count)]

    def check(self):
        """Fails where any of it is not as it was."""
        for i, piece in enumerate(self.pieces):
            assert bool((piece == i + 1).all()), "memory that nobody has written changed"


class Record:
    """One rank's record."""

    def __init__(self, options, rank, device):
        folder, name = os.path.split(os.path.abspath(options.record))
        self.options, self.rank, self.device = options, rank, device
        self.trace = Trace(folder, options.hold, f"{name}-{rank}" if rank else name)
        self.trace.last = options.steps or None
        self.ballast = Ballast(options.gigabytes, device)

    @property
    def steps(self):
        """How many steps were made."""
        return self.trace.steps

    def step(self, loss, tensors=()):
        """Writes a step down; returns whether it was the last."""
        words = [float(loss).hex()]
        if self.trace.steps % EVERY == EVERY - 1:
            words.append(bits(tensors))
            self.ballast.check()
        last = self.trace.step(*words)
        if self.options.pause and not last:
            time.sleep(self.options.pause)
        return last

    def end(self):
        """The last word of this rank: everybody is there, and the groups are closed as they should be."""
        self.ballast.check()
        if dist.is_initialized():
            dist.barrier(**({"device_ids": [self.device.index]} if self.device.type == "cuda" else {}))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            dist.destroy_process_group()
        done()


def begin(options, eager=False):
    """Joins the world; ``eager``: the communicator is made at once, others are split from it."""
    same_bits()
    device = device_of(options)
    bound = {"device_id": device} if eager and device.type == "cuda" else {}
    if seconds := os.environ.get("PROOF_TIME_OUT"):  # of the process group and its store
        bound["timeout"] = datetime.timedelta(seconds=float(seconds))
    dist.init_process_group(options.backend, **bound)
    return Record(options, dist.get_rank(), device)


def device_of(options, local=None):
    """This rank's device, which is the current one from here on."""
    if options.backend == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if local is None else local)
    torch.cuda.set_device(device)
    return device


def words_for(seed, device, batch=8, length=64, words=512):
    """Texts, for ever; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, words, (batch, length), generator=generator).to(device)
