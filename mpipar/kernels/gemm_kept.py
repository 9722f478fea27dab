"""Matrices that stay as they are for a while: products pack the panels of such a b once and use them again.

    with unchanged(weights):        # the optimizer runs after the block, not in it
        ...                         # every micro-batch, forward and backward, finds the panels of the first

Panels of W and of its transpose are different ones, so in backward a second set is made: the memory is that of the
weights twice (for bfloat16 without instructions of its own, whose panels are float32, four times).
"""

import contextlib
import threading

from .memory import aligned_zeros


@contextlib.contextmanager
def unchanged(*arrays):
    """Promise that the memory of these C-contiguous arrays isn't written before the block ends.

    What a product packs of a matrix that begins in it serves all later ones with that matrix. The promise holds for the
    process; blocks may lie one in another. Memory of panels is kept from block to block while it is used.
    """
    spans = [(x.ctypes.data, x.ctypes.data + x.nbytes) for x in arrays if x.size]
    kept.spans += spans
    try:
        yield
    finally:
        for span in spans:
            kept.spans.remove(span)
        kept.forget()


class Kept:
    """The panels, by the matrix. made: how often some were packed since the process began."""

    def __init__(self):
        self.spans = []
        self.entries = {}
        self.epoch = self.made = 0
        self.lock = threading.Lock()

    def panels(self, b, size, dtype, pack):
        """Address of b's panels: `size` elements of `dtype`, packed by pack(b, address); 0 if b may change."""
        at = b.__array_interface__["data"][0]
        if not any(first <= at < last for first, last in self.spans):
            return 0
        key = at, b.shape, b.strides, size, dtype
        with self.lock:
            epoch, memory, address = self.entries.get(key, (-1, None, 0))
            if epoch != self.epoch:
                if memory is None:
                    memory = aligned_zeros(size, dtype)
                    address = memory.ctypes.data
                pack(b, address)
                self.entries[key] = self.epoch, memory, address
                self.made += 1
        return address

    def forget(self):
        """The matrices may have changed; memory that the last block did not use is given back."""
        with self.lock:
            self.entries = {key: entry for key, entry in self.entries.items() if entry[0] == self.epoch}
            self.epoch += 1


kept = Kept()
