# SPDX-License-Identifier: MIT
"""kvprim.Communicator: one for each GPU of a job, with the collectives of kvprim_nccl.h on torch's tensors.

    comm = kvprim.Communicator(rank, world, id)                 id: kvprim.new_id() of one rank, carried to all others
    comm = kvprim.Communicator.from_store(store, rank, world)   torch.distributed's TCPStore, FileStore, ...
    comm = kvprim.Communicator.from_group(group)                the ranks of a process group, which carries the id
    comm = kvprim.Communicator(rank, world, nccl=pointer)       beside an ncclComm_t, which stays its owner's

    comm.all_reduce(hidden)                                     in place; comm.all_reduce(recv, send, "max")
    comm.all_reduce_norm(out, hidden, weight, residual=r, residual_out=r)

Rules beside those of `import kvprim`
    Ranks      All ranks call the same collectives, with the same sizes and dtypes, in the same order, on torch's
               current stream of the communicator's device. kvprim_nccl.h says which calls own kernels serve, and which
               NCCL.
    Tensors    Contiguous, of the communicator's device. recv and send are one tensor or do not overlap.
    Operators  CUDA graphs capture them. torch.compile keeps all of them, in their order: torch.ops.kvprim.all_reduce
               and so on take comm.number, and say that they write comm.order.
    Threads    One thread at a time uses a communicator; abort() and check() are for any thread at any time.
    Failure    A rank that waits in vain ends its collective after timeout_ms, without a result, and check() raises.
               Then: abort() and destroy().
    End        destroy() is collective. A communicator that nobody destroyed ends when Python does, the newest first,
               and aborts first if check() raises; `with` does so at its end. One that is beside an ncclComm_t must
               end before that does, and graphs that hold NCCL's collectives before the communicator. In a child of
               fork() communicators are gone, and the parent's work on.
    NCCL       Its library is the one of the process, which is torch's, or that of the package nvidia-nccl, or the
               system's. LD_PRELOAD=.../libnccl.so.2 chooses another.
"""
import atexit
import ctypes
import importlib.util
import os

import torch

import kvprim

_eager = kvprim._eager


class _Desc(ctypes.Structure):
    """kvprim_comm_desc"""
    _fields_ = ([("rank", ctypes.c_int32), ("world", ctypes.c_int32), ("id", ctypes.c_uint8 * 128),
                 ("buffer_bytes", ctypes.c_size_t)] +
                [(name, ctypes.c_int32) for name in ("timeout_ms", "deterministic", "no_pdl", "no_kernels", "max_sms",
                                                     "nccl_window", "init_timeout_ms", "padding")] +
                [("nccl", ctypes.c_void_p)] +
                [(name, ctypes.c_size_t) for name in ("all_reduce_limit", "reduce_scatter_limit", "all_gather_limit")] +
                [("exchange", ctypes.c_void_p), ("exchange_context", ctypes.c_void_p), ("peers", ctypes.c_void_p),
                 ("peer_bytes", ctypes.c_size_t), ("reserved", ctypes.c_int64)])


_Exchange = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _load():
    path = os.path.join(kvprim._BUILT, "libkvprim_nccl.so")
    if not os.path.exists(path):
        raise ImportError("this kvprim has no collectives: it was built without nvcc, or without nccl.h")
    try:
        loaded = ctypes.CDLL(path)
    except OSError:  # no libnccl.so.2 is loaded, and the system has none
        spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
        if spec is None:
            raise
        ctypes.CDLL(os.path.join(spec.submodule_search_locations[0], "lib", "libnccl.so.2"))
        loaded = ctypes.CDLL(path)
    loaded.kvprim_communicator_new.restype = ctypes.c_int64
    loaded.kvprim_communicator_new.argtypes = [ctypes.c_size_t]
    loaded.kvprim_communicator.restype, loaded.kvprim_communicator.argtypes = ctypes.c_void_p, [ctypes.c_int64]
    for name, arguments in (("init", 2), ("destroy", 1), ("abort", 1), ("check", 1), ("new_id", 1)):
        getattr(loaded, "kvprim_comm_" + name).argtypes = [ctypes.c_void_p] * arguments
    loaded.kvprim_group_start.argtypes = loaded.kvprim_group_end.argtypes = [ctypes.c_void_p]
    loaded.kvprim_comm_buffer.restype, loaded.kvprim_comm_buffer.argtypes = ctypes.c_void_p, [ctypes.c_void_p] * 2
    loaded.kvprim_comm_describe.restype, loaded.kvprim_comm_describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    os.register_at_fork(after_in_child=loaded.kvprim_communicators_forget)
    return loaded


library = _load()  # the functions of kvprim_nccl.h
kvprim.library.kvprim_status_name.restype = kvprim.library.kvprim_last_error.restype = ctypes.c_char_p


def _expect_ok(status):
    if status:
        raise RuntimeError(f"{kvprim.library.kvprim_status_name(status).decode()}: "
                           f"{kvprim.library.kvprim_last_error().decode()}")


def new_id():
    """The 128 bytes by which the ranks of one communicator find each other."""
    out = (ctypes.c_uint8 * 128)()
    _expect_ok(library.kvprim_comm_new_id(out))
    return bytes(out)


_alive = []  # in the order in which they were made
_made = {}  # how many from_store made, by name


class Communicator:
    """A rank of a communicator. The call returns when all `world` ranks have made theirs. device: this rank's GPU, or
    the current one. `options` are the other fields of kvprim_comm_desc: buffer_bytes, timeout_ms, init_timeout_ms,
    deterministic, no_pdl, no_kernels, max_sms, nccl_window, all_reduce_limit, reduce_scatter_limit, all_gather_limit;
    peers, a list of addresses, with peer_bytes; and exchange, a function that returns what all ranks pass to it, bytes
    of one length, joined."""

    def __init__(self, rank, world, id=None, *, nccl=None, device=None, peers=None, exchange=None, **options):
        unknown = options.keys() - {name for name, _ in _Desc._fields_} | options.keys() & {"padding", "reserved"}
        if unknown:
            raise TypeError(f"Communicator has no option {sorted(unknown)[0]}")
        if (id is None) == (nccl is None) and exchange is None:
            raise RuntimeError("a communicator needs either id or nccl")
        if id is not None and len(id) != 128:
            raise RuntimeError(f"id has {len(id)} bytes, not 128")
        if peers is not None and len(peers) != world:
            raise RuntimeError(f"peers has {len(peers)} addresses, not {world}")
        self.rank, self.world = rank, world
        index = None if device is None else torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.number = library.kvprim_communicator_new(ctypes.sizeof(_Desc))
        if self.number < 0:
            raise RuntimeError("there are too many communicators in this process, or kvprim's files do not match")
        self._comm = library.kvprim_communicator(self.number)
        desc = _Desc(rank=rank, world=world, nccl=nccl, **options)
        desc.id[:] = id if id is not None else bytes(128)
        addresses = (ctypes.c_void_p * world)(*peers) if peers is not None else None
        desc.peers = ctypes.cast(addresses, ctypes.c_void_p)
        failure, call = [], _Exchange(lambda _, mine, all, size: self._exchange(exchange, mine, all, size, failure))
        desc.exchange = ctypes.cast(call, ctypes.c_void_p) if exchange else None
        self.order = torch.zeros(1, dtype=torch.uint8, device=self.device)  # also makes the context
        with torch.cuda.device(self.device):
            status = library.kvprim_comm_init(self._comm, ctypes.byref(desc))
        if failure:
            raise failure[0]
        _expect_ok(status)
        self._process = os.getpid()
        _alive.append(self)

    def _exchange(self, exchange, mine, all, size, failure):
        try:
            joined = exchange(ctypes.string_at(mine, size))
            if len(joined) != size * self.world:
                raise RuntimeError(f"exchange returned {len(joined)} bytes, not {size} of each rank")
            ctypes.memmove(all, joined, len(joined))
        except Exception as error:  # whatever it is, it goes to init's caller
            failure.append(error)
        return len(failure)

    @classmethod
    def from_store(cls, store, rank, world, *, name="kvprim", **options):
        """The ranks that share this store make their communicators of one name in the same order."""
        _made[name] = _made.get(name, -1) + 1
        key = f"{name}/{_made[name]}"
        if rank == 0:
            store.set(key, new_id())
        return cls(rank, world, bytes(store.get(key)), **options)

    @classmethod
    def from_group(cls, group=None, **options):
        """The ranks of a process group of torch.distributed, whatever its backend: the default group's if None."""
        distributed = torch.distributed
        rank, world, known = distributed.get_rank(group), distributed.get_world_size(group), [None]
        if rank == 0:
            known = [new_id()]
        first = distributed.get_global_rank(group, 0) if group is not None else 0
        distributed.broadcast_object_list(known, src=first, group=group)
        return cls(rank, world, known[0], **options)

    # ---- collectives: destination first; eager calls go past torch's dispatcher, as those of `kvprim` --------------

    def all_reduce(self, recv, send=None, op="sum"):
        """recv = the sum of every rank's send, which is recv if None. op: sum, max, min, avg or prod."""
        if kvprim._compiling() or not _eager.all_reduce(self.number, recv, send, op):
            kvprim.ops.all_reduce(self.number, recv, send, op, order=self.order)

    def reduce_scatter(self, recv, send, op="sum"):
        """recv = this rank's part of the sum; send has `world` parts."""
        if kvprim._compiling() or not _eager.reduce_scatter(self.number, recv, send, op):
            kvprim.ops.reduce_scatter(self.number, recv, send, op, order=self.order)

    def all_gather(self, recv, send):
        """recv = every rank's send, one after another."""
        if kvprim._compiling() or not _eager.all_gather(self.number, recv, send):
            kvprim.ops.all_gather(self.number, recv, send, order=self.order)

    def all_gather_new(self, send):
        """The same, in a new tensor whose first dimension is `world` times as long."""
        recv = send.new_empty((self.world * send.shape[0], *send.shape[1:]))
        self.all_gather(recv, send)
        return recv

    def all_gatherv(self, recv, send, counts):
        """The same of parts of different sizes: counts[r] elements of rank r, the same list on every rank."""
        if kvprim._compiling() or not _eager.all_gatherv(self.number, recv, send, counts):
            kvprim.ops.all_gatherv(self.number, recv, send, counts, order=self.order)

    def all_to_all(self, recv, send):
        """Part r of recv = this rank's part of rank r's send; both have `world` equal parts."""
        if kvprim._compiling() or not _eager.all_to_all(self.number, recv, send):
            kvprim.ops.all_to_all(self.number, recv, send, order=self.order)

    def all_to_allv(self, recv, send, counts):
        """The same with parts of different sizes: rank a sends counts[a * world + b] elements to rank b."""
        if kvprim._compiling() or not _eager.all_to_allv(self.number, recv, send, counts):
            kvprim.ops.all_to_allv(self.number, recv, send, counts, order=self.order)

    def broadcast(self, tensor, root):
        """tensor = that of rank `root`."""
        if kvprim._compiling() or not _eager.broadcast(self.number, tensor, root):
            kvprim.ops.broadcast(self.number, tensor, root, order=self.order)

    def send(self, tensor, peer):
        """Sends it to rank `peer`, whose recv meets it: see group()."""
        if kvprim._compiling() or not _eager.send(self.number, tensor, peer):
            kvprim.ops.send(self.number, tensor, peer, order=self.order)

    def recv(self, tensor, peer):
        """tensor = what rank `peer` sends."""
        if kvprim._compiling() or not _eager.recv(self.number, tensor, peer):
            kvprim.ops.recv(self.number, tensor, peer, order=self.order)

    def all_reduce_norm(self, out, send, weight, *, residual=None, residual_out=None, sum=None, quantised=None,
                        scale=None, eps=1e-6, scale_per_token=False, scale_min=0.0, weight_plus_one=False,
                        scale_group=0, scale_power_of_two=False):
        """s = the sum of every rank's send; r = s + residual; out = r, as RMSNorm makes it, times weight. All are
        [tokens, hidden] of float16 or bfloat16, and each output may be None except that out or quantised is set. sum
        takes s, residual_out r, and quantised, float8_e4m3fn, out / scale: a float32 that is read, or with
        scale_per_token [tokens] that are written, or with scale_group=128 [tokens, hidden / 128] of any strides, also
        as powers of two, whose exponents int32 [tokens, ceil(hidden / 512)] takes, four in a word. residual_out may be
        residual, and out, sum or residual_out send."""
        if kvprim._compiling() or not _eager.all_reduce_norm(
                self.number, out, send, weight, residual, residual_out, sum, quantised, scale, eps, scale_per_token,
                scale_min, weight_plus_one, scale_group, scale_power_of_two):
            kvprim.ops.all_reduce_norm(self.number, out, send, weight, residual=residual, residual_out=residual_out,
                                       sum=sum, quantised=quantised, scale=scale, eps=eps,
                                       scale_per_token=scale_per_token, scale_min=scale_min,
                                       weight_plus_one=weight_plus_one, scale_group=scale_group,
                                       scale_power_of_two=scale_power_of_two, order=self.order)

    def group(self):
        """with comm.group(): the sends and receives inside run together, so that none waits for another."""
        return _Group(self)

    # ---- the communicator ------------------------------------------------------------------------------------------

    def _here(self):
        if self._process != os.getpid():
            raise RuntimeError(f"this communicator belongs to process {self._process}, and this is {os.getpid()}")
        return self._comm

    def buffer(self, *shape, dtype=torch.uint8, offset=0):
        """A tensor of the communicator's buffer (buffer_bytes), from byte `offset` on. It must not be used after
        destroy()."""
        size = ctypes.c_size_t()
        address = library.kvprim_comm_buffer(self._here(), ctypes.byref(size))
        wanted = torch.Size(shape).numel() * dtype.itemsize
        if offset < 0 or offset + wanted > size.value or offset % dtype.itemsize:
            raise RuntimeError(f"a tensor of {wanted} bytes at {offset} does not lie in the buffer, which has "
                               f"{size.value}, or is not aligned")
        if wanted == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.as_tensor(_Memory(address + offset, wanted, self), device=self.device).view(dtype).view(shape)

    def check(self):
        """Raises what went wrong since init, as a rank that did not arrive. Does not wait."""
        _expect_ok(library.kvprim_comm_check(self._here()))

    def abort(self):
        """Ends the collectives that wait, here and on the other ranks, whose results are lost; then destroy()."""
        _expect_ok(library.kvprim_comm_abort(self._here()))

    def describe(self):
        """Versions, links, limits, and which fast paths are on, or why they are off."""
        return library.kvprim_comm_describe(self._here()).decode()

    def destroy(self):
        """Collective, except after abort(): waits for the device's work, and frees everything."""
        comm = self._here()  # in a child of fork() torch would refuse the device before
        with torch.cuda.device(self.device):
            _expect_ok(library.kvprim_comm_destroy(comm))
        self.number = -1  # so that later calls name it, whatever their tensors are
        _alive.remove(self)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self in _alive:
            if kind is not None:
                self.abort()
            self.destroy()


class _Group:
    def __init__(self, communicator):
        self.comm = communicator._here()

    def __enter__(self):
        _expect_ok(library.kvprim_group_start(self.comm))

    def __exit__(self, kind, *_):
        status = library.kvprim_group_end(self.comm)
        if kind is None:
            _expect_ok(status)


class _Memory:
    """Bytes of the device as torch.as_tensor takes them. The communicator stays as long as a tensor of it."""

    def __init__(self, address, size, communicator):
        self.communicator = communicator
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@atexit.register
def _destroy_all():
    """Before torch and NCCL end, whose exit handlers are older."""
    for communicator in reversed(_alive[:]):
        if communicator._process == os.getpid():
            for step in ((communicator.abort, communicator.destroy) if library.kvprim_comm_check(communicator._comm)
                         else (communicator.destroy,)):
                try:
                    step()
                except RuntimeError:  # nobody is left to hear of it
                    pass
