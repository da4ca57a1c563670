/* SPDX-License-Identifier: MIT */
/* The part of 10_trace that reads traces, for machines without CUDA: answers questions about a file, compares two.

       cc -std=c11 -O2 examples/10_trace/trace_file.c -o 10_trace_read && ./10_trace_read trace.json.gz */
#define _POSIX_C_SOURCE 200809L
#include "trace_files.h"

int main(int argc, char **argv)
{
    return trace_files("10_trace_read", argc, argv);
}
