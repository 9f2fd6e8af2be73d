/* The device memory that the shim looks after: what the application asked cuMemAlloc for (large pieces), and what it
 * makes itself with the virtual memory calls.
 *
 * A memory is what cuMemCreate makes; a mapping is where it can be seen. The application holds a number of ours instead
 * of the driver's handle, because the driver's changes each time the memory has been away.
 *
 * memory_lock() guards all of it. An application's thread takes it only inside the gate, so whoever has closed the gate
 * has it to himself. It is not held across a call of the driver that may wait (cuMemSetAccess, when peer access
 * begins or ends and when a copy is to reach another GPU, is the one exception): a process that the driver has locked still answers. */
#ifndef LIMOSA_MEMORY_H
#define LIMOSA_MEMORY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "count.h"
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

extern pthread_mutex_t memory_one; /* for the functions here alone: calls that free pass it */
static inline void memory_lock(void)
{
    pthread_mutex_lock(&memory_one);
}
static inline void memory_unlock(void)
{
    pthread_mutex_unlock(&memory_one);
}
bool memory_lock_until(const struct timespec *end); /* by the clock of CLOCK_REALTIME; false where it is too late */
void memory_wait(pthread_cond_t *signal); /* with the lock held: lets go of it meanwhile */
void memory_in_child(void); /* after fork: the lock is nobody's, the tables are empty */

/* Mappings, by their place: sorted by address. All of these with memory_lock held, or with the gate closed. */
struct mapping *mapping_nth(size_t place); /* NULL behind the last */
struct mapping *mapping_at(CUdeviceptr address); /* the one that has this byte */
size_t mapping_place(CUdeviceptr address); /* of the first that ends behind it */
/* The first of a memory from a place on, which becomes its own; NULL where there is none any more. */
struct mapping *mapping_of(const struct memory *memory, size_t *place);
bool mapping_add(struct mapping *mapping);
/* Frees it, and its memory where nothing else holds it: then a handle of the driver's comes back, which the caller
 * releases without memory_lock; else 0. */
CUhandle mapping_remove(size_t place);
/* Takes a mapping of ours away, letting go of the lock for the driver's part: places are others after. The address is
 * nobody else's until the last call. */
void mapping_take_away(size_t place);

/* Memories: sorted by id. Likewise. */
struct memory *memory_nth(size_t place); /* NULL behind the last */
size_t memory_count(void);
struct memory *memory_by_id(uint64_t id);
struct memory *memory_new(CUhandle driver, size_t bytes, const CUmemAllocationProp *asked);
struct memory *memory_of(CUhandle given);
CUhandle memory_given(const struct memory *memory);
CUhandle memory_let_go(struct memory *memory); /* as mapping_remove, where neither handle nor mapping is left */
void memory_release(CUhandle driver); /* what has come back so; without memory_lock */
void memory_stays(struct memory *memory, enum left cause); /* somebody whom we do not know has it */
/* After what is imported has come or gone: while there is any, checkpoints are refused (bulk.h). Before it comes:
 * bulk_guard(true). */
void memory_guard(void);
CUresult memory_show(struct mapping *mapping); /* cuMemSetAccess as recorded */
bool memory_show_to(struct mapping *mapping, int device); /* likewise, to one more, for a copy */

#endif
