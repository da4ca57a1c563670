# SPDX-License-Identifier: MIT
"""mini-sglang's minisgl.kernel: store_cache, indexing, fast_compare_key, init_pynccl."""
import kvprim

__all__ = ["store_cache", "indexing", "fast_compare_key", "init_pynccl"]

fast_compare_key = kvprim.prefix


def store_cache(k_cache, v_cache, indices, k, v):
    """Caches of [slots, ...]: their rows `indices` = those of k and v."""
    kvprim.store(k, v, k_cache, v_cache, indices)


def indexing(weights, indices, *, output=None, vocab_range=None):
    """Rows of weights. vocab_range: which ids they hold, (first, how many); zeros for the other ids."""
    first, count = vocab_range or (0, weights.shape[0])
    if output is None:
        output = weights.new_empty(indices.shape[0], weights.shape[1])
    kvprim.gather(output, weights[:count], indices, base=first)
    return output


class PyNCCLCommunicator:
    def __init__(self, communicator):
        self.communicator = communicator

    def all_reduce(self, input, op):
        self.communicator.all_reduce(input, None, op)

    def all_gather(self, output, input):
        self.communicator.all_gather(output, input)

    def get_buffer(self):
        """The address of the buffer, in which tensors are no faster than elsewhere."""
        return self.communicator.buffer(1).data_ptr()


def init_pynccl(*, tp_rank, tp_size, tp_cpu_group, max_size_bytes=0):
    """On the current GPU. It ends with the process, or by its communicator.destroy()."""
    communicator = kvprim.Communicator.from_group(tp_cpu_group, buffer_bytes=max_size_bytes)
    if (communicator.rank, communicator.world) != (tp_rank, tp_size):
        raise RuntimeError(f"tp_rank is {tp_rank} of {tp_size}, but tp_cpu_group's {communicator.rank} of "
                           f"{communicator.world}")
    return PyNCCLCommunicator(communicator)
