/* Frees that cannot be done at once. cuMemFree waits for the work of a context, which nobody may do while a stream is being
 * captured; cuMemFreeAsync must not wait at all, since what the stream waits for may be the calling thread's to do. Such
 * memory is let go of once an event says that its work is over: looked at whenever memory is allocated, freed, or asked for,
 * when the last capture has ended, and when the gate is closed; waited for only where memory is short. */
#include "late.h"
#include "capture.h"
#include "contexts.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "memory.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define BATCH 64
#define LEGACY_STREAM ((void *)1)
#define PER_THREAD_STREAM ((void *)2)
#define NO_TIMING 2

struct one {
    CUdeviceptr at;
    uint64_t id; /* addresses are used again */
    CUcontext owner, recorded; /* read by others who have the lock: not written after it is in a list */
    void *event;
    bool ordered;
    bool marked; /* while it was looked at: its event is of its owner */
};

typedef CUresult event_create(void **, unsigned);
typedef CUresult event_record(void *, void *);
typedef CUresult context_record(CUcontext, void *);
typedef CUresult event_call(void *);
typedef CUresult stream_context(void *, CUcontext *);
typedef CUresult is_capturing(void *, int *);
#define driver_of(type, name) ((type *)entry_real(AT_##name))

CUresult wait_for_work(CUcontext owner)
{
    int mode = CAPTURE_MODE_RELAXED;
    CUcontext mine = NULL;
    CUresult result;

    if (capture_any()) /* the driver would refuse, and might spoil the capture */
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    result = real(cuCtxGetCurrent)(&mine);
    bool other = !result && owner && owner != mine;
    if (other)
        result = real(cuCtxSetCurrent)(owner);
    bool gone = other && (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (gone)
        result = CUDA_SUCCESS; /* and its work with it */
    else if (!result)
        result = real(cuCtxSynchronize)();
    if (other)
        real(cuCtxSetCurrent)(mine);
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    return result;
}

void late_forget(void *event)
{
    event_call *destroy = (event_call *)entry_known(AT_cuEventDestroy_v2);

    if (event && destroy)
        destroy(event);
}

/* An event of a context; NULL where there is none to be had. */
static void *event_in(CUcontext context)
{
    event_create *create = driver_of(event_create, cuEventCreate);
    CUcontext mine = NULL;
    void *event = NULL;

    if (!create || !driver_of(event_call, cuEventDestroy_v2) || !driver_of(event_call, cuEventQuery)
        || !driver_of(event_call, cuEventSynchronize) || real(cuCtxGetCurrent)(&mine))
        return NULL;
    if (mine != context && real(cuCtxSetCurrent)(context))
        return NULL;
    if (create(&event, NO_TIMING))
        event = NULL;
    if (mine != context)
        real(cuCtxSetCurrent)(mine);
    return event;
}

CUresult late_record(void *stream, bool per_thread, void **event, CUcontext *context)
{
    stream_context *context_of = per_thread ? driver_of(stream_context, cuStreamGetCtx_ptsz)
                                            : driver_of(stream_context, cuStreamGetCtx);
    is_capturing *captured = per_thread ? driver_of(is_capturing, cuStreamIsCapturing_ptsz)
                                        : driver_of(is_capturing, cuStreamIsCapturing);
    event_record *record = per_thread ? driver_of(event_record, cuEventRecord_ptsz)
                                      : driver_of(event_record, cuEventRecord);
    CUresult result;
    int status = 0, mode = CAPTURE_MODE_RELAXED;

    *event = NULL;
    if (!record || !context_of)
        return CUDA_SUCCESS;
    if (!stream || stream == LEGACY_STREAM || stream == PER_THREAD_STREAM)
        result = real(cuCtxGetCurrent)(context);
    else
        result = context_of(stream, context);
    if (result || !*context)
        return result ? result : CUDA_ERROR_INVALID_CONTEXT;
    if (capture_any() && captured && !captured(stream, &status) && status)
        return CUDA_ERROR_INVALID_VALUE; /* a graph frees what graphs have allocated, and nothing else */
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    void *made = event_in(*context);
    result = made ? record(made, stream) : CUDA_SUCCESS;
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    if (result)
        late_forget(made);
    else
        *event = made;
    return result;
}

static _Atomic size_t n_late; /* for those who only look */

void late_add(struct mapping *mapping, void *event, CUcontext recorded, bool ordered)
{
    mapping->late = true;
    mapping->ordered = ordered;
    mapping->event = event;
    mapping->recorded = recorded;
    atomic_fetch_add(&n_late, 1);
}

void late_taken(struct mapping *mapping)
{
    if (mapping->late)
        atomic_fetch_sub(&n_late, 1);
    mapping->late = false;
}

/* Some of them, from an address on: taken out of the list for as long as they are looked at, so that nobody else does. */
static size_t some(struct one *all, CUdeviceptr from)
{
    struct mapping *mapping;
    size_t n = 0;

    for (size_t place = mapping_place(from); n < BATCH && (mapping = mapping_nth(place)); place++) {
        if (!mapping->late || context_ending(mapping->context) || context_ending(mapping->recorded))
            continue;
        all[n++] = (struct one){.at = mapping->at,
                                .id = mapping->memory->id,
                                .owner = mapping->context,
                                .recorded = mapping->recorded,
                                .event = mapping->event,
                                .ordered = mapping->ordered};
        late_taken(mapping);
        mapping->event = NULL;
    }
    return n;
}

/* What threads look at now, outside the lock: a list of what lies on their stacks, so none of them is cancelled meanwhile. */
struct look {
    struct one all[BATCH];
    size_t n;
    bool waits; /* for the GPU */
    const void *thread;
    int cancelled;
    struct look *next;
};
static struct look *looks;
static pthread_cond_t looked = PTHREAD_COND_INITIALIZER;

/* How many there are; with none it has not begun. */
static size_t look_begins(struct look *look, CUdeviceptr from)
{
    memory_lock();
    look->n = some(look->all, from);
    if (look->n) {
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &look->cancelled);
        look->thread = gate_thread();
        look->next = looks;
        looks = look;
    }
    memory_unlock();
    return look->n;
}

static void look_ends(struct look *look)
{
    struct look **at = &looks;

    memory_lock();
    while (*at && *at != look)
        at = &(*at)->next;
    if (*at) /* a child of a fork in the middle of it has an empty list */
        *at = look->next;
    pthread_cond_broadcast(&looked);
    memory_unlock();
    pthread_setcancelstate(look->cancelled, NULL);
}

/* With memory_lock held: whether another thread looks at what has to do with a context; NULL: at any, and is soon done.
 * What a handler has interrupted is its own thread's. */
static bool looked_at(CUcontext context)
{
    for (const struct look *look = looks; look; look = look->next) {
        if (look->thread == gate_thread() || (!context && look->waits))
            continue;
        for (size_t i = 0; i < look->n; i++)
            if (!context || look->all[i].owner == context || look->all[i].recorded == context)
                return true;
    }
    return false;
}

bool late_nobody_looks(CUcontext context)
{
    bool any = looked_at(context);
    int cancelled;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelled);
    while (looked_at(context))
        memory_wait(&looked);
    pthread_setcancelstate(cancelled, NULL);
    return any;
}

/* It was freed while a stream was being captured: what its context has to do now is marked, where the driver can do that. */
static void mark(struct one *one)
{
    context_record *record = driver_of(context_record, cuCtxRecordEvent);

    if (capture_any()) /* one that has begun while we were at others: it would be spoiled */
        return;
    if (!record || !(one->event = event_in(one->owner)))
        return;
    one->marked = !record(one->owner, one->event);
    if (!one->marked) {
        late_forget(one->event);
        one->event = NULL;
    }
}

static CUresult ask(struct one *one, enum late wait)
{
    if (!one->event && wait < LATE_FREED)
        mark(one);
    if (!one->event)
        return wait == LATE_LOOK ? CUDA_ERROR_NOT_READY : wait_for_work(one->owner);
    if (wait == LATE_ALL || (wait == LATE_FREED && !one->ordered))
        return driver_of(event_call, cuEventSynchronize)(one->event);
    return driver_of(event_call, cuEventQuery)(one->event);
}

/* The work is over too where it has failed: the context is of no use any more, and what was freed is not used by it. */
static bool under_way(CUresult result)
{
    return result == CUDA_ERROR_NOT_READY || (result >= 900 && result < 910);
}

/* With memory_lock held: where it is now, if it is still there. */
static struct mapping *found(const struct one *one, size_t *place)
{
    *place = mapping_place(one->at);
    struct mapping *mapping = mapping_nth(*place);
    return mapping && mapping->at == one->at && mapping->freeing && mapping->memory->id == one->id ? mapping : NULL;
}

/* One piece that is looked at: let go of, or to be looked at again. Whether it was let go of. */
static bool look_at(struct one *one, CUresult result)
{
    size_t place;

    memory_lock();
    struct mapping *mapping = found(one, &place);
    bool again = mapping && under_way(result);
    if (again)
        late_add(mapping, one->event, one->marked ? one->owner : one->recorded, one->ordered);
    else if (mapping)
        mapping_take_away(place);
    memory_unlock();
    if (mapping && !again) /* with its context it has gone itself */
        late_forget(one->event);
    return mapping && !again;
}

static bool look(struct look *look, enum late wait)
{
    CUcontext waited = NULL; /* for all that was freed before now */
    int mode = CAPTURE_MODE_RELAXED;
    bool any = false;

    real(cuThreadExchangeStreamCaptureMode)(&mode);
    for (size_t i = 0; i < look->n; i++) {
        struct one *one = &look->all[i];
        bool known = !one->event && waited && waited == one->owner;
        CUresult result = known ? CUDA_SUCCESS : ask(one, wait);
        if (!result && !one->event)
            waited = one->owner;
        any |= look_at(one, result);
    }
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    return any;
}

bool late_free(enum late wait)
{
    struct look mine = {.n = BATCH, .waits = wait >= LATE_FREED || !driver_of(context_record, cuCtxRecordEvent)};
    CUdeviceptr from = 0;
    bool any = false;

    if (wait == LATE_ALL) { /* memory is short: what others have in hand for a moment counts */
        memory_lock();
        any = late_nobody_looks(NULL);
        memory_unlock();
    } else if (capture_any()) {
        return false;
    }
    if (!atomic_load_explicit(&n_late, memory_order_relaxed))
        return any;
    while (mine.n == BATCH && look_begins(&mine, from)) {
        from = mine.all[mine.n - 1].at + 1;
        any |= look(&mine, wait);
        look_ends(&mine);
    }
    /* NOLINTNEXTLINE(clang-analyzer-core.StackAddressEscape): look_ends has taken it out, wherever in the list it was. */
    return any;
}

void late_at_rest(void)
{
    const struct mapping *mapping;

    if (!atomic_load(&n_late))
        return;
    memory_lock();
    for (size_t place = 0; (mapping = mapping_nth(place));)
        if (mapping->late) {
            mapping_take_away(place);
            place = 0; /* the table was let go of */
        } else {
            place++;
        }
    memory_unlock();
}

void late_context_gone(CUcontext context)
{
    struct mapping *mapping;

    for (size_t place = 0; (mapping = mapping_nth(place));)
        if (mapping->late && mapping->recorded == context) {
            mapping->event = NULL; /* it went with the context */
            mapping_take_away(place);
            place = 0;
        } else {
            place++;
        }
}

void late_in_child(void)
{
    looks = NULL;
    pthread_cond_init(&looked, NULL);
    atomic_store(&n_late, 0);
}
