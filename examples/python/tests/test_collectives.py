# SPDX-License-Identifier: MIT
"""Tests kvprim.Communicator against plain torch, and prints the host's time of a call.

    PYTHONPATH=build/python python3 examples/python/tests/test_collectives.py

Without a GPU: what is refused. With one or more: two processes over torch's NCCL, which share a GPU if there is one;
one process by itself, with torch.compile, CUDA graphs, fork() and its end; and 2 and 4 ranks that are threads, whose
kernels run on one GPU at the same time, with tests/nccl/nccl_none.cpp in place of NCCL (KVPRIM_NCCL_NONE names its
library, if there is no nvcc). No rank's host may wait for another rank's kernel there: tests/nccl/nccl_ranks.h.
"""
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time

import kvprim
from test_kvprim import Dispatched, refused, torch

HERE = os.path.dirname(os.path.abspath(__file__))
FLOATS = ("bfloat16", "float16", "float32")
ANY_SIZE = ctypes.c_size_t(-1).value


class Rank:
    """What a rank of a test has. meet(): waits for the other ranks. shared: of all ranks of a test, which are threads,
    or with its number in the way, which are processes."""

    def __init__(self, comm, meet, has_nccl):
        self.comm, self.meet, self.has_nccl = comm, meet, has_nccl
        self.rank, self.world, self.awake = comm.rank, comm.world, torch.zeros(1, device="cuda")

    def every(self, make):
        """make(r) of each rank, with numbers that are the same on every rank."""
        made = []
        for r in range(self.world):
            generator = torch.Generator(device="cuda")
            generator.manual_seed(100 + r)
            made.append(make(generator))
        return made

    def together(self, *steps):
        """All ranks enqueue before any waits. A stream's first work may wait for all kernels: so some goes before."""
        self.awake.add_(1)
        torch.cuda.current_stream().synchronize()
        self.meet()
        for step in steps:
            step()
        self.meet()
        torch.cuda.current_stream().synchronize()
        self.meet()


def sum_of(tensors):
    """In fp32, in the order of the ranks."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total


def random(*shape, dtype=None):
    return lambda generator: torch.randn(shape, device="cuda", generator=generator).to(dtype or torch.bfloat16)


def sums(r):
    for name in FLOATS:
        dtype = getattr(torch, name)
        for count in (1, 8, 1000, 40960, 1 << 20):
            send, out = r.every(random(count, dtype=dtype)), [torch.zeros(count, dtype=dtype, device="cuda")
                                                              for _ in range(4)]
            place = send[r.rank].clone()
            for op, into in zip(("sum", "max", "min", "avg"), out):
                r.together(lambda: r.comm.all_reduce(into, send[r.rank], op))
            r.together(lambda: r.comm.all_reduce(place))
            stacked, total = torch.stack([one.float() for one in send]), sum_of(send)
            for got, expected in zip(out, (total, stacked.amax(0), stacked.amin(0), total / r.world)):
                near = torch.allclose(got.float(), expected, rtol=1e-2, atol=1e-2)
                assert near, (name, count)
            assert r.has_nccl or torch.equal(out[0], total.to(dtype)), (name, count, "bits")
            assert torch.equal(place, out[0]), (name, count, "in place")
            parts = r.every(random(r.world * count, dtype=dtype))
            part = torch.zeros(count, dtype=dtype, device="cuda")
            r.together(lambda: r.comm.reduce_scatter(part, parts[r.rank]))
            expected = sum_of(parts)[r.rank * count:][:count]
            assert torch.allclose(part.float(), expected, rtol=1e-2, atol=1e-2), (name, count, "reduce_scatter")
    if r.has_nccl:
        for dtype in (torch.int32, torch.int64, torch.uint8, torch.float64):
            value = torch.arange(100, device="cuda").to(dtype)
            r.together(lambda: r.comm.all_reduce(value))
            assert torch.equal(value, (torch.arange(100, device="cuda") * r.world).to(dtype)), dtype


def moves(r):
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool):
        for count in (1, 24, 1000, 33333):
            def make(generator, many=1):
                return torch.randint(0, 2 if dtype == torch.bool else 200, (many * count, 3), device="cuda",
                                     generator=generator).to(dtype)
            send = r.every(make)
            recv, new = torch.zeros((r.world * count, 3), dtype=dtype, device="cuda"), []
            r.together(lambda: r.comm.all_gather(recv, send[r.rank]), lambda: new.append(
                r.comm.all_gather_new(send[r.rank])))
            assert torch.equal(recv, torch.cat(send)) and torch.equal(new[0], recv), (dtype, count)
            counts = [3 * (count * other // r.world) for other in range(r.world)]  # none of rank 0
            parts = [one.flatten()[:n] for one, n in zip(send, counts)]
            recv = torch.zeros(sum(counts), dtype=dtype, device="cuda")
            r.together(lambda: r.comm.all_gatherv(recv, parts[r.rank], counts))
            assert torch.equal(recv, torch.cat(parts)), (dtype, count, "all_gatherv")
            send = r.every(lambda generator: make(generator, r.world))
            recv = torch.zeros_like(send[0])
            r.together(lambda: r.comm.all_to_all(recv, send[r.rank]))
            expected = torch.cat([one.chunk(r.world)[r.rank] for one in send])
            assert torch.equal(recv, expected), (dtype, count, "all_to_all")
            sizes = [(a + 2 * b) % 3 * count for a in range(r.world) for b in range(r.world)]
            flat = [one.flatten()[:sum(sizes[a * r.world:][:r.world])] for a, one in enumerate(send)]
            recv = torch.zeros(sum(sizes[r.rank::r.world]), dtype=dtype, device="cuda")
            r.together(lambda: r.comm.all_to_allv(recv, flat[r.rank], sizes))
            pieces = [one.split(sizes[a * r.world:][:r.world])[r.rank] for a, one in enumerate(flat)]
            assert torch.equal(recv, torch.cat(pieces)), (dtype, count, "all_to_allv")


def norm_of(r, send, residual, weight, eps, plus_one=False):
    """s, r, y in float, of the sums and residuals as the dtype rounds them."""
    s = sum_of(send).to(send[0].dtype)
    after = (s.float() + residual.float()).to(s.dtype) if residual is not None else s
    x = after.float()
    return s, after, x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * (weight.float() + plus_one)


def norms(r):
    for name in ("bfloat16", "float16"):
        dtype = getattr(torch, name)
        for tokens, hidden in ((1, 4096), (7, 512), (64, 4096), (3, 16384)):
            send = r.every(random(tokens, hidden, dtype=dtype))
            residual, weight = random(tokens, hidden, dtype=dtype), random(hidden, dtype=dtype)
            residual, weight = (make(torch.Generator(device="cuda").manual_seed(5)) for make in (residual, weight))
            zeros = lambda kind=dtype: torch.zeros((tokens, hidden), dtype=kind, device="cuda")
            out, total, after, alone = zeros(), zeros(), residual.clone(), zeros()
            small, scale = zeros(torch.float8_e4m3fn), torch.full((1,), 0.03, device="cuda")
            scales, each = torch.zeros((tokens, 1), device="cuda"), zeros(torch.float8_e4m3fn)
            columns, grouped = torch.zeros((hidden // 128, tokens), device="cuda").t(), zeros(torch.float8_e4m3fn)
            words = torch.zeros((tokens, (hidden + 511) // 512), dtype=torch.int32, device="cuda")
            powers, group = zeros(torch.float8_e4m3fn), {"scale_group": 128}
            call = r.comm.all_reduce_norm
            r.together(lambda: call(out, send[r.rank], weight, residual=after, residual_out=after, sum=total),
                       lambda: call(alone, send[r.rank], weight, eps=1e-5, weight_plus_one=True),
                       lambda: call(None, send[r.rank], weight, quantised=small, scale=scale),
                       lambda: call(None, send[r.rank], weight, quantised=each, scale=scales, scale_per_token=True),
                       lambda: call(None, send[r.rank], weight, quantised=grouped, scale=columns, **group),
                       lambda: call(None, send[r.rank], weight, quantised=powers, scale=words, **group,
                                    scale_power_of_two=True))
            s, added, y = norm_of(r, send, residual, weight, 1e-6)
            assert r.has_nccl or (torch.equal(total, s) and torch.equal(after, added)), (name, tokens, hidden)
            assert torch.allclose(total.float(), s.float(), rtol=1e-2, atol=1e-2), (name, tokens, hidden)
            near = dict(rtol=2e-2, atol=2e-2)
            assert torch.allclose(out.float(), y, **near), (name, tokens, hidden)
            y = norm_of(r, send, None, weight, 1e-5, True)[2]
            assert torch.allclose(alone.float(), y, **near), (name, tokens, hidden, "alone")
            y = norm_of(r, send, None, weight, 1e-6)[2].to(dtype).float()
            exponents = words.view(torch.uint8)[:, :hidden // 128].float() - 127
            wide = lambda scales: scales.repeat_interleave(128, 1)
            for got, by in ((small, scale), (each, scales), (grouped, wide(columns)), (powers, wide(2 ** exponents))):
                assert torch.allclose(got.float() * by, y.clamp(-448 * by, 448 * by), rtol=0.15, atol=0.05), "fp8"
            assert torch.allclose(scales, y.abs().amax(-1, keepdim=True) / 448, rtol=2e-2), "scales"
            least = y.view(tokens, -1, 128).abs().amax(-1) / 448
            assert torch.allclose(columns, least, rtol=2e-2), "scales of groups"
            assert (2 ** exponents >= 0.98 * least).all() and (2 ** exponents <= 2.04 * least).all(), "powers of two"
            for words, given in (("scale_group is 64", {"scale_group": 64}), ("scale_group is -1", {"scale_group": -9}),
                                 ("scale_power_of_two is set", {"scale_power_of_two": True})):
                r.together(lambda: refused(words, call, out, send[r.rank], weight, **given))


def exchanges(r):
    """Broadcast, sends and receives are NCCL's."""
    if not r.has_nccl:
        return
    mine = torch.full((1000,), float(r.rank + 1), device="cuda")
    r.together(lambda: r.comm.broadcast(mine, 1))
    assert (mine == 2).all(), "broadcast"
    theirs, mine = torch.zeros(1000, device="cuda"), torch.full((1000,), float(r.rank + 1), device="cuda")

    def swap():
        with r.comm.group():
            r.comm.send(mine, 1 - r.rank)
            r.comm.recv(theirs, 1 - r.rank)

    r.together(swap)
    assert (theirs == 2 - r.rank).all(), "a group"
    r.together(lambda: r.comm.send(mine, 1) if r.rank == 0 else r.comm.recv(theirs, 0))
    assert r.rank == 0 or (theirs == 1).all(), "send and recv"


def buffers(r):
    """Tensors in the communicator's buffer."""
    whole = r.comm.buffer(1 << 20)
    part = r.comm.buffer(16, 1000, dtype=torch.bfloat16, offset=4096)
    assert whole.numel() == 1 << 20 and part.data_ptr() == whole.data_ptr() + 4096 and part.device == r.comm.device
    assert part.dtype == torch.bfloat16 and part.shape == (16, 1000)
    part.fill_(r.rank + 1)
    r.together(lambda: r.comm.all_reduce(part))
    assert (part == sum(range(1, r.world + 1))).all(), "in the buffer"
    refused("4194304 bytes at 0|1048576", r.comm.buffer, 1 << 20, dtype=torch.float32)
    refused("at 3", r.comm.buffer, 4, dtype=torch.float32, offset=3)
    assert str(r.world) in r.comm.describe()
    r.comm.check()


def step_of(comm):
    """A layer's tail and a gather, with what torch does between."""
    def step(x, residual, weight):
        y = x * 2
        comm.all_reduce(y)
        out = torch.empty_like(x)
        comm.all_reduce_norm(out, x + 1, weight, residual=residual, residual_out=residual)
        return comm.all_gather_new(out * 0.5), y + residual
    return step


def step_inputs(r, seed):
    torch.manual_seed(seed + r.rank)
    x = torch.randn((8, 1024), device="cuda").to(torch.bfloat16)
    torch.manual_seed(seed)
    return [x, *(torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in ((8, 1024), (1024,)))]


def run_step(r, step, inputs):
    got = []
    r.together(lambda: got.extend(step(*inputs)))
    return got


one_at_a_time = threading.Lock()


def graphs(r):
    step, inputs, graph = step_of(r.comm), step_inputs(r, 1), torch.cuda.CUDAGraph()
    run_step(r, step, inputs)
    for turn in range(r.world):
        r.meet()
        if turn == r.rank:
            with one_at_a_time, torch.cuda.graph(graph, stream=torch.cuda.current_stream(),
                                                 capture_error_mode="thread_local"):
                got = step(*inputs)
        r.meet()
    for seed in (2, 3):
        fresh = step_inputs(r, seed)
        expected = run_step(r, step, [one.clone() for one in fresh])
        torch._foreach_copy_(inputs, fresh)
        r.together(graph.replay)
        assert all(map(torch.equal, expected, got)), "replay"
    del graph
    r.meet()


def compiles(r, backend="aot_eager"):
    step = step_of(r.comm)
    inputs = step_inputs(r, 4)
    theirs, ours = [one.clone() for one in inputs], [one.clone() for one in inputs]
    expected = run_step(r, step, theirs)
    compiled = torch.compile(step, fullgraph=True, backend=backend)

    def one_after_another(*inputs):  # the collectives of a rank that compiled do not keep the next from it
        with one_at_a_time:
            return compiled(*inputs)

    got = run_step(r, one_after_another, ours)
    assert all(map(torch.equal, expected, got)) and all(map(torch.equal, theirs, ours)), backend


def late(r, make):
    """A rank that does not arrive ends the others' wait, and check() names it; abort() and destroy() end it."""
    comm = make(timeout_ms=400)
    if "own kernels on" not in comm.describe():  # NCCL's collectives wait for ever
        return comm.destroy()
    x = torch.ones(1000, device="cuda")
    torch.cuda.current_stream().synchronize()
    r.meet()
    if r.rank != 0:
        comm.all_reduce(x)
        torch.cuda.current_stream().synchronize()
        refused("TIMEOUT|rank 0", comm.check)
        refused("TIMEOUT", comm.all_reduce, x)
    r.meet()
    comm.abort()
    refused("abort", comm.all_reduce, x)
    r.meet()
    comm.destroy()
    refused("comm is -1", comm.all_reduce, x)
    refused("ended", comm.check)
    r.meet()


def refusals(number, order):
    """What the operators refuse before they look for a GPU, of two ranks on the CPU."""
    eager = lambda name, *arguments, **options: getattr(kvprim._eager, name)(number, *arguments, *options.values())
    ops = lambda name, *arguments, **options: getattr(kvprim.ops, name)(number, *arguments, order=order, **options)
    x, wide = torch.zeros((8, 16), dtype=torch.bfloat16), torch.zeros((16, 16), dtype=torch.bfloat16)
    powers, row = torch.zeros((8, 16), dtype=torch.uint8).view(torch.float8_e8m0fnu), x[0]
    for call in (eager, ops):
        for words, *arguments in (
                ("op is \"add\"", "all_reduce", x, None, "add"),
                ("recv has sizes [8, 8]|strides [16, 1]|contiguous", "all_reduce", x[:, :8], None, "sum"),
                ("recv is bfloat16|send float32", "all_reduce", x, x.float(), "sum"),
                ("recv has 128|send 64", "all_reduce", x, x[:4], "sum"),
                ("recv is bool", "all_reduce", x.bool(), None, "sum"),
                ("recv is float8_e8m0fnu", "reduce_scatter", powers[:4], powers, "sum"),
                ("recv has 128|send 128|2 ranks", "all_gather", x, x),
                ("recv has 128|send 128", "reduce_scatter", x, x, "sum"),
                ("recv has 15|send 15|2 ranks", "all_to_all", row[1:], row[:15]),
                ("send has sizes|contiguous", "all_gather", wide, wide[::2]),
                ("counts has 3|2", "all_gatherv", wide, x, [1, 2, 3]),
                ("counts[1] is -1", "all_gatherv", wide, x, [1, -1]),
                ("recv has 256|by counts 129", "all_gatherv", wide, x, [128, 1]),
                ("send has 128|by counts 1", "all_gatherv", wide, x, [1, 255]),
                ("counts has 2|4", "all_to_allv", wide, x, [1, 2]),
                ("send has 256|by counts 128", "all_to_allv", x, wide, [64, 64, 64, 64]),
                ("root is 2|0 to 1", "broadcast", x, 2), ("peer is -1", "send", x, -1), ("peer is 2", "recv", x, 2),
                ("tensor|contiguous", "recv", x.t(), 1)):
            refused(words, call, *arguments)
        for words, out, send, weight, given in (
                ("send has shape [128]", x, x.flatten(), row, {}),
                ("weight is float32", x, x, row.float(), {}),
                ("weight is bfloat16 of 8", x, x, row[:8], {}),
                ("out has shape [4, 16]|[8, 16]", x[:4], x, row, {}),
                ("out is float32", x.float(), x, row, {}),
                ("residual has strides [1, 8]", x, x, row, {"residual": torch.zeros_like(x.t().contiguous()).t()}),
                ("quantised is uint8", None, x, row, {"quantised": x.to(torch.uint8)}),
                ("scale is bfloat16", None, x, row, {"scale": row[:1]}),
                ("scale is float32 of 2 elements|of 8", None, x, row, {"scale": torch.zeros(2),
                                                                        "scale_per_token": True}),
                ("scale is bfloat16", None, x, row, {"scale": x, "scale_group": 128}),
                ("scale has shape [8]|not [8, 0]", None, x, row, {"scale": torch.zeros(8), "scale_group": 128}),
                ("scale has shape [8, 1]|not [8, 0]", None, x, row, {"scale": torch.zeros(8, 1), "scale_group": 64})):
            options = dict(residual=None, residual_out=None, sum=None, quantised=None, scale=None, eps=1e-6,
                           scale_per_token=False, scale_min=0.0, weight_plus_one=False, scale_group=0,
                           scale_power_of_two=False)
            refused(words, call, "all_reduce_norm", out, send, weight, **{**options, **given})
    refused("comm is 4000", kvprim._eager.all_reduce, 4000, x, None, "sum")
    refused("comm is -1", kvprim.ops.all_reduce, -1, x, order=order)
    ended, _ = host_communicator(world=0)  # all its fields are 0 then
    refused(f"comm is {ended}|ended", kvprim._eager.all_to_all, ended, x, x)
    refused(f"comm is {ended}|ended", kvprim.ops.all_to_all, ended, x, x, order=order)
    refused("id has 3 bytes", kvprim.Communicator, 0, 2, b"abc", device=0)
    refused("either id or nccl", kvprim.Communicator, 0, 2, device=0)
    refused("peers has 1", kvprim.Communicator, 0, 2, bytes(128), peers=[0], device=0)


def host_communicator(world=2):
    """Of so many ranks on the CPU, for what is refused before it is used: kvprim_comm's fields, which begin with nccl,
    rank, world, device."""
    from kvprim import collectives
    number = collectives.library.kvprim_communicator_new(ctypes.sizeof(collectives._Desc))
    fields = ctypes.cast(collectives.library.kvprim_communicator(number), ctypes.POINTER(ctypes.c_int32))
    fields[3], fields[4] = world, -1
    return number, torch.zeros(1, dtype=torch.uint8)


# ---- threads on one GPU ---------------------------------------------------------------------------------------------

def thread_ranks(world):
    """Runs as a process of its own, with nccl_none.cpp in place of NCCL."""
    barrier, failures, room = threading.Barrier(world), [], 33 << 20
    memory = [[torch.zeros(room, dtype=torch.uint8, device="cuda") for _ in range(world)] for _ in "ab"]
    torch.cuda.synchronize()
    said, sms = [None] * world, torch.cuda.get_device_properties(0).multi_processor_count

    def meet():
        barrier.wait(90)

    def rank_main(rank):
        def exchange(mine):
            said[rank] = mine
            meet()
            joined = b"".join(said)
            meet()
            return joined

        def make(which=1, **options):
            meet()
            return kvprim.Communicator(
                rank, world, bytes(128), peers=[one.data_ptr() for one in memory[which]], peer_bytes=room,
                exchange=exchange, max_sms=sms // (2 * world), all_reduce_limit=ANY_SIZE, all_gather_limit=ANY_SIZE,
                reduce_scatter_limit=ANY_SIZE, **options)

        comm = make(0, timeout_ms=60_000, buffer_bytes=1 << 20)
        r = Rank(comm, meet, False)
        for way, tests in ((None, (sums, moves, norms, buffers, graphs)), (Dispatched, (sums, moves, norms))):
            with way() if way else contextlib.nullcontext():
                for test in tests:
                    report(f"{test.__name__}, {world} threads{', dispatched' if way else ''}", test, r,
                           say=rank == 0, failures=failures)
        report(f"compiles, {world} threads", compiles, r, say=rank == 0, failures=failures)
        report(f"late, {world} threads", late, r, make, say=rank == 0, failures=failures)
        meet()
        comm.destroy()

    def run(rank):
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                rank_main(rank)
        except BaseException as error:
            failures.append(error)
            barrier.abort()
            if not isinstance(error, threading.BrokenBarrierError):
                print(f"FAIL rank {rank} of {world} threads: {type(error).__name__}: {error}", flush=True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(failures)


def report(name, test, *arguments, say=True, failures=None):
    """Runs a test. A failure ends the run of threads and processes, whose ranks would wait for each other."""
    test(*arguments)
    if say:
        print(f"ok {name}", flush=True)


# ---- processes ------------------------------------------------------------------------------------------------------

def process_rank(rank, world, port):
    """One of several processes, with a GPU each if there are so many."""
    import torch.distributed as distributed
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    store = distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    distributed.init_process_group("gloo", store=distributed.PrefixStore("gloo", store), rank=rank, world_size=world)

    def say(test, *arguments, name=""):
        report(f"{test.__name__}{name}, {world} processes", test, *arguments, say=rank == 0)

    options = {"timeout_ms": 120_000, "buffer_bytes": 1 << 20}
    with kvprim.Communicator.from_store(store, rank, world, **options) as comm:
        if rank == 0:
            print(comm.describe(), flush=True)
        r = Rank(comm, distributed.barrier, True)
        for way in (None, Dispatched):
            with way() if way else contextlib.nullcontext():
                for test in (sums, moves, norms, exchanges, buffers):
                    say(test, r, name=", dispatched" if way else "")
        say(graphs, r)
        say(compiles, r, "inductor", name=" by Inductor")
        say(beside, r, options, store)
        print_host_times(r)
    with kvprim.Communicator.from_group(**options) as comm:
        r = Rank(comm, distributed.barrier, True)
        say(exchanges, r, name=" of from_group")
    say(late, r, lambda **options: kvprim.Communicator.from_store(store, rank, world, name="late", **options))
    distributed.destroy_process_group()


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


def nccl_communicator(rank, world, id):
    """An ncclComm_t of one's own, as an engine has one."""
    nccl, pointer, unique = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p(), _UniqueId()
    unique.bytes[:] = id
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
    assert nccl.ncclCommInitRank(ctypes.byref(pointer), world, unique, rank) == 0, "ncclCommInitRank"
    nccl.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return nccl, pointer.value


def beside(r, options, store):
    """A communicator beside an ncclComm_t."""
    if r.rank == 0:
        store.set("beside", kvprim.new_id())
    nccl, pointer = nccl_communicator(r.rank, r.world, bytes(store.get("beside")))
    comm = kvprim.Communicator(r.rank, r.world, nccl=pointer, **options)
    x = torch.ones(1000, device="cuda")
    r.together(lambda: comm.all_reduce(x))
    assert (x == r.world).all(), "beside an ncclComm_t"
    comm.destroy()
    assert nccl.ncclCommDestroy(pointer) == 0, "it is still its owner's"


# ---- one process ----------------------------------------------------------------------------------------------------

AT_EXIT = """
import torch, kvprim
comms = [kvprim.Communicator(0, 1, kvprim.new_id()) for _ in range(2)]
x = torch.ones(1 << 20, device="cuda")
for comm in comms:
    comm.all_reduce(x)
print("ends", flush=True)
"""


def ends(comm):
    """A process that destroys nothing ends by itself, and without an error."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ends\n" and "Error" not in done.stderr, done


def forks(comm):
    """A child has no communicators, and ends without touching the parent's."""
    x = torch.ones(1000, device="cuda")
    comm.all_reduce(x)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused("no communicator of this process", comm.all_reduce, x)
            refused("belongs to process", comm.check)
            refused("belongs to process", comm.destroy)
            code = 0
        except BaseException as error:
            print(f"in the child: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with {status}"
    comm.all_reduce(x)
    torch.cuda.synchronize()
    assert (x == 1).all()
    comm.check()


def opchecks(comm):
    x, y = torch.ones((4, 256), dtype=torch.bfloat16, device="cuda"), torch.zeros((4, 256), dtype=torch.bfloat16,
                                                                                 device="cuda")
    for name, arguments, options in (
            ("all_reduce", (y, x), {}), ("all_reduce", (y,), {"op": "max"}), ("reduce_scatter", (y, x), {}),
            ("all_gather", (y, x), {}), ("all_gatherv", (y, x, [1024]), {}), ("broadcast", (y, 0), {}),
            ("all_reduce_norm", (y, x, x[0]), {"residual": x + 1, "residual_out": y + 1})):
        torch.library.opcheck(getattr(kvprim.ops, name), (comm.number, *arguments), {"order": comm.order, **options})


def sends_itself(comm):
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    with comm.group():
        comm.send(x, 0)
        comm.recv(y, 0)
    assert (y == 1).all(), "to itself"
    refused("KVPRIM_ERROR_OVERLAP", comm.all_to_all, x, x)
    refused("KVPRIM_ERROR_OVERLAP", comm.all_reduce, x[1:], x[:-1])


def alone():
    torch.cuda.set_stream(torch.cuda.Stream())
    comm = kvprim.Communicator(0, 1, kvprim.new_id(), buffer_bytes=1 << 20)
    r = Rank(comm, lambda: None, True)
    for test in (buffers, graphs):
        report(f"{test.__name__}, one process", test, r)
    for backend in ("aot_eager", "inductor"):
        report(f"compiles by {backend}, one process", compiles, r, backend)
    for test in (opchecks, sends_itself, forks, ends):
        report(f"{test.__name__}, one process", test, comm)
    print_host_times(r)
    comm.destroy()


def microseconds(call, calls=100, repetitions=9):
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - start) / calls)
    return sorted(times)[repetitions // 2]


def print_host_times(r):
    """All ranks call it, and one prints."""
    comm = r.comm
    x, y = (torch.ones((8, 1024), dtype=torch.bfloat16, device="cuda") for _ in "xy")
    from kvprim import collectives
    bare, pointer = collectives.library.kvprim_all_reduce, collectives.library.kvprim_communicator(comm.number)
    bare.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    arguments = (pointer, y.data_ptr(), x.data_ptr(), x.numel(), 18, 0, torch.cuda.current_stream().cuda_stream)
    calls = {
        "kvprim_all_reduce by ctypes": lambda: bare(*arguments),
        "all_reduce": lambda: comm.all_reduce(y, x),
        "all_reduce by torch's dispatcher": lambda: kvprim.ops.all_reduce(comm.number, y, x, order=comm.order),
        "all_reduce_norm": lambda: comm.all_reduce_norm(y, x, x[0])}
    if r.rank == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {r.world} ranks: us of the host per call "
              "from Python, medians")
    for name, call in calls.items():
        r.together()
        time_us = microseconds(call)
        if r.rank == 0:
            print(f"  {name:34} {time_us:6.2f}", flush=True)


# ---- all of it ------------------------------------------------------------------------------------------------------

def nccl_none(folder):
    """The library of nccl_none.cpp, or None."""
    given, source = os.environ.get("KVPRIM_NCCL_NONE"), os.path.join(HERE, "../../../tests/nccl/nccl_none.cpp")
    if given:
        return given
    sys.path.insert(0, os.path.dirname(HERE))
    import build_backend
    nvcc, output = build_backend.find_nvcc(), os.path.join(folder, "libnccl_none.so")
    include = nvcc and build_backend.nccl_include(nvcc)
    if not include or not os.path.exists(source):
        return None
    subprocess.run([nvcc, "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static", "-I" + include, source,
                    "-o", output], check=True)
    return output


def start(*arguments, **environment):
    return subprocess.Popen([sys.executable, os.path.abspath(__file__), *map(str, arguments)],
                            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment})


def part(name, *processes, seconds=580):
    """Waits for a part of the tests, which prints its own. Returns whether it failed."""
    deadline, codes = time.monotonic() + seconds, []
    for process in processes:
        try:
            codes.append(process.wait(max(deadline - time.monotonic(), 1)))
        except subprocess.TimeoutExpired:
            codes.append("too late")
        if codes[-1]:  # the others would wait for it
            for other in processes:
                other.kill()
    print(f"{'FAIL' if any(codes) else 'ok'} {name}{f': {codes}' if any(codes) else ''}", flush=True)
    return any(codes)


def main():
    skipped, failed = 0, []
    with torch.no_grad():
        refusals(*host_communicator())
    print("ok refusals, cpu", flush=True)
    if not torch.cuda.is_available():
        print("skip collectives: torch finds no GPU\n1 passed, 0 failed, 1 skipped")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        failed.append(part("one process", start("alone")))
        port = 20000 + os.getpid() % 10000
        hosts = [{} if torch.cuda.device_count() > 1 else {"NCCL_HOSTID": str(rank)} for rank in range(2)]
        failed.append(part("two processes", *(start("process", rank, 2, port, NCCL_NVLS_ENABLE="0", **hosts[rank])
                                              for rank in range(2))))
        none = nccl_none(folder)
        for world in (2, 4) if none else ():
            failed.append(part(f"{world} threads", start("threads", world, LD_PRELOAD=none, CUDA_MODULE_LOADING="EAGER",
                                                         CUDA_DEVICE_MAX_CONNECTIONS="32")))
        if not none:
            print("skip ranks as threads: no nvcc or no nccl.h, and no KVPRIM_NCCL_NONE")
            skipped += 1
    print(f"{1 + failed.count(False)} passed, {failed.count(True)} failed, {skipped} skipped")
    return sum(failed)


if __name__ == "__main__":
    if torch is None or not os.path.exists(os.path.join(kvprim._BUILT, "libkvprim_nccl.so")):
        print("skip collectives: python3 has no torch, or kvprim was built without nvcc or nccl.h\n"
              "0 passed, 0 failed, 1 skipped")
    elif len(sys.argv) > 1:
        with torch.no_grad():
            what, *numbers = sys.argv[1], *map(int, sys.argv[2:])
            sys.exit({"alone": alone, "process": process_rank, "threads": thread_ranks}[what](*numbers) or 0)
    else:
        sys.exit(main())
