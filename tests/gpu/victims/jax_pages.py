"""The same pages held by JAX (which opens every GPU that it sees)."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from stale import PAGE, Stale

WORDS = PAGE // 4


class JaxPages:
    """Every step verifies all pages and writes the next epoch into them (int32: JAX has no int64 by default)."""

    def __init__(self, size):
        self.count = max(1, int(size) // PAGE)
        self.epoch = 0
        self.device = jax.devices()[0]
        make = jax.jit(self._values)
        self.wrong = jax.jit(lambda memory, epoch: (memory != self._values(epoch)).any(axis=1).sum())
        # The old memory is given back to JAX for the new values: the size on the device stays.
        self.stamp = jax.jit(lambda memory, epoch: self._values(epoch) + memory * 0, donate_argnums=0)
        self.memory = make(0)

    def _values(self, epoch):
        ids = jnp.arange(self.count, dtype=jnp.int32)[:, None]
        return jnp.broadcast_to(ids * 16384 + epoch % 16384, (self.count, WORDS))

    def step(self):
        self.check()
        self.epoch += 1
        self.memory = self.stamp(self.memory, self.epoch)

    def check(self):
        wrong = int(self.wrong(self.memory, self.epoch))
        if wrong:
            raise Stale(f"{self.device}: {wrong} pages do not hold epoch {self.epoch}")

    def spoil(self):
        self.memory = self.memory.at[self.count // 2, WORDS // 2].add(-1)
