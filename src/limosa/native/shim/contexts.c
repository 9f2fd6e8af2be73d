/* Contexts that end, and what ends with them: memory that was allocated in them, captures, peer access. */
#include "contexts.h"
#include "capture.h"
#include "compiler.h"
#include "count.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "memory.h"
#include "plain.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static CUcontext *contexts; /* made by the application, beside the primary ones */
static size_t n_contexts;
static unsigned *uses; /* of each: cuCtxAttach and cuCtxDetach count them */

/* Contexts that threads are destroying now, on their stacks: nobody looks at what has to do with them, and one that the
 * driver makes in the place of one is that place's only when all of the old one is forgotten. */
struct ending {
    CUcontext context;
    int cancelled;
    struct ending *next;
};
static struct ending *endings;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;

bool context_ending(CUcontext context)
{
    for (const struct ending *one = endings; one; one = one->next)
        if (context && one->context == context)
            return true;
    return false;
}

size_t contexts_count(void)
{
    return n_contexts;
}

void contexts_copy(CUcontext *all)
{
    if (n_contexts)
        memcpy(all, contexts, n_contexts * sizeof *all);
}

void contexts_in_child(void)
{
    endings = NULL;
    pthread_cond_init(&ended, NULL);
    n_contexts = 0;
}

static CUresult made(CUresult result, CUcontext *context)
{
    if (result)
        return result;
    int cancelled;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelled);
    memory_lock();
    while (context_ending(*context))
        memory_wait(&ended);
    CUcontext *more = realloc(contexts, (n_contexts + 1) * sizeof *more);
    contexts = more ? more : contexts;
    unsigned *more_uses = more ? realloc(uses, (n_contexts + 1) * sizeof *uses) : NULL;
    uses = more_uses ? more_uses : uses;
    if (more_uses) {
        uses[n_contexts] = 1;
        contexts[n_contexts++] = *context;
    }
    memory_unlock();
    pthread_setcancelstate(cancelled, NULL);
    if (!more_uses) { /* its work could not be waited for */
        real(cuCtxDestroy_v2)(*context);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    entry_called(AT_cuCtxCreate_v2);
    if (!shim_ready())
        return real(cuCtxCreate_v2) ? real(cuCtxCreate_v2)(context, flags, device) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, made(real(cuCtxCreate_v2)(context, flags, device), context));
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, void *affinities, int n, unsigned flags, CUdevice device)
{
    entry_called(AT_cuCtxCreate_v3);
    if (!shim_ready())
        return real(cuCtxCreate_v3) ? real(cuCtxCreate_v3)(context, affinities, n, flags, device)
                                    : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, made(real(cuCtxCreate_v3)(context, affinities, n, flags, device), context));
}

/* From CUDA 12.5 on; drivers before it do not have it. */
EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device)
{
    entry_called(AT_cuCtxCreate_v4);
    typedef CUresult create(CUcontext *, void *, unsigned, CUdevice);
    create *function = (create *)entry_real(AT_cuCtxCreate_v4);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return function(context, parameters, flags, device);
    struct reader *reader = gate_enter();
    return gate_left(reader, made(function(context, parameters, flags, device), context));
}

/* With memory_lock held: its memory goes with it. */
static void context_gone(CUcontext context)
{
    const struct mapping *mapping;

    late_context_gone(context); /* before: their events are gone already */
    for (size_t i = 0; (mapping = mapping_nth(i));)
        if ((mapping->plain || mapping->opened) && mapping->context == context) {
            mapping_take_away(i);
            i = 0; /* the table was let go of */
        } else {
            i++;
        }
    for (size_t i = n_contexts; i-- > 0;)
        if (contexts[i] == context) {
            contexts[i] = contexts[--n_contexts];
            uses[i] = uses[n_contexts];
        }
    peers_context_gone(context);
    left_context_gone(context);
    capture_context_ends(context);
}

/* Until it has ended the thread is not cancelled. */
static void begin_to_end(struct ending *one, CUcontext context)
{
    *one = (struct ending){.context = context};
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &one->cancelled);
    memory_lock();
    one->next = endings;
    endings = one;
    if (context)
        late_nobody_looks(context);
    memory_unlock();
}

static void has_ended(struct ending *one, CUcontext gone)
{
    struct ending **at = &endings;

    memory_lock();
    if (gone)
        context_gone(gone);
    while (*at && *at != one)
        at = &(*at)->next;
    if (*at) /* a child of a fork in the middle of it has an empty list */
        *at = one->next;
    pthread_cond_broadcast(&ended);
    memory_unlock();
    pthread_setcancelstate(one->cancelled, NULL);
}

typedef CUresult ends(CUcontext);

static CUresult destroy(CUcontext context, int place)
{
    ends *function = (ends *)entry_call(place);
    struct ending here;

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return function(context);
    struct reader *reader = gate_enter();
    begin_to_end(&here, context);
    CUresult result = function(context);
    has_ended(&here, result ? NULL : context);
    return gate_left(reader, result);
}

EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    return destroy(context, AT_cuCtxDestroy);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    return destroy(context, AT_cuCtxDestroy_v2);
}

/* With memory_lock held: one use more or less of a context that the application has made. Whether it was the last. */
static bool used(CUcontext context, int more)
{
    for (size_t i = 0; i < n_contexts; i++)
        if (contexts[i] == context)
            return !(uses[i] += (unsigned)more);
    return false;
}

typedef CUresult attaches(CUcontext *, unsigned);

static CUresult attach(CUcontext *context, unsigned flags, attaches *function)
{
    CUresult result = function(context, flags);

    if (!result && context) {
        memory_lock();
        used(*context, 1);
        memory_unlock();
    }
    return result;
}

EXPORT CUresult cuCtxAttach(CUcontext *context, unsigned flags)
{
    entry_called(AT_cuCtxAttach);
    attaches *function = (attaches *)entry_real(AT_cuCtxAttach);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return function(context, flags);
    struct reader *reader = gate_enter();
    return gate_left(reader, attach(context, flags, function));
}

static CUresult detach(CUcontext context, ends *function)
{
    struct ending here;

    begin_to_end(&here, context);
    CUresult result = function(context);
    bool last = false;
    if (!result) {
        memory_lock();
        last = used(context, -1);
        memory_unlock();
    }
    has_ended(&here, last ? context : NULL);
    return result;
}

EXPORT CUresult cuCtxDetach(CUcontext context)
{
    entry_called(AT_cuCtxDetach);
    ends *function = (ends *)entry_real(AT_cuCtxDetach);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return function(context);
    struct reader *reader = gate_enter();
    return gate_left(reader, detach(context, function));
}

/* Primary contexts keep their address when they end: it is asked for before. */
static CUcontext primary_of(CUdevice device)
{
    CUcontext context = NULL;
    unsigned flags;
    int active = 0;

    if (real(cuDevicePrimaryCtxGetState)(device, &flags, &active) || !active)
        return NULL;
    if (real(cuDevicePrimaryCtxRetain)(&context, device))
        return NULL;
    real(cuDevicePrimaryCtxRelease_v2)(device);
    return context;
}

/* Memory of a green context is the primary one's that it was made of, and stays when the green one is destroyed. What
 * neither the application has made nor is a primary one is green. */
CUcontext context_owner(CUcontext current, CUdevice device)
{
    static _Atomic(CUcontext) primary[MAX_DEVICES]; /* as last seen */
    bool made_by_it = false;

    if (device < 0 || device >= MAX_DEVICES || atomic_load(&primary[device]) == current)
        return current;
    memory_lock();
    for (size_t i = 0; i < n_contexts; i++)
        made_by_it |= contexts[i] == current;
    memory_unlock();
    CUcontext of_device = made_by_it ? NULL : primary_of(device);
    if (!of_device)
        return current;
    atomic_store(&primary[device], of_device);
    return of_device;
}

static CUresult primary_ends(CUdevice device, int place, bool resets)
{
    typedef CUresult type(CUdevice);
    type *how = (type *)entry_call(place);
    struct ending here;
    unsigned flags;
    int active = 1;

    if (!how)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return how(device);
    struct reader *reader = gate_enter();
    CUcontext context = primary_of(device);
    begin_to_end(&here, resets ? context : NULL); /* most releases are not the last: nothing waits for them */
    CUresult result = how(device);
    bool over = !result && context && !real(cuDevicePrimaryCtxGetState)(device, &flags, &active) && !active;
    has_ended(&here, over ? context : NULL);
    return gate_left(reader, result);
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return primary_ends(device, AT_cuDevicePrimaryCtxRelease, false);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return primary_ends(device, AT_cuDevicePrimaryCtxRelease_v2, false);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    return primary_ends(device, AT_cuDevicePrimaryCtxReset, true);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    return primary_ends(device, AT_cuDevicePrimaryCtxReset_v2, true);
}
