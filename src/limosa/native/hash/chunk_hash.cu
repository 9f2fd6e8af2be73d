/* The hash of chunks on a GPU (chunk_hash.h). chunk_hash.ptx is made of it by make_ptx.py; any grid and any block of
 * whole warps give the same sums, which begin as zero. */
#include "chunk_hash.h"

struct strip {
    uint64_t v[HASH_LANES];
};

static __device__ __forceinline__ void add_word(struct strip *strip, uint4 word, const uint4 *keys)
{
#pragma unroll
    for (int lane = 0; lane < HASH_LANES; lane++) {
        uint4 k = keys[lane];
        strip->v[lane] += (uint64_t)(word.x + k.x) * (word.y + k.y);
        strip->v[lane] += (uint64_t)(word.z + k.z) * (word.w + k.w);
    }
}

static __device__ __forceinline__ void add_strip(uint64_t sums[HASH_LANES], const struct strip *strip,
                                                 const struct hash_strip *keys)
{
#pragma unroll
    for (int lane = 0; lane < HASH_LANES; lane++)
        sums[lane] += keys->low[lane] * (uint32_t)strip->v[lane] + keys->high[lane] * (strip->v[lane] >> 32);
}

/* Where a strip begins, in words. */
static __device__ __forceinline__ uint64_t first_word(uint64_t strip)
{
    return strip / HASH_COLUMNS * (HASH_ROWS * HASH_COLUMNS) + strip % HASH_COLUMNS;
}

extern "C" __global__ void __launch_bounds__(256)
    chunk_hash(const struct hash_chunk *chunks, uint64_t n, const struct hash_table *table, unsigned long long *sums)
{
    __shared__ uint4 rows[HASH_ROWS * HASH_LANES];
    for (unsigned i = threadIdx.x; i < HASH_ROWS * HASH_LANES; i += blockDim.x)
        rows[i] = ((const uint4 *)table->rows)[i];
    __syncthreads();

    for (uint64_t chunk = blockIdx.y; chunk < n; chunk += gridDim.y) {
        const uint4 *data = (const uint4 *)chunks[chunk].at;
        const uint64_t bytes = chunks[chunk].bytes, words = bytes / HASH_WORD;
        const uint64_t strips = (bytes + HASH_TILE - 1) / HASH_TILE * HASH_COLUMNS;
        const uint64_t whole = bytes / HASH_TILE * HASH_COLUMNS;
        uint64_t sum[HASH_LANES] = {0};
        if (blockIdx.x == 0 && threadIdx.x == 0)
            for (int lane = 0; lane < HASH_LANES; lane++)
                sum[lane] = table->start[lane] + table->length[lane] * bytes;
        /* Two strips at a time: each key that is read is used twice, and more loads are under way. */
        uint64_t strip = (uint64_t)blockIdx.x * blockDim.x * 2 + threadIdx.x;
        for (; strip < strips; strip += (uint64_t)gridDim.x * blockDim.x * 2) {
            const uint64_t other = strip + blockDim.x;
            struct strip a = {{0}}, b = {{0}};
            const uint64_t at_a = first_word(strip), at_b = first_word(other);
            if (other < whole) {
#pragma unroll 8
                for (int row = 0; row < HASH_ROWS; row++) {
                    uint4 x = __ldcs(data + at_a + row * HASH_COLUMNS), y = __ldcs(data + at_b + row * HASH_COLUMNS);
                    add_word(&a, x, rows + row * HASH_LANES);
                    add_word(&b, y, rows + row * HASH_LANES);
                }
            } else {
                const uint4 zero = {0, 0, 0, 0};
#pragma unroll 1
                for (int row = 0; row < HASH_ROWS; row++) {
                    const uint64_t i = at_a + row * HASH_COLUMNS, k = at_b + row * HASH_COLUMNS;
                    add_word(&a, i < words ? data[i] : zero, rows + row * HASH_LANES);
                    add_word(&b, k < words ? data[k] : zero, rows + row * HASH_LANES);
                }
            }
            add_strip(sum, &a, &table->strips[strip]);
            if (other < strips)
                add_strip(sum, &b, &table->strips[other]);
        }
#pragma unroll
        for (int lane = 0; lane < HASH_LANES; lane++) {
            for (int distance = 16; distance; distance /= 2)
                sum[lane] += __shfl_down_sync(0xffffffffu, (unsigned long long)sum[lane], distance);
            if (threadIdx.x % 32 == 0 && sum[lane])
                atomicAdd(&sums[chunk * HASH_LANES + lane], (unsigned long long)sum[lane]);
        }
    }
}
