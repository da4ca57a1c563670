/* SPDX-License-Identifier: MIT */
/* libkvprim_nccl.so: the functions of kvprim_nccl.h, and communicators by number, which is what operators in a graph
   can name. Their memory is never freed: a call with the number of an ended communicator is an error, not a crash. */
#include "kvprim_nccl.h"

namespace
{
enum { most_communicators = 4096 }; // 1,432 bytes each
kvprim_comm *communicators[most_communicators];
int64_t count;
} // namespace

extern "C" {
KVPRIM_API int64_t kvprim_communicator_new(size_t desc_bytes);
KVPRIM_API kvprim_comm *kvprim_communicator(int64_t number);
KVPRIM_API void kvprim_communicators_forget(void);
}

/* Returns a number for kvprim_communicator, or -1. desc_bytes: what the caller takes a kvprim_comm_desc for. Python's
   lock is held. */
int64_t kvprim_communicator_new(size_t desc_bytes)
{
    const int64_t number = count;
    kvprim_comm *const comm = static_cast<kvprim_comm *>(
        number < most_communicators && desc_bytes == sizeof(kvprim_comm_desc) ? calloc(1, sizeof(kvprim_comm)) : NULL);
    if (!comm)
        return -1;
    communicators[number] = comm;
    __atomic_store_n(&count, number + 1, __ATOMIC_RELEASE);
    return number;
}

/* NULL: there is none of that number in this process. */
kvprim_comm *kvprim_communicator(int64_t number)
{
    return number >= 0 && number < __atomic_load_n(&count, __ATOMIC_ACQUIRE) ? communicators[number] : NULL;
}

/* In a child of fork(), whose parent they belong to. */
void kvprim_communicators_forget(void)
{
    count = 0;
}
