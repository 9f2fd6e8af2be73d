/* The table of everything that has an address, and how allocations are cut out of blocks of device memory. */
#include "memory.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNIT ((size_t)512)              /* what every address of device memory is a multiple of */
#define SHARED_BYTES NODE_GRANULARITY   /* of a block that small allocations share */
#define SHARED_LIMIT (SHARED_BYTES / 2) /* larger ones have blocks of their own */
#define UNITS (SHARED_BYTES / UNIT)

struct block *blocks;
struct allocation **allocations;
size_t n_allocations;
static size_t room_allocations;

/* ------------------------------------------------------------------------------------------------ the table --- */

/* The first allocation that ends after an address. */
static size_t place_of(CUdeviceptr address)
{
    size_t low = 0, high = n_allocations;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle]->start + allocations[middle]->bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct allocation *allocation_at(CUdeviceptr address)
{
    return allocation_in(address, 1);
}

struct allocation *allocation_in(CUdeviceptr address, size_t bytes)
{
    size_t place = place_of(address);

    return place < n_allocations && allocations[place]->start < address + bytes ? allocations[place] : NULL;
}

unsigned long long buffer_id_next(void)
{
    static unsigned long long last;

    return ++last;
}

struct allocation *allocation_add(enum memory_kind kind, CUdeviceptr start, size_t bytes)
{
    size_t place = place_of(start);
    struct allocation *made;

    if (n_allocations == room_allocations) {
        size_t room = room_allocations ? 2 * room_allocations : 64;
        struct allocation **more = realloc(allocations, room * sizeof(struct allocation *));
        if (!more)
            return NULL;
        allocations = more;
        room_allocations = room;
    }
    made = calloc(1, sizeof(*made));
    if (!made)
        return NULL;
    made->kind = kind;
    made->start = start;
    made->bytes = bytes;
    made->ordinal = -1;
    made->buffer_id = buffer_id_next();
    memmove(&allocations[place + 1], &allocations[place], (n_allocations - place) * sizeof(struct allocation *));
    allocations[place] = made;
    n_allocations++;
    return made;
}

void allocation_remove(struct allocation *allocation)
{
    size_t place = place_of(allocation->start);

    n_allocations--;
    memmove(&allocations[place], &allocations[place + 1], (n_allocations - place) * sizeof(struct allocation *));
    free(allocation);
}

/* ------------------------------------------------------------------------------------------------------ blocks --- */

static bool unit_taken(const struct block *block, size_t unit)
{
    return block->units[unit / 64] >> unit % 64 & 1;
}

static void units_mark(struct block *block, size_t first, size_t n, bool taken)
{
    for (size_t unit = first; unit < first + n; unit++) {
        uint64_t bit = (uint64_t)1 << unit % 64;
        block->units[unit / 64] = taken ? block->units[unit / 64] | bit : block->units[unit / 64] & ~bit;
    }
}

/* The first run of n free units, UNITS where there is none. */
static size_t units_find(const struct block *block, size_t n)
{
    size_t run = 0;

    for (size_t unit = 0; unit < UNITS; unit++) {
        if (unit % 64 == 0 && block->units[unit / 64] == UINT64_MAX) {
            run = 0;
            unit += 63;
            continue;
        }
        run = unit_taken(block, unit) ? 0 : run + 1;
        if (run == n)
            return unit + 1 - n;
    }
    return UNITS;
}

static int block_create(size_t bytes, bool shared, int ordinal, struct context *context, CUmemoryPool pool,
                        struct block **made)
{
    struct block *block = calloc(1, sizeof(*block));
    int error = -ENOMEM;

    if (!block)
        return -ENOMEM;
    block->units = shared ? calloc(UNITS / 64, sizeof(uint64_t)) : NULL;
    block->bytes = bytes;
    block->ordinal = ordinal;
    block->context = pool ? NULL : context;
    block->pool = pool;
    if (!shared || block->units)
        block->address = space_take(bytes, NODE_GRANULARITY, 0);
    if (block->address) {
        error = block_take(driver.devices[ordinal], bytes, NODE_PLAIN, block->address, &block->id, NULL);
        if (!error) {
            block->next = blocks;
            blocks = block;
            if (pool)
                pool_grown(pool, bytes);
            *made = block;
            return 0;
        }
        space_give(block->address, bytes);
    }
    free(block->units);
    free(block);
    return error;
}

void block_destroy(struct block *block)
{
    for (struct block **at = &blocks; *at; at = &(*at)->next)
        if (*at == block) {
            *at = block->next;
            break;
        }
    space_give(block->address, block->bytes);
    if (!block->away)
        node_dropped(block->id, false);
    if (block->pool)
        pool_shrunk(block->pool, block->bytes);
    free(block->units);
    free(block);
}

/* A block that has room already: a shared one, or one that a pool has kept. */
static struct block *block_with_room(size_t bytes, int ordinal, struct context *context, CUmemoryPool pool,
                                     size_t *offset)
{
    struct block *best = NULL;
    bool small = bytes <= SHARED_LIMIT;

    *offset = 0;
    for (struct block *block = blocks; block; block = block->next) {
        if (block->ordinal != ordinal || block->pool != pool || (!pool && block->context != context) || block->imported
            || small != (block->units != NULL))
            continue;
        if (small && block->used + bytes <= block->bytes) {
            size_t unit = units_find(block, bytes / UNIT);
            if (unit < UNITS) {
                *offset = unit * UNIT;
                return block;
            }
        }
        if (!small && !block->used && block->bytes >= bytes && (!best || block->bytes < best->bytes))
            best = block;
    }
    return best;
}

CUresult carve(enum memory_kind kind, size_t bytes, int ordinal, struct context *context, CUmemoryPool pool,
               struct allocation **made)
{
    size_t rounded = round_up(bytes, UNIT), offset;
    struct block *block;
    struct allocation *allocation;
    int error = 0;

    block = block_with_room(rounded, ordinal, context, pool, &offset);
    if (!block) {
        bool shared = rounded <= SHARED_LIMIT;
        size_t whole = shared ? SHARED_BYTES : round_up(bytes, NODE_GRANULARITY);

        if (pool && !pool_admits(pool, whole))
            return CUDA_ERROR_OUT_OF_MEMORY;
        error = block_create(whole, shared, ordinal, context, pool, &block);
        if (error == -ENOMEM && pools_trim(ordinal)) /* what pools keep is there for those who need it */
            error = block_create(whole, shared, ordinal, context, pool, &block);
    }
    if (error)
        return block_result(error);
    allocation = allocation_add(kind, block->address + offset, bytes);
    if (!allocation) {
        if (!block->used)
            block_destroy(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    allocation->ordinal = ordinal;
    allocation->context = context;
    allocation->block = block;
    block->used += rounded;
    if (block->units)
        units_mark(block, offset / UNIT, rounded / UNIT, true);
    if (pool)
        pool_used(pool, rounded);
    *made = allocation;
    return CUDA_SUCCESS;
}

void release(struct allocation *allocation)
{
    struct block *block = allocation->block;
    size_t rounded = round_up(allocation->bytes, UNIT);

    if (allocation->kind == MEMORY_MANAGED) {
        space_give(allocation->start, round_up(allocation->bytes, NODE_GRANULARITY));
    } else if (allocation->kind == MEMORY_IPC) {
        block_destroy(block);
    } else {
        CUmemoryPool pool = block->pool;

        block->used -= rounded;
        if (block->units)
            units_mark(block, (allocation->start - block->address) / UNIT, rounded / UNIT, false);
        if (!block->used && !pool)
            block_destroy(block);
        if (pool)
            pool_unused(pool, rounded);
    }
    allocation_remove(allocation);
}
