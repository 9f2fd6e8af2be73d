"""JAX with two GPUs in one process, which speak by NCCL: pmap, or shard_map under jit.

    python jax_two.py --record FILE --kind pmap|shard_map [--steps N] [--pause S] [--hold N] [--gigabytes N]
        [--backend gloo]

The options are those of common.py; ``--backend gloo`` means the processor, as two devices.
"""

import argparse
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".04")  # not three quarters of GPUs that others use as well
if "gloo" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
else:
    os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from proof import Trace, digest, done

WIDTH, EVERY = 512, 50


def loss_of(parameters, x):
    y = jnp.sin(x * 3)
    for w, b in parameters[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = parameters[-1]
    return ((x @ w + b - y) ** 2).mean()


def update(parameters, x):
    """What each device does; the gradients are everybody's mean."""
    loss, slope = jax.value_and_grad(loss_of)(parameters, x)
    slope, loss = jax.lax.pmean(slope, "two"), jax.lax.pmean(loss, "two")
    moved = jax.lax.ppermute(x, "two", [(0, 1), (1, 0)])  # and a send and a receive
    return jax.tree.map(lambda p, g: p - 0.05 * g, parameters, slope), loss, moved


def stepped(kind, devices):
    """The step, and how arrays of it are put on the devices: (whole on each, a part on each)."""
    if kind == "pmap":
        step = jax.pmap(update, "two", devices=devices)
        whole = lambda tree: jax.tree.map(lambda a: jnp.stack([a, a]), tree)  # noqa: E731
        return step, whole, lambda a: a
    mesh = Mesh(np.array(devices), ("two",))
    everywhere, parted = PartitionSpec(), PartitionSpec("two")

    def inner(parameters, x):
        parameters, loss, moved = update(parameters, x[0])
        return parameters, loss, moved[None]

    step = jax.jit(
        jax.shard_map(
            inner, mesh=mesh, in_specs=(everywhere, parted), out_specs=(everywhere, everywhere, parted), check_vma=False
        )
    )
    return (
        step,
        lambda tree: jax.device_put(tree, NamedSharding(mesh, everywhere)),
        lambda a: jax.device_put(a, NamedSharding(mesh, parted)),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", required=True)
    parser.add_argument("--kind", choices=("pmap", "shard_map"), default="shard_map")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    for name, kind, usual in (("steps", int, 0), ("pause", float, 0.005), ("gigabytes", float, 0.25), ("hold", int, 0)):
        parser.add_argument(f"--{name}", type=kind, default=usual)
    options = parser.parse_args()
    devices = jax.devices()[:2]
    assert len(devices) == 2, f"JAX sees {jax.devices()}"
    step, whole, part = stepped(options.kind, devices)
    keys = jax.random.split(jax.random.key(7), 4)
    parameters = whole([(jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, jnp.zeros(WIDTH)) for k in keys])
    x = part(jax.random.normal(jax.random.key(8), (2, 256, WIDTH)))
    count = int(options.gigabytes * 10**9) // 4
    rest = [jax.device_put(jnp.arange(count, dtype=jnp.int32), device) for device in devices]
    same = jax.jit(lambda rest: (rest == jnp.arange(rest.size, dtype=jnp.int32)).all())
    folder, name = os.path.split(os.path.abspath(options.record))
    trace = Trace(folder, options.hold, name)
    trace.last = options.steps or None
    last = False
    while not last:
        parameters, loss, x = step(parameters, x)
        words = [float(np.asarray(loss).reshape(-1)[0]).hex()]
        if trace.steps % EVERY == EVERY - 1:
            words.append(digest(*(np.asarray(p).tobytes() for p in jax.tree.leaves(parameters))))
            assert all(bool(same(r)) for r in rest), "memory that nobody has written changed"
        last = trace.step(*words)
        time.sleep(options.pause)
    assert all(bool(same(r)) for r in rest), "memory that nobody has written changed"
    done()


if __name__ == "__main__":
    main()
