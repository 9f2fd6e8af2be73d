/* The hash that finds out which chunks of memory have changed: the same on a GPU (chunk_hash.cu), on the software GPU
 * and on the host (chunk_hash.c). limosa/parking/hashes.py says what it guarantees, and why.
 *
 * A chunk is words of 16 bytes. 32 rows of 8 words each are a tile, which lies in one piece, row after row; a column of
 * a tile is a strip. What is missing of the last tile counts as zero. In each of four lanes, with keys of its own:
 *
 *   v(strip)  = sum over its rows of  (w0 + k0) * (w1 + k1) + (w2 + k2) * (w3 + k3)     w, and in brackets: 32 bits
 *   sum       = a + l * bytes + sum over strips of  p * low(v) + q * high(v)            all modulo 2^64
 *   digest    = the upper 32 bits of each lane's sum, one after the other
 *
 * Sums may be taken in any order. k is of the row, p and q are of the strip, a and l are of the lane. */
#ifndef LIMOSA_CHUNK_HASH_H
#define LIMOSA_CHUNK_HASH_H

#include <stddef.h>
#include <stdint.h>

#define HASH_WORD 16
#define HASH_ROWS 32
#define HASH_COLUMNS 8
#define HASH_LANES 4
#define HASH_TILE (HASH_ROWS * HASH_COLUMNS * HASH_WORD)
#define HASH_MOST_CHUNK (64u << 20)

/* The table of keys: what a strip has comes last, as many as the largest chunk has. */
struct hash_strip {
    uint64_t low[HASH_LANES], high[HASH_LANES]; /* p, q */
};

struct hash_table {
    uint32_t rows[HASH_ROWS][HASH_LANES][HASH_WORD / 4]; /* k */
    uint64_t start[HASH_LANES], length[HASH_LANES]; /* a, l */
    struct hash_strip strips[];
};

/* What a launch of the kernel gets a table of. */
struct hash_chunk {
    uint64_t at, bytes;
};

/* Adds up the lanes of one chunk; bytes is a multiple of HASH_WORD. */
void chunk_hash_sums(const void *data, size_t bytes, const struct hash_table *table, uint64_t sums[HASH_LANES]);

#endif
