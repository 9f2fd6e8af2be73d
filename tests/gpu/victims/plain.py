"""A GPU by the driver's own calls and the demo's kernels: no framework. It is up in a second, on software GPUs too."""

import ctypes
import os

PTX = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "src", "limosa", "demo", "kernels.ptx")
PAGE = 4096
u64 = ctypes.c_uint64


class Plain:
    """The first GPU that this process sees."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.do("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.do("cuDeviceGet", ctypes.byref(device), 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.context, self.module = context, ctypes.c_void_p()
        self.use()
        with open(PTX, "rb") as file:
            self.do("cuModuleLoadData", ctypes.byref(self.module), file.read() + b"\0")
        self.kernels = {name: self.kernel(name) for name in ("stamp", "hash")}
        self.total = self.alloc(PAGE)

    def do(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        if result:
            raise SystemExit(f"{name}: the driver says {result}")

    def use(self):
        """A thread's first call."""
        self.do("cuCtxSetCurrent", self.context)

    def kernel(self, name):
        found = ctypes.c_void_p()
        self.do("cuModuleGetFunction", ctypes.byref(found), self.module, name.encode())
        return found

    def alloc(self, size):
        at = u64()
        self.do("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        return at.value

    def free(self, at):
        self.do("cuMemFree_v2", u64(at))

    def _launch(self, name, *numbers):
        values = [u64(number) for number in numbers]
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.do("cuLaunchKernel", self.kernels[name], 256, 1, 1, 256, 1, 1, 0, None, arguments, None)

    def stamp(self, at, size, epoch, page=0):
        """Writes all words of it: they depend on the epoch and on where they are, from page ``page`` on."""
        self._launch("stamp", at, size // 8, epoch, page)

    def hash(self, at, size, begin=0):
        """A number that depends on all of it, and on ``begin``; waits for what was begun before."""
        self.do("cuMemcpyHtoD_v2", u64(self.total), ctypes.byref(u64(begin)), ctypes.c_size_t(8))
        self._launch("hash", at, size // 8, self.total)
        found = u64()
        self.do("cuMemcpyDtoH_v2", ctypes.byref(found), u64(self.total), ctypes.c_size_t(8))
        return found.value
