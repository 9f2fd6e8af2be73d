/* The device memory that the shim looks after: what the application asked cuMemAlloc for (large pieces), and what it
 * makes itself with the virtual memory calls.
 *
 * A memory is what cuMemCreate makes; a mapping is where it can be seen. The application holds a number of ours instead
 * of the driver's handle, because the driver's changes each time the memory has been away.
 *
 * memory_lock guards all of it. An application's thread takes it only inside the gate, so whoever has closed the gate
 * has it to himself. It is not held across a call of the driver that may wait (cuMemSetAccess, when peer access
 * begins or ends and when a copy is to reach another GPU, is the one exception): a process that the driver has locked still answers. */
#ifndef LIMOSA_MEMORY_H
#define LIMOSA_MEMORY_H

#include <pthread.h>
#include <stdbool.h>

#include "driver_api.h"

#define MAX_DEVICES 64
#define LARGE ((size_t)2 << 20) /* what is smaller stays with the driver: it is quick to copy, and wasteful to map */

struct memory {
    uint64_t id; /* never used twice */
    CUhandle driver; /* 0 while it is away */
    CUhandle made; /* while it is away: made anew for it, and not mapped yet */
    size_t bytes;
    CUmemAllocationProp asked; /* as the application asked for it */
    int references; /* handles that the application holds */
    int mappings;
    int kept; /* a descriptor of memory that was imported and cannot be exported again; -1 */
    bool shared; /* somebody whom we do not know was given it: stays where it is */
    unsigned char cause; /* enum left: why it stays */
    uint64_t share; /* not 0: several processes under the shim have it, all by this number */
    int owner; /* pid of the process that gave it to us; -1: nobody knows which; 0: it is our own */
    int *sharers; /* pids of those whom we gave it */
    size_t n_sharers;
};

struct mapping {
    CUdeviceptr at;
    uint64_t number; /* of this mapping, never used twice */
    size_t bytes, offset;
    struct memory *memory;
    unsigned char access[MAX_DEVICES];
    bool shown[MAX_DEVICES]; /* for a copy (reach.c), beside what was asked for: may be lost */
    bool away; /* unmapped by us: the application must not see that */
    bool plain; /* cuMemAlloc: the range is reserved by us */
    bool opened; /* by a legacy handle: the range is reserved by us, too */
    bool freeing; /* plain: the application has freed it; somebody waits for its work, and takes it away after */
    bool late; /* freeing: nobody waits; late.c takes it away */
    bool ordered; /* late: freed in the order of a stream */
    void *event; /* late: its work is over when this is; NULL: when that of its context is */
    CUcontext recorded; /* late: the event is of it */
    size_t asked; /* plain: bytes the application asked for */
    CUcontext context; /* plain, opened: goes with it */
    int times; /* opened */
};

/* What is left to the driver, by kind: pieces that there are now and their bytes. Of graphs and tables, whose end nobody
 * sees, the calls that were made. */
enum left {
    LEFT_SMALL,
    LEFT_POOL,
    LEFT_MANAGED,
    LEFT_FAILED, /* large, and the driver would not have it otherwise */
    LEFT_SHARED, /* exported, imported, seen by the processor: somebody else has it */
    LEFT_FOREIGN, /* virtual memory that is not a GPU's, or of a kind that cannot be exported */
    LEFT_ARRAY,
    LEFT_IPC, /* legacy handles of the driver's own, given and opened */
    LEFT_GRAPH, /* nodes that allocate */
    LEFT_TABLES, /* cuGetExportTable: what is called through them is not seen */
    LEFT_KINDS
};
struct counts {
    uint64_t calls[LEFT_KINDS], bytes[LEFT_KINDS];
};

extern pthread_mutex_t memory_lock;
extern struct mapping **mappings; /* sorted by address */
extern size_t n_mappings;
extern struct memory **memories; /* sorted by id */
extern size_t n_memories;
extern CUcontext *contexts; /* made by the application, beside the primary ones */
extern size_t n_contexts;

struct mapping *mapping_at(CUdeviceptr address); /* the one that has this byte */
size_t mapping_place(CUdeviceptr address); /* the first that ends behind it */
bool mapping_add(struct mapping *mapping);
void late_taken(struct mapping *mapping); /* late.c: it is not among those that wait any longer */
/* Frees it, and its memory where nothing else holds it: then a handle of the driver's comes back, which the caller
 * releases without memory_lock; else 0. */
CUhandle mapping_remove(size_t place);
struct memory *memory_new(CUhandle driver, size_t bytes, const CUmemAllocationProp *asked);
struct memory *memory_of(CUhandle given);
CUhandle memory_given(const struct memory *memory);
CUhandle memory_let_go(struct memory *memory); /* likewise, where neither handle nor mapping is left */
void memory_release(CUhandle driver); /* what has come back so; without memory_lock */
void memory_stays(struct memory *memory, enum left cause); /* somebody whom we do not know has it */
/* With memory_lock held, after what is imported has come or gone: while there is any, checkpoints are refused (bulk.h).
 * Before it comes: bulk_guard(true). */
void memory_guard(void);
CUresult memory_show(struct mapping *mapping); /* cuMemSetAccess as recorded */
bool memory_show_to(struct mapping *mapping, int device); /* likewise, to one more, for a copy */
/* With memory_lock held. Takes a mapping of ours away, letting go of the lock for the driver's part: places are others
 * after. The address is nobody else's until the last call. */
void mapping_take_away(size_t place);
/* What is left to the driver, by its address or handle; these take locks of their own, for a few instructions. */
void left_add(enum left kind, uint64_t key, size_t bytes, CUcontext context);
struct left_piece *left_take(uint64_t key); /* it is about to be freed: NULL, or for one of the next two */
void left_gone(struct left_piece *piece);
void left_again(struct left_piece *piece); /* it was not freed */
void left_call(enum left kind);
void left_context_gone(CUcontext context);
void left_begin_again(void); /* in a child after fork */
void left_counts(struct counts *counts); /* with memory_lock held */
bool ipc_is_ours(uint64_t token); /* whether a handle with it was made by this process */
void ipc_begin_again(void); /* in a child after fork */
CUcontext context_owner(CUcontext current, CUdevice device); /* contexts.c: whose memory is made there */
bool context_ending(CUcontext context); /* with memory_lock held: some thread is about to destroy it */
void contexts_in_child(void); /* after fork */
void peers_context_gone(CUcontext context); /* plain.c; with memory_lock held */
bool shim_ready(void); /* whether memory is to be taken over at all */

#endif
