"""FSDP2: every block and the whole sharded by fully_shard (see common.py for the options).

torchrun --nproc-per-node=2 fsdp.py --record FILE [--kind plain|mixed]       (mixed: bf16, fp32 reduced)
"""

import torch
from common import begin, options, words_for
from proof_torch import Gpt, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    chosen = options("plain", "mixed")
    record = begin(chosen, eager=True)
    mesh = init_device_mesh(record.device.type, (2,))
    torch.manual_seed(7)
    model = Gpt().to(record.device)
    how = {"mesh": mesh}
    if chosen.kind == "mixed":
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    torch.manual_seed(100 + record.rank)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4)
    source = words_for(1000 + record.rank, record.device)
    last = False
    while not last:
        loss = loss_of(model, next(source))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        last = record.step(loss.item(), model.parameters())
    record.end()


if __name__ == "__main__":
    main()
