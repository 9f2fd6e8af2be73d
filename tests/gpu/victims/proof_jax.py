"""JAX on one GPU or on two: a small network is trained on each, and with two an array goes from one to the other.

python proof_jax.py FOLDER [--gpus 2] [--gb 0.5] [--hold N]
"""

import argparse
import os
import sys

# The same algorithms in every run, and not three quarters of a GPU that others use as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".04")
os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import jax
import jax.numpy as jnp
import numpy as np
from proof import Trace, digest, done

WIDTH, EVERY = 512, 100


def loss_of(parameters, x, y):
    for w, b in parameters[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = parameters[-1]
    return ((x @ w + b - y) ** 2).mean()


@jax.jit
def update(parameters, key):
    key, more = jax.random.split(key)
    x = jax.random.normal(more, (256, WIDTH))
    loss, slope = jax.value_and_grad(loss_of)(parameters, x, jnp.sin(x * 3))
    return jax.tree.map(lambda p, g: p - 0.05 * g, parameters, slope), key, loss


class OnOne:
    """The network on one GPU."""

    def __init__(self, device, number, size):
        keys = jax.random.split(jax.random.key(number), 4)
        made = [(jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, jnp.zeros(WIDTH)) for k in keys]
        self.parameters = jax.device_put(made, device)
        self.key = jax.device_put(jax.random.key(100 + number), device)
        self.rest = jax.device_put(jnp.arange(int(size) // 4, dtype=jnp.int32), device)
        self.same = jax.jit(lambda rest: (rest == jnp.arange(rest.size, dtype=jnp.int32)).all())

    def step(self):
        self.parameters, self.key, loss = update(self.parameters, self.key)
        return float(loss).hex()

    def bits(self):
        assert bool(self.same(self.rest)), "memory that nobody has written changed"
        return digest(*(np.asarray(p) for p in jax.tree.leaves(self.parameters)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--hold", type=int, default=0)
    options = parser.parse_args()
    trace = Trace(options.folder, options.hold)
    devices = jax.devices()[: options.gpus]
    assert len(devices) == options.gpus, f"JAX sees {jax.devices()}"
    parts = [OnOne(device, number, options.gb * (1 << 30)) for number, device in enumerate(devices)]
    last = False
    while not last:
        results = [part.step() for part in parts]
        if len(parts) == 2 and trace.steps % 10 == 9:  # the second goes on with what the first has
            parts[1].parameters[0] = jax.device_put(parts[0].parameters[0], devices[1])
        if trace.steps % EVERY == EVERY - 1:
            results += [part.bits() for part in parts]
        last = trace.step(*results)
    for part in parts:
        part.bits()
    done()


if __name__ == "__main__":
    main()
