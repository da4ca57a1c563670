/* SPDX-License-Identifier: MIT */
/* Hands the KV pages of requests over from a prefill rank to a decode rank: another process, on another GPU or machine.
   The two may differ in page layout, page size and tensor-parallel size. A chunk of layers is packed into a slot of a
   ring, sent by NCCL, received into a slot of the other side's ring and unpacked into pages; then its credit goes back.
   Chunks overlap and come layer by layer; the program prints when the first layer is ready. Where the GPUs reach each
   other's memory, one kernel can write straight into the peer's pages instead. The program verifies every byte of every
   page, also after a cancelled request and after either process has died. tests/bench/bench_handover.cu compares the
   throughput with that of other ways.

       nvcc -arch=native -std=c++17 -O3 -I. examples/14_handover/handover.cu -lnccl -o 14_handover && ./14_handover

   `14_handover --help` lists options. CUDA_VISIBLE_DEVICES chooses the GPUs. Across machines: `14_handover --listen
   0.0.0.0:5555` on one, and `14_handover --connect first:5555` on the other.

       handover_plan.h         what goes where, in which chunks
       handover_link.h         the control channel
       handover_guard.h        ends calls that wait for a peer that is gone
       handover_pattern.h      what each byte must be
       handover_side.cuh       the memory of one side
       handover_session.cuh    a connection of two sides
       handover_ways.cuh       by a ring, or straight
       handover_run.cuh        what each side does */
#define KVPRIM_IMPLEMENTATION
#include "handover_run.cuh"

int main(int argc, char **argv)
{
    static handover_options o;
    const int code = handover_parse(&o, argc, argv);
    return code >= 0 ? code : handover_run(&o, NULL);
}
