"""Opens an io_uring where the kernel lets it, and says which."""

import ctypes
import errno

from common import loop

libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))  # io_uring_setup
print("io_uring", ring if ring < 0 else "open", errno.errorcode.get(ctypes.get_errno(), "ok"), flush=True)
loop()
