/* SPDX-License-Identifier: MIT */
/* A kernel of one's own around kvprim_warp_copy: each warp gathers a row of a KV cache, zeros for padding, and notes in
   which step it read the row, by which a cache may evict. Checks all bytes, and prints GB/s beside a cudaMemcpyAsync.

       nvcc -arch=native -I. examples/19_warp_copy.cu -o 19_warp_copy && ./19_warp_copy
*/
#include "kvprim_cuda.cuh"
#include "gpu.cuh"

enum { slots = 65536, tokens = 32768, row_words = 1024, row_bytes = 4 * row_words, threads = 256, rounds = 10 };

static uint32_t *cache, *out, *last_read; /* [slot][word], [token][word], [slot], on the device */
static int32_t slot[tokens], *slot_on_device;

static __host__ __device__ uint32_t cache_word(uint32_t word)
{
    return word * 2654435761u + 1;
}

static __global__ void fill(uint32_t *words)
{
    words[blockIdx.x * blockDim.x + threadIdx.x] = cache_word(blockIdx.x * blockDim.x + threadIdx.x);
}

static __global__ void gather(uint32_t *to, uint32_t *read_in, const uint32_t *from, const int32_t *index,
                              uint32_t step)
{
    const uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; /* the same in all lanes of a warp */
    const int32_t row = index[i];
    if (row < 0 || row >= slots)
        kvprim_warp_zero(to + i * row_words, row_bytes);
    else
        kvprim_warp_copy(to + i * row_words, from + (uint32_t)row * row_words, row_bytes);
    if (row >= 0 && row < slots && threadIdx.x % 32 == 0)
        read_in[row] = step;
}

/* Returns the least milliseconds of some rounds after the first: of the kernel, or of a copy of `bytes` unless 0. */
static float least_ms(size_t bytes)
{
    const cudaEvent_t begin = new_event(), end = new_event();
    float least = 1e9f;
    for (uint32_t r = 0; r < rounds; r++) {
        CU(cudaEventRecord(begin));
        if (bytes)
            CU(cudaMemcpyAsync(out, cache, bytes, cudaMemcpyDeviceToDevice));
        else
            gather<<<tokens / (threads / 32), threads>>>(out, last_read, cache, slot_on_device, r + 1);
        CU(cudaGetLastError());
        CU(cudaEventRecord(end));
        CU(cudaEventSynchronize(end));
        least = r > 0 ? fminf(least, elapsed_ms(begin, end)) : least;
    }
    return least;
}

int main(void)
{
    static uint32_t got[tokens][row_words], read_in[slots];
    int copied = 0, wrong = 0;
    need_gpu();
    for (uint32_t i = 0; i < tokens; i++) { /* every ninth is padding */
        slot[i] = i % 9 == 4 ? -1 : (int32_t)(i * 40503u % slots);
        copied += slot[i] >= 0;
    }
    cache = on_device<uint32_t>((size_t)slots * row_words), out = on_device<uint32_t>(tokens * row_words);
    last_read = on_device<uint32_t>(slots), slot_on_device = on_device(tokens, slot);
    fill<<<slots *(row_words / threads), threads>>>(cache);
    const size_t bytes = (size_t)copied * row_bytes;
    const float copy_ms = least_ms(bytes), gather_ms = least_ms(0); /* the latter overwrites what the former wrote */
    CU(cudaMemcpy(got, out, sizeof got, cudaMemcpyDeviceToHost));
    CU(cudaMemcpy(read_in, last_read, sizeof read_in, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < tokens; i++) {
        wrong += slot[i] >= 0 && read_in[slot[i]] != rounds;
        for (uint32_t w = 0; w < row_words; w++)
            wrong += got[i][w] != (slot[i] < 0 ? 0 : cache_word((uint32_t)slot[i] * row_words + w));
    }
    printf("%d rows of %d bytes gathered, each by a warp: %d words wrong\n", copied, row_bytes, wrong);
    printf("kvprim_warp_copy in a kernel of one's own %6.0f GB/s, cudaMemcpyAsync of as many bytes %6.0f GB/s\n",
           1e-6 * (double)bytes / gather_ms, 1e-6 * (double)bytes / copy_ms);
    return wrong != 0;
}
