/* Memory that is freed during captures and in the order of streams by many threads, while contexts end and the gate is
 * closed: late.c, memory.c and gate.c, with a driver whose events are memory of their own, so that none is used after its
 * end, or forgotten. */
#include "bulk.h"
#include "capture.h"
#include "contexts.h"
#include "driver.h"
#include "fds.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "memory.h"
#include "threads.h"

#define CONTEXTS 3
#define EACH 60
#define PIECE ((size_t)2 << 20)

struct event {
    struct event *next;
    CUcontext context;
    _Atomic int done;
};
static struct context {
    pthread_rwlock_t used; /* a program does not destroy a context that it is about to use */
    bool ending; /* with memory_lock */
    struct event *events; /* with the driver's lock */
} all_contexts[CONTEXTS];
static pthread_mutex_t drivers = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local CUcontext now;
static _Atomic int captured;
static _Atomic uint64_t made, released;

static CUresult event_create(void **event, unsigned flags)
{
    struct event *new = calloc(1, sizeof *new);
    struct context *context = now;

    new->context = now;
    pthread_mutex_lock(&drivers);
    new->next = context->events;
    context->events = new;
    pthread_mutex_unlock(&drivers);
    *event = new;
    return 0;
}
static CUresult event_destroy(void *data)
{
    struct event *event = data;
    struct context *context = event->context;

    pthread_mutex_lock(&drivers);
    struct event **at = &context->events;
    while (*at && *at != event)
        at = &(*at)->next;
    expect(*at == event);
    if (*at)
        *at = event->next;
    pthread_mutex_unlock(&drivers);
    free(event);
    return 0;
}
static CUresult event_query(void *data)
{
    struct event *event = data;

    if (any(3) == 0)
        atomic_store(&event->done, 1);
    return atomic_load(&event->done) ? 0 : CUDA_ERROR_NOT_READY;
}
static CUresult event_synchronize(void *data)
{
    atomic_store(&((struct event *)data)->done, 1);
    return 0;
}
static CUresult event_record(void *event, void *stream)
{
    atomic_store(&((struct event *)event)->done, 0);
    return 0;
}
static CUresult context_record(CUcontext context, void *event)
{
    atomic_store(&((struct event *)event)->done, 0);
    return any(10) == 0; /* now and then it cannot */
}
static CUresult stream_context(void *stream, CUcontext *context)
{
    *context = stream; /* a stream is its context */
    return 0;
}
static CUresult is_capturing(void *stream, int *status)
{
    return 0;
}
static CUresult get_current(CUcontext *context)
{
    *context = now;
    return 0;
}
static CUresult set_current(CUcontext context)
{
    now = context;
    return 0;
}
static CUresult synchronize(void)
{
    return 0;
}
static CUresult exchange_mode(int *mode)
{
    return 0;
}
static CUresult unmap(CUdeviceptr at, size_t bytes)
{
    return 0;
}
static CUresult release(CUhandle handle)
{
    atomic_fetch_add(&released, 1);
    return 0;
}

void *real_functions[REAL_FUNCTIONS];
void *entry_real(int place)
{
    switch (place) {
    case AT_cuEventCreate: return event_create;
    case AT_cuEventDestroy_v2: return event_destroy;
    case AT_cuEventQuery: return event_query;
    case AT_cuEventSynchronize: return event_synchronize;
    case AT_cuEventRecord: return event_record;
    case AT_cuCtxRecordEvent: return context_record;
    case AT_cuStreamGetCtx: return stream_context;
    case AT_cuStreamIsCapturing: return is_capturing;
    default: return NULL;
    }
}
void *entry_known(int place)
{
    return entry_real(place);
}
bool capture_any(void)
{
    return captured;
}
void capture_thread_ends(const struct reader *reader)
{
}
bool context_ending(CUcontext context)
{
    return context && ((struct context *)context)->ending;
}
void bulk_guard(bool needed)
{
}
bool bulk_guarded(void)
{
    return false;
}
void fds_close(int fd)
{
}

/* As contexts.c does. */
static void end_context(struct context *context)
{
    pthread_rwlock_wrlock(&context->used);
    memory_lock();
    context->ending = true;
    late_nobody_looks(context);
    memory_unlock();
    pthread_mutex_lock(&drivers); /* its events go with it */
    for (struct event *event; (event = context->events);) {
        context->events = event->next;
        free(event);
    }
    pthread_mutex_unlock(&drivers);
    memory_lock();
    late_context_gone(context);
    context->ending = false;
    memory_unlock();
    pthread_rwlock_unlock(&context->used);
}

static void make(CUdeviceptr at, struct context *context)
{
    struct mapping *mapping = calloc(1, sizeof *mapping);
    CUmemAllocationProp prop = {.type = ALLOCATION_PINNED};

    *mapping = (struct mapping){.at = at, .bytes = PIECE, .plain = true, .context = context};
    memory_lock();
    mapping->memory = memory_new(1000 + atomic_fetch_add(&made, 1), PIECE, &prop);
    expect(mapping_add(mapping));
    memory_unlock();
}

/* As plain.c does. */
static void let_go(CUdeviceptr at, struct context *context, bool ordered)
{
    CUcontext recorded = NULL;
    void *event = NULL;

    pthread_rwlock_rdlock(&context->used);
    set_current(context);
    memory_lock();
    mapping_at(at)->freeing = true;
    memory_unlock();
    if (ordered)
        expect(!late_record(context, false, &event, &recorded) && event && recorded == context);
    memory_lock();
    late_add(mapping_at(at), event, recorded, ordered);
    memory_unlock();
    pthread_rwlock_unlock(&context->used);
}

static bool there(CUdeviceptr at)
{
    memory_lock();
    bool found = mapping_at(at) != NULL;
    memory_unlock();
    return found;
}

static void *work(void *data)
{
    intptr_t me = (intptr_t)data;
    enum { NONE, MADE, FREED } state[EACH] = {0};

    chance = 1 + me;
    while (!over) {
        unsigned i = any(EACH);
        CUdeviceptr at = (1 + (CUdeviceptr)i * THREADS + me) * PIECE;
        struct context *context = &all_contexts[i % CONTEXTS];
        struct reader *reader = gate_enter();
        if (state[i] == FREED && !there(at))
            state[i] = NONE;
        if (state[i] == NONE) {
            make(at, context);
            state[i] = MADE;
        } else if (state[i] == MADE) {
            let_go(at, context, any(2));
            state[i] = FREED;
        }
        unsigned wait = any(40);
        late_free(wait ? (wait < 30 ? LATE_LOOK : LATE_MARK) : any(2) ? LATE_FREED : LATE_ALL);
        if (any(60) == 0)
            end_context(&all_contexts[any(CONTEXTS)]);
        gate_leave(reader);
        atomic_fetch_add(&turns, 1);
    }
    for (unsigned i = 0; i < EACH; i++)
        if (state[i] == MADE)
            let_go((1 + (CUdeviceptr)i * THREADS + me) * PIECE, &all_contexts[i % CONTEXTS], false);
    return NULL;
}

/* Captures come and go; with the gate closed the device is at rest. */
static void meanwhile(void)
{
    const struct mapping *mapping;

    captured = any(2);
    usleep(300);
    captured = 0;
    if (any(5) == 0 && gate_close(1000)) {
        late_at_rest();
        for (size_t i = 0; (mapping = mapping_nth(i)); i++)
            expect(!mapping->late && !mapping->freeing);
        for (int i = 0; i < CONTEXTS; i++)
            expect(!all_contexts[i].events);
        gate_open();
    }
}

static void at_the_end(void)
{
    now = &all_contexts[0];
    late_free(LATE_ALL);
    expect(!mapping_nth(0) && made == released);
    for (int i = 0; i < CONTEXTS; i++)
        expect(!all_contexts[i].events);
    late_in_child();
}

int main(int argc, char **argv)
{
    for (int i = 0; i < CONTEXTS; i++)
        pthread_rwlock_init(&all_contexts[i].used, NULL);
    real_functions[REAL_cuCtxGetCurrent] = get_current;
    real_functions[REAL_cuCtxSetCurrent] = set_current;
    real_functions[REAL_cuCtxSynchronize] = synchronize;
    real_functions[REAL_cuThreadExchangeStreamCaptureMode] = exchange_mode;
    real_functions[REAL_cuMemUnmap] = unmap;
    real_functions[REAL_cuMemAddressFree] = unmap;
    real_functions[REAL_cuMemRelease] = release;
    return run_threads(work, meanwhile, at_the_end, atoi(argv[argc - 1]));
}
