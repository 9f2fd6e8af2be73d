/* The hash of chunks on the host and on the software GPU (chunk_hash.h). */
#include "chunk_hash.h"

#include <stdint.h>
#include <string.h>

#ifdef HASH_LIBRARY /* else it is a part of another library, and nobody else's */
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif
#define ELEMENTS (HASH_COLUMNS * 2) /* a row in pieces of 64 bits: the two of a word are added up at the end */

typedef void tile_function(const unsigned char *data, const struct hash_table *table, uint64_t v[HASH_LANES][ELEMENTS]);

static void tile_plain(const unsigned char *data, const struct hash_table *table, uint64_t v[HASH_LANES][ELEMENTS])
{
    for (int row = 0; row < HASH_ROWS; row++) {
        uint32_t words[ELEMENTS * 2];
        memcpy(words, data + row * sizeof words, sizeof words);
        for (int lane = 0; lane < HASH_LANES; lane++) {
            const uint32_t *k = table->rows[row][lane];
            for (int i = 0; i < ELEMENTS; i++) {
                uint32_t first = words[2 * i] + k[2 * i % 4], second = words[2 * i + 1] + k[2 * i % 4 + 1];
                v[lane][i] += (uint64_t)first * second;
            }
        }
    }
}

#if defined(__x86_64__) && !defined(__TINYC__)
#include <immintrin.h>

#define AHEAD (2 * HASH_TILE)

/* STEP vectors of a row at a time: the sums of all lanes stay in registers. */
/* NOLINTBEGIN(bugprone-macro-parentheses): a type and the names of functions, which brackets would make something else. */
#define TILE_FUNCTION(name, isa, vector, STEP, load, store, spread, add32, add64, multiply, upper)                     \
    __attribute__((target(isa))) static void name(const unsigned char *data, const struct hash_table *table,           \
                                                  uint64_t v[HASH_LANES][ELEMENTS])                                    \
    {                                                                                                                  \
        enum { EACH = sizeof(vector) / 8 };                                                                            \
        for (int begin = 0; begin < ELEMENTS; begin += STEP * EACH) {                                                  \
            vector sum[HASH_LANES][STEP];                                                                              \
            memset(sum, 0, sizeof sum);                                                                                \
            for (int row = 0; row < HASH_ROWS; row++) {                                                                \
                if (begin == 0) /* a processor does not look ahead into the next page by itself */                     \
                    for (int line = 0; line < 128; line += 64)                                                         \
                        __builtin_prefetch(data + AHEAD + row * 128 + line, 0, 0);                                     \
                vector words[STEP];                                                                                    \
                for (int i = 0; i < STEP; i++)                                                                         \
                    words[i] = load((const void *)(data + row * ELEMENTS * 8 + begin * 8 + i * sizeof(vector)));       \
                for (int lane = 0; lane < HASH_LANES; lane++) {                                                        \
                    vector key = spread(_mm_loadu_si128((const void *)table->rows[row][lane]));                        \
                    for (int i = 0; i < STEP; i++) {                                                                   \
                        vector x = add32(words[i], key);                                                               \
                        sum[lane][i] = add64(sum[lane][i], multiply(x, upper(x)));                                     \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            for (int lane = 0; lane < HASH_LANES; lane++)                                                              \
                for (int i = 0; i < STEP; i++)                                                                         \
                    store((void *)&v[lane][begin + i * EACH], sum[lane][i]);                                           \
        }                                                                                                              \
    }
/* NOLINTEND(bugprone-macro-parentheses) */

/* The upper half of each 64 bits into its lower one: a shuffle, as shifts share the multiplications' unit. */
#define UPPER_128(x) _mm_shuffle_epi32(x, 0xf5)
#define UPPER_256(x) _mm256_shuffle_epi32(x, 0xf5)
#define UPPER_512(x) _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xf5)

TILE_FUNCTION(tile_sse2, "sse2", __m128i, 2, _mm_loadu_si128, _mm_storeu_si128, (__m128i), _mm_add_epi32, _mm_add_epi64,
              _mm_mul_epu32, UPPER_128)
TILE_FUNCTION(tile_avx2, "avx2", __m256i, 2, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_broadcastsi128_si256,
              _mm256_add_epi32, _mm256_add_epi64, _mm256_mul_epu32, UPPER_256)
TILE_FUNCTION(tile_avx512, "avx512f", __m512i, 2, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_broadcast_i32x4,
              _mm512_add_epi32, _mm512_add_epi64, _mm512_mul_epu32, UPPER_512)

static tile_function *choose(int most)
{
    if (most >= 3 && __builtin_cpu_supports("avx512f"))
        return tile_avx512;
    if (most >= 2 && __builtin_cpu_supports("avx2"))
        return tile_avx2;
    return most >= 1 ? tile_sse2 : tile_plain;
}
#else
static tile_function *choose(int most)
{
    (void)most;
    return tile_plain;
}
#endif

static void add_tile(const unsigned char *data, const struct hash_table *table, size_t tile, tile_function *function,
                     uint64_t sums[HASH_LANES])
{
    uint64_t v[HASH_LANES][ELEMENTS] = {{0}};
    const struct hash_strip *strips = table->strips + tile * HASH_COLUMNS;
    function(data, table, v);
    for (int lane = 0; lane < HASH_LANES; lane++)
        for (int column = 0; column < HASH_COLUMNS; column++) {
            uint64_t value = v[lane][2 * column] + v[lane][2 * column + 1];
            sums[lane] += strips[column].low[lane] * (uint32_t)value + strips[column].high[lane] * (value >> 32);
        }
}

static void add_up(const unsigned char *data, size_t bytes, const struct hash_table *table, tile_function *function,
                   uint64_t sums[HASH_LANES])
{
    for (int lane = 0; lane < HASH_LANES; lane++)
        sums[lane] = table->start[lane] + table->length[lane] * bytes;
    for (size_t tile = 0; tile < bytes / HASH_TILE; tile++)
        add_tile(data + tile * HASH_TILE, table, tile, function, sums);
    if (bytes % HASH_TILE) {
        unsigned char last[HASH_TILE] = {0};
        memcpy(last, data + bytes / HASH_TILE * HASH_TILE, bytes % HASH_TILE);
        add_tile(last, table, bytes / HASH_TILE, function, sums);
    }
}

void chunk_hash_sums(const void *data, size_t bytes, const struct hash_table *table, uint64_t sums[HASH_LANES])
{
    add_up(data, bytes, table, choose(3), sums);
}

/* Digests of consecutive chunks, the last one shorter. `most` is for tests: how new a processor may be used. */
EXPORT void limosa_chunk_hash(const void *data, uint64_t bytes, uint64_t chunk, const void *table, uint8_t *digests,
                              int most)
{
    tile_function *function = choose(most);
    for (const unsigned char *at = data, *end = at + bytes; at < end; at += chunk, digests += HASH_LANES * 4) {
        uint64_t sums[HASH_LANES], left = (uint64_t)(end - at);
        add_up(at, left < chunk ? left : chunk, table, function, sums);
        for (int lane = 0; lane < HASH_LANES; lane++)
            memcpy(digests + lane * 4, &(uint32_t){(uint32_t)(sums[lane] >> 32)}, 4);
    }
}
