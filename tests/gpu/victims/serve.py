"""A server with a model on a GPU, and clients that ask it from outside of its container.

    python serve.py FOLDER --kind plain|llm [--gb 30]      answers POST /ask {"prompt": N} on 127.0.0.1:8000
    python serve.py --load PID FILE [--clients 3]          asks again and again, until its standard input ends

``llm`` is a Llama of random weights that takes as much memory as is said (transformers), each answer eight words; they
depend on the prompt alone. ``plain`` answers by a hash of some of its memory, without a framework. A client enters the
network of process PID and nothing else of its container, keeps its connection, and asks the same prompts in turn. It
notes when each answer came, whether it is the same as the first to that prompt, and every connection that broke.
"""

import argparse
import ctypes
import http.client
import http.server
import json
import os
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

PORT, PROMPTS, WORDS = 8000, 5, 8
CLONE_NEWNET = 0x40000000


# --- the server -------------------------------------------------------------------------------------------------------


class PlainModel:
    """Memory that is stamped once; an answer is the hash of a part of it, begun with the prompt."""

    PARTS = 16

    def __init__(self, gb):
        from plain import Plain

        self.gpu, self.size = Plain(), int(gb * 1e9) // (1 << 20) << 20
        self.at = self.gpu.alloc(self.size)
        self.gpu.stamp(self.at, self.size, 1)

    def answer(self, prompt):
        self.gpu.use()
        part = self.size // self.PARTS // 8 * 8
        return f"{self.gpu.hash(self.at + prompt % self.PARTS * part, part, prompt):x}"


class Llm:
    """A Llama of random weights in bfloat16."""

    def __init__(self, gb, device="cuda"):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(3)
        torch.set_default_dtype(torch.bfloat16)
        wide = gb >= 1
        hidden, inner, words = (4096, 11008, 32000) if wide else (64, 128, 256)
        each = 2 * (4 * hidden * hidden + 3 * hidden * inner)
        layers = max(2, round((gb * 1e9 - 4 * words * hidden) / each)) if wide else 2
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            vocab_size=words,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            attn_implementation="eager",
        )
        self.torch, self.device, self.words = torch, device, words
        with torch.device(device):
            self.model = LlamaForCausalLM(config).eval()

    def answer(self, prompt):
        generator = self.torch.Generator().manual_seed(prompt)
        words = self.torch.randint(3, self.words, (1, 32), generator=generator).to(self.device)
        with self.torch.inference_mode():
            said = self.model.generate(
                words,
                attention_mask=self.torch.ones_like(words),
                min_new_tokens=WORDS,
                max_new_tokens=WORDS,
                do_sample=False,
                pad_token_id=0,
            )
        return " ".join(str(word) for word in said[0, 32:].tolist())


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def serve(options):
    model = PlainModel(options.gb) if options.kind == "plain" else Llm(options.gb, options.device)
    mutex, count = threading.Lock(), [0]
    trace = os.open(os.path.join(options.folder, "trace"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with mutex:
                words = model.answer(asked["prompt"])
                os.write(trace, f"{count[0]} {time.monotonic():.6f} answered\n".encode())
                count[0] += 1
            said = json.dumps({"answer": words}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_):
            pass

    model.answer(0)
    with Server(("127.0.0.1", PORT), Handler) as server:
        print("SERVING", flush=True)
        server.serve_forever()


# --- the clients ------------------------------------------------------------------------------------------------------


class Asked:
    """What all clients have seen."""

    def __init__(self, path):
        self.path, self.mutex = path, threading.Lock()
        self.answers, self.times, self.wrong, self.lost = {}, [], [], []

    def answered(self, prompt, words):
        with self.mutex:
            first = self.answers.setdefault(prompt, words)
            if first != words:
                self.wrong.append([prompt, first, words])
            self.times.append(time.monotonic())

    def failed(self, error):
        with self.mutex:
            self.lost.append(f"{time.monotonic():.3f} {type(error).__name__}: {error}")

    def save(self):
        with self.mutex:
            text = json.dumps({name: getattr(self, name) for name in ("answers", "times", "wrong", "lost")})
        with open(self.path + ".new", "w", encoding="ascii") as file:
            file.write(text)
        os.replace(self.path + ".new", self.path)


def ask(asked, number, stop):
    """One client: a connection that it keeps; where that breaks, it says so and makes another."""
    turn, connection = number, None
    while not stop.is_set():
        prompt = turn % PROMPTS
        try:
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            connection.request("POST", "/ask", json.dumps({"prompt": prompt}), {"Content-Type": "application/json"})
            asked.answered(prompt, json.loads(connection.getresponse().read())["answer"])
            turn += 1
        except (OSError, http.client.HTTPException, ValueError) as error:
            asked.failed(error)
            connection = None
            time.sleep(0.2)


def load(options):
    network = os.open(f"/proc/{options.load}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    asked, stop = Asked(options.folder), threading.Event()
    clients = [threading.Thread(target=ask, args=(asked, n, stop)) for n in range(options.clients)]
    for client in clients:
        client.start()

    def follow():
        while not stop.wait(0.1):
            asked.save()

    threading.Thread(target=follow, daemon=True).start()
    sys.stdin.read()
    stop.set()
    for client in clients:
        client.join(70)
    asked.save()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=int)
    parser.add_argument("folder")
    parser.add_argument("--kind", choices=["plain", "llm"], default="plain")
    parser.add_argument("--gb", type=float, default=30.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=3)
    options = parser.parse_args()
    if options.load:
        load(options)
    else:
        serve(options)


if __name__ == "__main__":
    main()
