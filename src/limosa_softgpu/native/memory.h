/* The table of everything that has an address: what allocation.c, memory.c, pool.c, ipc.c and pointer.c share.
 *
 * Everything here is called with driver.mutex held.
 */
#ifndef LIMOSA_MEMORY_H
#define LIMOSA_MEMORY_H

#include "block.h" // IWYU pragma: export

/* Device memory taken from the node in one piece: one large allocation, or many small ones. */
struct block {
    struct block *next;
    CUdeviceptr address;
    size_t bytes;
    uint64_t id;
    int ordinal;
    struct context *context; /* whose memory; NULL: a pool's */
    CUmemoryPool pool;
    bool away;       /* the address is reserved, there is no memory behind it */
    bool imported;   /* another process's memory */
    size_t used;     /* bytes of its allocations */
    uint64_t *units; /* of a shared block: which of its 512 byte units are taken */
};

struct allocation {
    enum memory_kind kind;
    CUdeviceptr start;
    size_t bytes;            /* as asked for */
    int ordinal;             /* -1: host memory */
    struct context *context; /* the one current when it was made */
    struct block *block;     /* NULL: not device memory */
    unsigned flags;
    unsigned long long buffer_id;
    bool sync_memops;
    bool freeing; /* a thread is about to free it, or a stream will */
    int opens;    /* of imported memory */
};

/* All of them, sorted by address. */
extern struct allocation **allocations;
extern size_t n_allocations;

/* The allocation that holds an address, or NULL. */
struct allocation *allocation_at(CUdeviceptr address);
/* The first allocation that begins in a range, or that holds its start. */
struct allocation *allocation_in(CUdeviceptr address, size_t bytes);
struct allocation *allocation_add(enum memory_kind kind, CUdeviceptr start, size_t bytes);
void allocation_remove(struct allocation *allocation);

/* Device memory for one allocation, of a context or of a pool. */
CUresult carve(enum memory_kind kind, size_t bytes, int ordinal, struct context *context, CUmemoryPool pool,
               struct allocation **made);
/* Free an allocation of any kind but host memory. */
void release(struct allocation *allocation);
/* Give back what a block takes of the node and of the address space. It holds no allocation. */
void block_destroy(struct block *block);
extern struct block *blocks;

/* pool.c */
void pool_grown(CUmemoryPool pool, size_t bytes);
void pool_shrunk(CUmemoryPool pool, size_t bytes);
void pool_used(CUmemoryPool pool, size_t bytes);
/* An allocation of the pool was freed: give back what the pool is not to keep. */
void pool_unused(CUmemoryPool pool, size_t bytes);
/* Whether a pool may grow by so much. */
bool pool_admits(CUmemoryPool pool, size_t bytes);
/* Give back all that pools keep unused on a device (-1: any). True where there was any. */
bool pools_trim(int ordinal);
CUmemoryPool pool_of(const struct allocation *allocation);
void pools_forked(void);

#endif
