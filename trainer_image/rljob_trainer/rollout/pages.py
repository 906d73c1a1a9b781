"""Memory that tensors on the CPU give back to the system, and have again when they are touched.

The tensors keep their addresses, so that views and kernels stay valid. Invariant: after drop_pages, their content is
zeros, except for the first and the last page.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable

from torch import Tensor

_MADV_DONTNEED = 4  # madvise(2)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Give back the memory of the tensors' storages. OSError if the system refuses, as for locked memory."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    for address, num_bytes in storages.items():
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and _libc.madvise(begin, end - begin, _MADV_DONTNEED):
            error = ctypes.get_errno()
            raise OSError(error, f"madvise: {os.strerror(error)}")
