/* Where device memory lies in a process, and blocks of it: what memory.c and vmm.c share.
 *
 * Everything here is called with driver.mutex held: fork takes it too, so that no child is born between a mapping and
 * its MADV_DONTFORK (a child that held a block would keep its memory from everybody).
 */
#ifndef LIMOSA_BLOCK_H
#define LIMOSA_BLOCK_H

#include "driver.h" // IWYU pragma: export

/* Addresses. A piece of address space is reserved (inaccessible) or holds memory; it is ours until space_give. */
CUdeviceptr space_take(size_t bytes, size_t alignment, CUdeviceptr hint); /* 0: none left */
void space_give(CUdeviceptr address, size_t bytes);
/* Whether an address can only be ours: what is not found there is nothing, not host memory. */
bool space_ours(CUdeviceptr address);

/* Take a new block and map it at an address that is reserved (0: map nothing, hold it by *holder). 0 or -errno. */
int block_take(int gpu, size_t bytes, enum node_kind kind, CUdeviceptr address, uint64_t *id, void **holder);
/* Map a block, by a descriptor or by its id while somebody holds it. 0 or -errno. */
int block_map_fd(int fd, size_t bytes, CUdeviceptr address, int protection);
int block_map(uint64_t id, size_t bytes, CUdeviceptr address, int protection);
/* Keep a block alive without a descriptor: the holder, NULL with errno. Let go (ours: we have made it): */
void *block_hold(int fd);
void block_let_go(void *holder, uint64_t id, bool ours);
/* A new descriptor of a block that somebody holds, -errno. It holds the block as well. */
int block_open(uint64_t id);
/* Put an inaccessible reservation where a block was mapped. */
void block_unmap(CUdeviceptr address, size_t bytes, uint64_t id);

#define HOLDER_BYTES 4096

/* What the CUresult of a block's -errno is. */
CUresult block_result(int error);

static inline size_t round_up(size_t value, size_t to)
{
    return (value + to - 1) / to * to;
}

/* The device's ordinal, as the application counts, of a GPU of the node; -1 where it does not see that GPU. */
int ordinal_of_gpu(int gpu);

/* ------------------------------------------------------------------------------------ what vmm.c tells memory.c --- */

struct vmm_place {
    CUdeviceptr reserved; /* the reservation */
    size_t reserved_bytes;
    CUdeviceptr start; /* the mapping; 0 where nothing is mapped */
    size_t bytes;
    int ordinal;
    unsigned access[NODE_MAX_GPUS]; /* CUmemAccess_flags by ordinal */
    unsigned handle_types;
    unsigned long long buffer_id;
};
/* driver.mutex held. False where the address lies in no reservation. */
bool vmm_find(CUdeviceptr address, struct vmm_place *found);

/* A number that no other allocation of this process has had. driver.mutex held. */
unsigned long long buffer_id_next(void);

#endif
