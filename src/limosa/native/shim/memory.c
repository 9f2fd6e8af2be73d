#include "memory.h"
#include "bulk.h"
#include "count.h"
#include "driver.h"
#include "fds.h"
#include "late.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t memory_one = PTHREAD_MUTEX_INITIALIZER;
static struct mapping **mappings; /* sorted by address */
static struct memory **memories; /* sorted by id */
static size_t n_mappings, n_memories, room_mappings, room_memories;
static uint64_t last_id, last_number;

/* What numbers of ours begin with: drivers give addresses of their own heap. */
#define GIVEN ((CUhandle)0x4c694d6f << 32)

bool memory_lock_until(const struct timespec *end)
{
    return !pthread_mutex_timedlock(&memory_one, end);
}

void memory_wait(pthread_cond_t *signal)
{
    pthread_cond_wait(signal, &memory_one);
}

void memory_in_child(void)
{
    pthread_mutex_init(&memory_one, NULL);
    n_memories = n_mappings = 0;
}

struct mapping *mapping_nth(size_t place)
{
    return place < n_mappings ? mappings[place] : NULL;
}

size_t mapping_place(CUdeviceptr address)
{
    size_t low = 0, high = n_mappings;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle]->at + mappings[middle]->bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct mapping *mapping_at(CUdeviceptr address)
{
    size_t place = mapping_place(address);

    return place < n_mappings && mappings[place]->at <= address ? mappings[place] : NULL;
}

struct mapping *mapping_of(const struct memory *memory, size_t *place)
{
    for (; *place < n_mappings; ++*place)
        if (mappings[*place]->memory == memory)
            return mappings[*place];
    return NULL;
}

/* Makes room for one more pointer in an array that grows. What it grew out of is not freed (as much again, at most): a
 * child that is forked at this moment may still read it. */
static bool room_for_one(void *array, size_t n, size_t *room)
{
    void **items;

    if (n < *room)
        return true;
    size_t more = *room ? 2 * *room : 256;
    items = malloc(more * sizeof *items);
    if (!items)
        return false;
    if (n)
        memcpy(items, *(void ***)array, n * sizeof *items);
    *(void ***)array = items;
    *room = more;
    return true;
}

bool mapping_add(struct mapping *mapping)
{
    size_t place = mapping_place(mapping->at);

    if (!room_for_one(&mappings, n_mappings, &room_mappings))
        return false;
    memmove(&mappings[place + 1], &mappings[place], (n_mappings - place) * sizeof *mappings);
    mappings[place] = mapping;
    mapping->number = ++last_number;
    n_mappings++;
    mapping->memory->mappings++;
    return true;
}

CUhandle mapping_remove(size_t place)
{
    struct mapping *mapping = mappings[place];

    late_taken(mapping);
    n_mappings--;
    memmove(&mappings[place], &mappings[place + 1], (n_mappings - place) * sizeof *mappings);
    mapping->memory->mappings--;
    CUhandle driver = memory_let_go(mapping->memory);
    free(mapping);
    return driver;
}

void mapping_take_away(size_t place)
{
    CUdeviceptr at = mappings[place]->at;
    size_t bytes = mappings[place]->bytes;
    void *event = mappings[place]->event;
    CUhandle driver = mapping_remove(place);

    memory_unlock();
    late_forget(event);
    real(cuMemUnmap)(at, bytes);
    memory_release(driver);
    real(cuMemAddressFree)(at, bytes);
    memory_lock();
}

static size_t memory_place(uint64_t id)
{
    size_t low = 0, high = n_memories;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memories[middle]->id >= id)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct memory *memory_nth(size_t place)
{
    return place < n_memories ? memories[place] : NULL;
}

size_t memory_count(void)
{
    return n_memories;
}

struct memory *memory_by_id(uint64_t id)
{
    struct memory *memory = memory_nth(memory_place(id));

    return memory && memory->id == id ? memory : NULL;
}

struct memory *memory_new(CUhandle driver, size_t bytes, const CUmemAllocationProp *asked)
{
    struct memory *memory = calloc(1, sizeof *memory);

    if (!memory || !room_for_one(&memories, n_memories, &room_memories)) {
        free(memory);
        return NULL;
    }
    memory->id = ++last_id;
    memory->driver = driver;
    memory->bytes = bytes;
    memory->asked = *asked;
    memory->kept = -1;
    memories[n_memories++] = memory; /* ids only grow */
    return memory;
}

CUhandle memory_given(const struct memory *memory)
{
    return GIVEN | memory->id;
}

struct memory *memory_of(CUhandle given)
{
    if ((given & ~(CUhandle)0xffffffff) != GIVEN)
        return NULL;
    struct memory *memory = memory_by_id(given & 0xffffffff);
    return memory && memory->references ? memory : NULL;
}

/* Made by another process, or let go of and taken back: the driver saves it and cannot restore it (measured). */
static bool is_imported(const struct memory *memory)
{
    return memory->driver && (memory->kept >= 0 || memory->owner);
}

void memory_guard(void)
{
    bool needed = false;

    for (size_t i = 0; i < n_memories && !needed; i++)
        needed = is_imported(memories[i]);
    bulk_guard(needed);
}

CUhandle memory_let_go(struct memory *memory)
{
    CUhandle driver = memory->driver;

    if (memory->references || memory->mappings)
        return 0;
    if (memory->kept >= 0)
        fds_close(memory->kept);
    free(memory->sharers);
    size_t place = memory_place(memory->id);
    n_memories--;
    memmove(&memories[place], &memories[place + 1], (n_memories - place) * sizeof *memories);
    free(memory);
    return driver;
}

void memory_release(CUhandle driver)
{
    if (!driver)
        return;
    real(cuMemRelease)(driver);
    if (bulk_guarded()) { /* it may have been the last that is imported */
        memory_lock();
        memory_guard();
        memory_unlock();
    }
}

void memory_stays(struct memory *memory, enum left cause)
{
    if (!memory->shared)
        memory->cause = (unsigned char)cause;
    memory->shared = true;
}

bool memory_show_to(struct mapping *mapping, int device)
{
    CUmemAccessDesc one = {{LOCATION_DEVICE, device}, ACCESS_READWRITE};

    return mapping->shown[device] = !real(cuMemSetAccess)(mapping->at, mapping->bytes, &one, 1);
}

CUresult memory_show(struct mapping *mapping)
{
    CUmemAccessDesc all[MAX_DEVICES];
    size_t n = 0;

    for (int device = 0; device < MAX_DEVICES; device++)
        if (mapping->access[device])
            all[n++] = (CUmemAccessDesc){{LOCATION_DEVICE, device}, mapping->access[device]};
    CUresult result = n ? real(cuMemSetAccess)(mapping->at, mapping->bytes, all, n) : CUDA_SUCCESS;
    for (int device = 0; !result && device < MAX_DEVICES; device++)
        if (mapping->shown[device]) /* GPUs that cannot reach one another, after a move: the next copy asks again */
            memory_show_to(mapping, device);
    return result;
}
