/* Memories and mappings that many threads make, look for and let go of at once: memory.c alone, with what it wants of
 * others. */
#include "bulk.h"
#include "driver.h"
#include "fds.h"
#include "late.h"
#include "memory.h"
#include "threads.h"

#define EACH 100 /* mappings of a thread: all of them together are more than the first table has room for */
#define PIECE ((size_t)2 << 20)

static _Atomic uint64_t made, released, unmapped;

static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    atomic_fetch_add(&unmapped, 1);
    return 0;
}
static CUresult address_free(CUdeviceptr at, size_t bytes)
{
    return 0;
}
static CUresult release(CUhandle handle)
{
    atomic_fetch_add(&released, 1);
    return 0;
}
static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *all, size_t n)
{
    expect(n >= 1 && all[0].location.type == LOCATION_DEVICE);
    return 0;
}
void *real_functions[REAL_FUNCTIONS];
void late_taken(struct mapping *mapping)
{
}
void late_forget(void *event)
{
}
void bulk_guard(bool needed)
{
}
bool bulk_guarded(void)
{
    return true; /* so whoever lets go of memory looks through all of it */
}
void fds_close(int fd)
{
}

/* With the lock: everything is where it is looked for. */
static void look(CUdeviceptr at, uint64_t id)
{
    size_t place = mapping_place(at + 5), first = 0;
    struct mapping *mapping = mapping_nth(place), *next = mapping_nth(place + 1);

    expect(mapping && mapping->at == at && mapping == mapping_at(at + PIECE - 1));
    expect(!next || next->at >= at + PIECE);
    expect(memory_by_id(id) == mapping->memory && mapping->memory->id == id);
    expect(memory_of(memory_given(mapping->memory)) == (mapping->memory->references ? mapping->memory : NULL));
    if (any(20) == 0)
        expect(mapping_of(mapping->memory, &first) == mapping && first == place);
}

static uint64_t make(CUdeviceptr at)
{
    struct mapping *mapping = calloc(1, sizeof *mapping);
    CUmemAllocationProp prop = {.type = ALLOCATION_PINNED};

    *mapping = (struct mapping){.at = at, .bytes = PIECE, .plain = true};
    mapping->access[any(MAX_DEVICES)] = ACCESS_READWRITE;
    mapping->shown[any(MAX_DEVICES)] = true;
    memory_lock();
    mapping->memory = memory_new(1000 + atomic_fetch_add(&made, 1), PIECE, &prop);
    mapping->memory->references = any(2); /* the program may have a handle of it, too */
    expect(mapping_add(mapping));
    expect(!memory_show(mapping));
    uint64_t id = mapping->memory->id;
    look(at, id);
    memory_unlock();
    return id;
}

static void let_go(CUdeviceptr at, uint64_t id)
{
    CUhandle driver = 0;

    memory_lock();
    struct memory *memory = memory_by_id(id);
    bool held = memory->references;
    if (any(2)) {
        driver = mapping_remove(mapping_place(at));
        expect(!held == !!driver);
    } else {
        mapping_take_away(mapping_place(at));
    }
    if (held) {
        memory->references--;
        driver = memory_let_go(memory);
        expect(driver != 0);
    }
    memory_unlock();
    memory_release(driver);
}

static void *work(void *data)
{
    intptr_t me = (intptr_t)data;
    uint64_t ids[EACH] = {0};

    chance = 1 + me;
    while (!over) {
        unsigned i = any(EACH);
        CUdeviceptr at = (1 + (CUdeviceptr)i * THREADS + me) * PIECE;
        if (!ids[i]) {
            ids[i] = make(at);
        } else if (any(2)) {
            let_go(at, ids[i]);
            ids[i] = 0;
        } else {
            memory_lock();
            look(at, ids[i]);
            memory_unlock();
        }
        atomic_fetch_add(&turns, 1);
    }
    for (unsigned i = 0; i < EACH; i++)
        if (ids[i])
            let_go((1 + (CUdeviceptr)i * THREADS + me) * PIECE, ids[i]);
    return NULL;
}

static void count(void)
{
    const struct mapping *mapping, *before = NULL;

    memory_lock();
    for (size_t i = 0; (mapping = mapping_nth(i)); before = mapping, i++)
        expect(!before || before->at + before->bytes <= mapping->at);
    expect(!memory_nth(memory_count()));
    memory_unlock();
    usleep(100);
}

static void at_the_end(void)
{
    expect(!mapping_nth(0) && !memory_count());
    expect(made == released);
    memory_in_child();
}

int main(int argc, char **argv)
{
    real_functions[REAL_cuMemUnmap] = unmap;
    real_functions[REAL_cuMemAddressFree] = address_free;
    real_functions[REAL_cuMemRelease] = release;
    real_functions[REAL_cuMemSetAccess] = set_access;
    return run_threads(work, count, at_the_end, atoi(argv[argc - 1]));
}
