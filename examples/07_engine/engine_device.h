/* SPDX-License-Identifier: MIT */
/* What the engine needs of CUDA besides kvprim's functions, without CUDA's headers. kvprim_impl.cu implements it with
   CUDA's runtime, tests/build/engine_host.c on the CPU. Each function returns NULL, or what went wrong. */
#ifndef ENGINE_DEVICE_H
#define ENGINE_DEVICE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what a cudaStream_t points to */

const char *device_count(int *count);
const char *device_use(int device); /* for the calling thread, from now on */
const char *device_open_stream(struct CUstream_st **stream);
const char *device_close_stream(struct CUstream_st *stream);
const char *device_poll(struct CUstream_st *stream, int *done); /* *done: whether all its work is done; does not wait */
const char *device_alloc(void **memory, size_t bytes);
const char *device_free(void *memory);
const char *device_alloc_pinned(void **memory, size_t bytes); /* host memory that copies use without staging */
const char *device_free_pinned(void *memory);

/* Copies between any two of host and device, in the order of the stream. */
const char *device_copy(void *dst, const void *src, size_t bytes, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
