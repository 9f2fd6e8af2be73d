"""A server of a language model that two ranks hold together (tensor parallel of transformers; see common.py).

    torchrun --nproc-per-node=2 server.py --record FILE --kind auto|hand

Rank 0 listens on 127.0.0.1; its port is in the file ``port`` beside FILE. ``GET /N`` is answered with the words that
follow prompt N and the last logits' digest. In each round rank 0 tells rank 1 by a broadcast which prompt is next, or
that nobody has asked; both compute, rank 0 answers: no answer depends on when it was asked for. A step is an answer;
the record has them in the order in which they were given. auto: ``tp_plan="auto"``; hand: parallelize_module.
"""

import http.server
import os
import queue
import threading
import time

import torch
import torch.distributed as dist
from common import begin, bits, options
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH, PROMPTS, ASIDE = 512, 16, 64, 1 << 20
NEW = {"auto": 12, "hand": 3}  # words of an answer: by hand each is hundreds of calls of DTensor's Python
NOTHING, STOP = -1, -2


def saved(folder, rank):
    """A folder with a small random model; rank 0 makes it."""
    path = os.path.join(folder, "model")
    if rank == 0 and not os.path.exists(path):
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    dist.barrier(**({"device_ids": [torch.cuda.current_device()]} if dist.get_backend() == "nccl" else {}))
    return path


def loaded(record, path):
    """The model, each rank with its part of it."""
    if record.options.kind == "auto":
        return LlamaForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).to(record.device)
    mesh = init_device_mesh(record.device.type, (2,))
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan.update({f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")})
        plan.update({"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()})
        parallelize_module(layer, mesh, plan)
    return model


class Asked(http.server.BaseHTTPRequestHandler):
    """One connection of a client: many requests."""

    protocol_version = "HTTP/1.1"
    waiting: "queue.Queue[tuple[int, queue.Queue[str]]]" = queue.Queue()

    def do_GET(self):
        answer = queue.Queue()
        self.waiting.put((int(self.path.strip("/")) % PROMPTS, answer))
        body = answer.get().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def listen(folder):
    """Answers come from the main thread: the model is asked by nobody else."""

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with open(os.path.join(folder, "port.new"), "w", encoding="ascii") as file:
        file.write(str(server.server_address[1]))
    os.replace(os.path.join(folder, "port.new"), os.path.join(folder, "port"))


class Model:
    """What both ranks do for an answer: the words one by one, with a cache."""

    def __init__(self, model, device, new):
        self.model, self.device, self.new = model.eval(), device, new
        generator = torch.Generator().manual_seed(11)
        self.prompts = torch.randint(0, WORDS, (PROMPTS, LENGTH), generator=generator).to(device)

    @torch.inference_mode()
    def answer(self, number):
        """Words and the digest of the last logits."""
        seen, cache, words = self.prompts[number : number + 1], None, []
        for _ in range(self.new):
            said = self.model(input_ids=seen, past_key_values=cache, use_cache=True)
            cache = said.past_key_values
            logits = said.logits[:, -1]
            logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
            seen = logits.argmax(dim=-1, keepdim=True)
            words.append(str(seen.item()))
        return f"{number} {','.join(words)} {bits([logits])}"


def main():
    chosen = options("auto", "hand", pause=0)
    record = begin(chosen, eager=True)
    folder = os.path.dirname(os.path.abspath(chosen.record))
    model = Model(loaded(record, saved(folder, record.rank)), record.device, NEW[chosen.kind])
    for number in range(2):
        model.answer(number)
    if record.rank == 0:
        listen(folder)
        print("READY", flush=True)
    next_ = torch.empty(1, dtype=torch.int64, device=record.device)
    until = os.path.join(folder, "until")
    while True:
        asked = None
        if record.rank == 0:
            try:
                asked = Asked.waiting.get(timeout=0.005)
            except queue.Empty:
                pass
            next_.fill_(asked[0] if asked else STOP if os.path.exists(until) else NOTHING)
        dist.broadcast(next_, 0)
        number = next_.item()
        if number == STOP:
            break
        if number == NOTHING:
            continue
        said = model.answer(number)
        record.ballast.check() if record.trace.steps % 50 == 49 else None
        record.trace.last = ASIDE  # it ends when nobody asks any more, not after a step
        record.trace.step(said.replace(" ", ":"))
        if asked:
            asked[1].put(said)
    time.sleep(0.2)  # the last answer is on its way
    record.end()


if __name__ == "__main__":
    main()
