/* What vmm.c and vmm_saved.c share: what there is of virtual memory. All of it is guarded by driver.mutex. */
#ifndef LIMOSA_VMM_H
#define LIMOSA_VMM_H

#include "block.h" // IWYU pragma: export

/* Things with an address, sorted by it. */
struct piece {
    CUdeviceptr start;
    size_t bytes;
};

struct table {
    struct piece **items;
    size_t n, room;
};

struct memory {
    CUmemGenericAllocationHandle handle;
    int references, mappings;
    uint64_t block, before; /* the block; the one that it was at the last checkpoint */
    void *holder; /* keeps the block; NULL while the process is checkpointed */
    int ordinal;
    size_t bytes;
    CUmemAllocationProp prop;
    bool imported;
};

struct mapping {
    struct piece piece;
    struct memory *memory;
    unsigned access[NODE_MAX_GPUS]; /* CUmemAccess_flags by ordinal */
    unsigned long long buffer_id;
};

extern struct table vmm_reservations, vmm_mappings;
extern struct memory **vmm_memories; /* sorted by handle */
extern size_t vmm_n_memories;

/* The first memory whose handle is not smaller. */
size_t vmm_memory_place(CUmemGenericAllocationHandle handle);
/* The CPU's right to a mapping (PROT_*). */
int vmm_protection(const struct mapping *mapping);

#endif
