/* Streams and the queues of work behind them. */
#define _GNU_SOURCE
#include "queue.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* some piece of work is done */
static int n_waiting;          /* threads that wait for `changed` */
static struct stream *streams;
static uint64_t last_number;
static unsigned long long last_stream = 2; /* ids 1 and 2 are the default streams' */

static pthread_key_t thread_key; /* the number of a thread that has a default stream */
static _Atomic unsigned long long last_thread;

void streams_lock(void)
{
    pthread_mutex_lock(&queues);
}

void streams_unlock(void)
{
    pthread_mutex_unlock(&queues);
}

static void wait_for_change(void)
{
    n_waiting++;
    pthread_cond_wait(&changed, &queues);
    n_waiting--;
}

static void tell_change(void)
{
    if (n_waiting > 0)
        pthread_cond_broadcast(&changed);
}

void mark_drop(struct mark *mark)
{
    if (mark && --mark->references == 0)
        free(mark);
}

void mark_wait(struct mark *mark)
{
    while (!mark->reached)
        wait_for_change();
}

void context_fail(struct context *context, CUresult error)
{
    int none = CUDA_SUCCESS;
    atomic_compare_exchange_strong(&context->sticky, &none, (int)error);
}

/* ------------------------------------------------------------------------------------------------------ streams --- */

static struct stream *stream_make(struct context *context, unsigned flags, int priority)
{
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    stream->context = context;
    stream->tail = &stream->head;
    stream->flags = flags;
    stream->priority = priority;
    stream->id = ++last_stream;
    stream->references = 1;
    pthread_cond_init(&stream->submitted, NULL);
    stream->next = streams;
    streams = stream;
    return stream;
}

/* The list's reference is dropped once a destroyed stream has nothing left to do. */
static void stream_drop(struct stream *stream)
{
    if (--stream->references > 0)
        return;
    pthread_cond_destroy(&stream->submitted);
    free(stream);
}

static void forget_if_over(struct stream *stream)
{
    if (!stream->gone || stream->head || stream->worker)
        return;
    for (struct stream **at = &streams; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            stream_drop(stream);
            return;
        }
}

static void stream_end(struct stream *stream)
{
    stream->gone = true;
    pthread_cond_signal(&stream->submitted);
    forget_if_over(stream);
}

/* A thread has ended: so have its default streams. */
static void thread_ended(void *number)
{
    streams_lock();
    for (struct stream *stream = streams, *next; stream; stream = next) {
        next = stream->next;
        if (stream->owner == (unsigned long long)(uintptr_t)number && !stream->gone)
            stream_end(stream);
    }
    streams_unlock();
}

static unsigned long long thread_number(void)
{
    uintptr_t number = (uintptr_t)pthread_getspecific(thread_key);
    if (!number) {
        number = (uintptr_t)++last_thread;
        pthread_setspecific(thread_key, (void *)number);
    }
    return number;
}

struct stream *stream_find(struct context *context, CUstream handle, CUresult *error)
{
    bool legacy = handle == NULL || handle == CU_STREAM_LEGACY;
    bool is_default = legacy || handle == CU_STREAM_PER_THREAD;
    unsigned long long owner = handle == CU_STREAM_PER_THREAD ? thread_number() : 0;
    if (is_default && !context) {
        *error = CUDA_ERROR_INVALID_CONTEXT;
        return NULL;
    }
    for (struct stream *stream = streams; stream; stream = stream->next) {
        if (stream->gone)
            continue;
        if (is_default ? stream->context == context && stream->legacy == legacy && stream->owner == owner
                       : stream == (struct stream *)handle && !stream->legacy && !stream->owner)
            return stream;
    }
    struct stream *made = is_default ? stream_make(context, 0, 0) : NULL;
    if (!made) {
        *error = is_default ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
        return NULL;
    }
    made->legacy = legacy;
    made->owner = owner;
    made->id = legacy ? 1 : 2;
    return made;
}

/* --------------------------------------------------------------------------------------------------------- work --- */

static bool blocking(const struct stream *stream)
{
    return !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* Whether work with this number may run when it is the head of its stream: work of the legacy default stream waits for
 * all blocking streams, and they for it. What is left of a destroyed context is only to be got rid of. */
static bool may_run(const struct stream *stream, uint64_t number, const struct mark *after)
{
    if (stream->context->destroyed)
        return true;
    if (after && !after->reached)
        return false;
    if (!blocking(stream))
        return true;
    for (const struct stream *other = streams; other; other = other->next)
        if (other != stream && other->context == stream->context && other->legacy != stream->legacy
            && (other->legacy || stream->legacy) && blocking(other) && other->head && other->head->number < number)
            return false;
    return true;
}

/* Run the head of a stream; the lock is let go meanwhile. */
static void run_head(struct stream *stream, struct work *work)
{
    work->taken = true;
    streams_unlock();
    if (work->run)
        work->run(work->argument);
    if (!work->keep)
        free(work->argument);
    streams_lock();
    if (work->sets) {
        work->sets->reached = true;
        work->sets->time = node_now();
        mark_drop(work->sets);
    }
    mark_drop(work->after);
    stream->head = work->next;
    if (!stream->head)
        stream->tail = &stream->head;
    free(work);
    tell_change();
    forget_if_over(stream);
}

static void *worker(void *argument)
{
    struct stream *stream = argument;
    streams_lock();
    while (stream->head || !stream->gone) {
        if (!stream->head)
            pthread_cond_wait(&stream->submitted, &queues);
        else if (stream->head->taken || !may_run(stream, stream->head->number, stream->head->after))
            wait_for_change();
        else
            run_head(stream, stream->head);
    }
    stream->worker = false;
    stream->references--; /* the list's is left */
    forget_if_over(stream);
    streams_unlock();
    return NULL;
}

static struct work *work_add(struct stream *stream, void (*run)(void *), void *argument, bool keep)
{
    struct work *work = calloc(1, sizeof *work);
    if (!work)
        return NULL;
    work->run = run;
    work->argument = argument;
    work->keep = keep;
    work->number = ++last_number;
    *stream->tail = work;
    stream->tail = &work->next;
    return work;
}

bool stream_spoil(struct stream *stream)
{
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE)
        return false;
    stream->capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return true;
}

CUresult stream_append(struct stream *stream, void (*run)(void *), void *argument, bool keep, struct mark *after,
                       struct mark *sets)
{
    if (stream_spoil(stream))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!run && !stream->head && may_run(stream, last_number + 1, after)) { /* a mark, and nothing to do before */
        if (sets) {
            sets->reached = true;
            sets->time = node_now();
            mark_drop(sets);
        }
        mark_drop(after);
        return CUDA_SUCCESS;
    }
    if (!stream->worker) {
        pthread_t thread;
        stream->references++;
        if (driver_thread(&thread, "cuda-stream", worker, stream) != 0) {
            stream_drop(stream);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        pthread_detach(thread);
        stream->worker = true;
    }
    struct work *work = work_add(stream, run, argument, keep);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    work->after = after;
    work->sets = sets;
    pthread_cond_signal(&stream->submitted);
    return CUDA_SUCCESS;
}

/* A mark that several streams have to come to. */
struct together {
    int left;
    struct mark *mark;
};

/* With the lock held. */
static void arrive(struct together *together)
{
    if (--together->left)
        return;
    together->mark->reached = true;
    together->mark->time = node_now();
    mark_drop(together->mark);
    free(together);
    tell_change();
}

static void run_arrive(void *argument)
{
    streams_lock();
    arrive(argument);
    streams_unlock();
}

CUresult streams_mark(struct context *context, struct mark *mark)
{
    struct together *together = malloc(sizeof *together);
    CUresult result = together ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream_spoil(stream))
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result != CUDA_SUCCESS) {
        free(together);
        mark_drop(mark);
        return result;
    }
    *together = (struct together){1, mark};
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && stream->head) {
            together->left++;
            if (stream_append(stream, run_arrive, together, true, NULL, NULL) != CUDA_SUCCESS) {
                result = CUDA_ERROR_OUT_OF_MEMORY;
                together->left--;
            }
        }
    arrive(together);
    return result;
}

CUresult stream_submit(struct context *context, CUstream handle, void (*run)(void *), void *argument)
{
    CUresult result;
    streams_lock();
    struct stream *stream = stream_find(context, handle, &result);
    if (stream)
        result = stream_append(stream, run, argument, false, NULL, NULL);
    streams_unlock();
    if (!stream || result != CUDA_SUCCESS)
        free(argument);
    return result;
}

CUresult stream_run(struct context *context, CUstream handle, void (*run)(void *), void *argument)
{
    CUresult result = CUDA_SUCCESS;
    streams_lock();
    struct stream *stream = stream_find(context, handle, &result);
    if (!stream) {
        streams_unlock();
        return result;
    }
    if (stream_spoil(stream)) {
        streams_unlock();
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    context = stream->context;
    if (!stream->head && may_run(stream, last_number + 1, NULL)) {
        struct work *work = work_add(stream, run, argument, true);
        if (work)
            run_head(stream, work);
        else
            result = CUDA_ERROR_OUT_OF_MEMORY;
        streams_unlock();
        return result != CUDA_SUCCESS ? result : (CUresult)context->sticky;
    }
    struct mark *done = calloc(1, sizeof *done);
    if (done) {
        done->references = 2; /* ours and the work's */
        result = stream_append(stream, run, argument, true, NULL, done);
    }
    if (!done || result != CUDA_SUCCESS) {
        streams_unlock();
        free(done);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    mark_wait(done);
    mark_drop(done);
    streams_unlock();
    return (CUresult)context->sticky;
}

/* ------------------------------------------------------------------------------------------------------ waiting --- */

/* Whether work up to this number is unfinished: in one stream and, if that is a legacy one, in those that it waits for;
 * in a context (stream NULL); anywhere (both NULL). */
static bool busy(const struct context *context, const struct stream *stream, uint64_t number)
{
    for (const struct stream *other = streams; other; other = other->next) {
        if (!other->head || other->head->number > number)
            continue;
        if (!stream ? !context || other->context == context
                    : other == stream || (stream->legacy && other->context == stream->context && blocking(other)))
            return true;
    }
    return false;
}

CUresult stream_wait(struct context *context, CUstream handle)
{
    CUresult result = CUDA_SUCCESS;
    streams_lock();
    struct stream *stream = stream_find(context, handle, &result);
    if (!stream) {
        streams_unlock();
        return result;
    }
    if (stream_spoil(stream)) {
        streams_unlock();
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    stream->references++;
    context = stream->context;
    uint64_t number = last_number;
    while (busy(NULL, stream, number))
        wait_for_change();
    stream_drop(stream);
    streams_unlock();
    return (CUresult)context->sticky;
}

static CUresult wait_for_all(struct context *context, bool (*refused)(const struct stream *))
{
    bool captured = false;
    streams_lock();
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && !stream->gone && refused(stream))
            captured |= stream_spoil(stream);
    if (captured) {
        streams_unlock();
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    uint64_t number = last_number;
    while (busy(context, NULL, number))
        wait_for_change();
    streams_unlock();
    return (CUresult)context->sticky;
}

static bool any(const struct stream *stream)
{
    return stream->capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUresult context_wait(struct context *context)
{
    return wait_for_all(context, any);
}

CUresult context_wait_for_memory(struct context *context)
{
    return wait_for_all(context, stream_forbids);
}

bool streams_drain(double timeout)
{
    struct timespec deadline = driver_deadline(timeout > 0 ? timeout : 0);
    int error = 0;
    streams_lock();
    while (busy(NULL, NULL, UINT64_MAX) && error != ETIMEDOUT) {
        n_waiting++;
        error = timeout < 0 ? pthread_cond_wait(&changed, &queues)
                            : pthread_cond_timedwait(&changed, &queues, &deadline);
        n_waiting--;
    }
    bool drained = !busy(NULL, NULL, UINT64_MAX);
    streams_unlock();
    return drained;
}

void streams_context_gone(struct context *context)
{
    streams_lock();
    tell_change(); /* that it is destroyed: nothing of it waits for anything else any more */
    while (busy(context, NULL, UINT64_MAX))
        wait_for_change();
    for (struct stream *stream = streams, *next; stream; stream = next) {
        next = stream->next;
        if (stream->context == context && !stream->gone)
            stream_end(stream);
    }
    events_context_gone(context);
    streams_unlock();
}

/* In a child: its parent's threads are not there, and nothing of the driver works. What the lists held is left. */
void streams_forked(void)
{
    pthread_mutex_init(&queues, NULL);
    driver_condition(&changed);
    n_waiting = 0;
    streams = NULL;
    shared_events_forked();
}

__attribute__((constructor)) static void loaded(void)
{
    driver_condition(&changed);
    pthread_key_create(&thread_key, thread_ended);
}

/* ------------------------------------------------------------------------------------------------- entry points --- */

static CUresult create(CUstream *handle, struct context *context, unsigned flags, int priority)
{
    if (!handle || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING))
        return CUDA_ERROR_INVALID_VALUE;
    if (priority > 0)
        priority = 0;
    if (priority < -5)
        priority = -5;
    streams_lock();
    struct stream *stream = stream_make(context, flags, priority);
    streams_unlock();
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUstream)stream;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER(CALL_WORK);
    RETURN(create(stream, call_.context, flags, 0));
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    ENTER(CALL_WORK);
    RETURN(create(stream, call_.context, flags, priority));
}

static CUresult destroy(CUstream handle)
{
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    streams_lock();
    if (handle && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
        struct stream *stream = stream_find(NULL, handle, &result);
        if (stream) {
            stream_end(stream);
            result = CUDA_SUCCESS;
        }
    }
    streams_unlock();
    return result;
}

EXPORT CUresult cuStreamDestroy(CUstream stream)
{
    ENTER(CALL_MANAGE);
    RETURN(destroy(stream));
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(CALL_MANAGE);
    RETURN(destroy(stream));
}

/* What a stream says of itself: a copy, as it may be destroyed meanwhile. False where there is none, with the *error. */
static bool look(struct context *context, CUstream handle, struct stream *seen, CUresult *error)
{
    streams_lock();
    const struct stream *stream = stream_find(context, handle, error);
    if (stream)
        *seen = *stream;
    streams_unlock();
    return stream != NULL;
}

static CUresult query(struct context *context, CUstream handle)
{
    CUresult result = CUDA_SUCCESS;
    streams_lock();
    struct stream *stream = stream_find(context, handle, &result);
    if (stream && (CUresult)stream->context->sticky != CUDA_SUCCESS)
        result = (CUresult)stream->context->sticky;
    else if (stream && stream_spoil(stream))
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    else if (stream && busy(NULL, stream, UINT64_MAX))
        result = CUDA_ERROR_NOT_READY;
    streams_unlock();
    return result;
}

struct context *stream_context(struct context *current, CUstream handle)
{
    struct stream seen;
    CUresult error;
    return look(current, handle, &seen, &error) ? seen.context : NULL;
}

struct host_function {
    struct context *context;
    CUstream stream;
    CUhostFn function;
    CUstreamCallback callback;
    void *data;
};

static void run_host_function(void *argument)
{
    const struct host_function *host = argument;
    if (host->context->destroyed)
        return;
    if (host->callback)
        host->callback(host->stream, (CUresult)host->context->sticky, host->data);
    else if (!host->context->sticky) /* not called where the context has failed */
        host->function(host->data);
}

static CUresult add_host_function(struct context *context, CUstream handle, struct host_function wanted)
{
    struct stream seen;
    CUresult error;
    if (!look(context, handle, &seen, &error))
        return error;
    struct host_function *host = malloc(sizeof *host);
    if (!host)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *host = wanted;
    host->context = seen.context;
    host->stream = handle;
    return stream_submit(context, handle, run_host_function, host);
}

/* Both versions of a function of streams: its own, and the one in which 0 means the thread's default stream. */
#define BOTH(name, flags, body, ...)                                                                                   \
    EXPORT CUresult name(CUstream stream __VA_OPT__(, ) __VA_ARGS__)                                                   \
    {                                                                                                                  \
        ENTER(flags);                                                                                                  \
        body                                                                                                           \
    }                                                                                                                  \
    EXPORT CUresult name##_ptsz(CUstream stream __VA_OPT__(, ) __VA_ARGS__)                                            \
    {                                                                                                                  \
        ENTER(flags);                                                                                                  \
        stream = PER_THREAD(stream);                                                                                   \
        body                                                                                                           \
    }

/* Look at a stream and hand one thing of it out. */
#define ANSWER(to, what)                                                                                               \
    {                                                                                                                  \
        struct stream seen;                                                                                            \
        CUresult error = CUDA_ERROR_INVALID_VALUE;                                                                     \
        if (!(to) || !look(call_.context, stream, &seen, &error))                                                      \
            RETURN(error);                                                                                             \
        *(to) = (what);                                                                                                \
        RETURN(CUDA_SUCCESS);                                                                                          \
    }

BOTH(cuStreamSynchronize, CALL_SYNC, RETURN(stream_wait(call_.context, stream));)
BOTH(cuStreamQuery, CALL_SYNC, RETURN(query(call_.context, stream));)
BOTH(cuStreamGetCtx, CALL_QUERY, ANSWER(context, (CUcontext)seen.context), CUcontext *context)
BOTH(cuStreamGetDevice, CALL_QUERY, ANSWER(device, seen.context->ordinal), CUdevice *device)
BOTH(cuStreamGetFlags, CALL_QUERY, ANSWER(flags, seen.flags), unsigned int *flags)
BOTH(cuStreamGetPriority, CALL_QUERY, ANSWER(priority, seen.priority), int *priority)
BOTH(cuStreamGetId, CALL_QUERY, ANSWER(id, seen.id), unsigned long long *id)
BOTH(cuStreamIsCapturing, CALL_QUERY, ANSWER(status, seen.capture), CUstreamCaptureStatus *status)
BOTH(
    cuStreamAddCallback, CALL_MANAGE,
    {
        if (!callback || flags != 0)
            RETURN(CUDA_ERROR_INVALID_VALUE);
        RETURN(add_host_function(call_.context, stream, (struct host_function){.callback = callback, .data = data}));
    },
    CUstreamCallback callback, void *data, unsigned int flags)
BOTH(
    cuLaunchHostFunc, CALL_MANAGE,
    {
        if (!function)
            RETURN(CUDA_ERROR_INVALID_VALUE);
        RETURN(add_host_function(call_.context, stream, (struct host_function){.function = function, .data = data}));
    },
    CUhostFn function, void *data)
