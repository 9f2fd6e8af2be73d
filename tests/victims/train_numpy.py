"""A NumPy training whose batches come from two worker processes; one loss a step, as a hex float, into ``losses``.

    python train_numpy.py FOLDER [STEPS] [PACE] [SEED]

A file ``hurry`` in the folder ends the pace.

Every number depends on the state of the parent and of both workers (each draws from a generator of its own), so that
anything that a restore loses or repeats changes all later losses.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the same sums in the same order, and both cores left to others

import multiprocessing
import sys
import time

import numpy as np

WORKERS, BATCH, WIDTH = 2, 64, 32


def produce(number, seed, outbox):
    random = np.random.default_rng([seed, number])
    target = np.random.default_rng(seed).normal(size=WIDTH)
    while True:
        x = random.normal(size=(BATCH, WIDTH))
        outbox.put((x, np.tanh(x @ target) + 0.01 * random.normal(size=BATCH)))


def main(folder, steps=200, pace=0.02, seed=1):
    context = multiprocessing.get_context("fork")
    boxes = [context.Queue(maxsize=2) for _ in range(WORKERS)]
    for number, box in enumerate(boxes):
        context.Process(target=produce, args=(number, seed, box), daemon=True).start()
    random = np.random.default_rng([seed, 99])
    w1, w2 = 0.1 * random.normal(size=(WIDTH, WIDTH)), 0.1 * random.normal(size=WIDTH)
    losses = os.open(os.path.join(folder, "losses"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    print("READY", flush=True)
    for step in range(steps):
        x, y = boxes[step % WORKERS].get(timeout=60)
        keep = random.random(size=WIDTH) < 0.9  # dropout: the parent's generator counts too
        hidden = np.tanh(x @ w1) * keep
        error = hidden @ w2 - y
        loss = float(error @ error / BATCH)
        grad_hidden = np.outer(error, w2) * keep * (1 - hidden**2)
        w2 -= 0.05 / BATCH * (hidden.T @ error)
        w1 -= 0.05 / BATCH * (x.T @ grad_hidden)
        os.write(losses, f"{step} {loss.hex()} {time.monotonic():.6f}\n".encode())
        sys.stdout.write(f"tick {step} {time.monotonic():.6f}\n")  # in one call: it may be killed between two
        sys.stdout.flush()
        time.sleep(0 if os.path.exists(os.path.join(folder, "hurry")) else pace)
    print("DONE", flush=True)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments[0], *[kind(a) for kind, a in zip((int, float, int), arguments[1:], strict=False)])
