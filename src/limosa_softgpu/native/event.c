/* Events: marks in the work of streams. */
#define _GNU_SOURCE
#include "queue.h"

#include <stdint.h>
#include <stdlib.h>

#define EVENT_FLAGS (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS)

struct event {
    struct event *next;
    struct context *context;
    unsigned flags;
    struct mark *mark; /* where it was recorded last, NULL before */
    struct shared_event *shared; /* of one that other processes may know (CU_EVENT_INTERPROCESS), else NULL */
};

/* Work of a stream that concerns such an event: what is to be noted there, or waited for. */
struct shared_work {
    struct shared_event *event;
    struct context *context;
    uint64_t number;
};

static struct event *events; /* guarded by streams_lock */

static struct event *event_find(CUevent handle)
{
    for (struct event *event = events; event; event = event->next)
        if (event == (struct event *)handle)
            return event;
    return NULL;
}

static void event_forget(struct event **at)
{
    struct event *event = *at;
    *at = event->next;
    mark_drop(event->mark);
    shared_event_drop(event->shared);
    free(event);
}

void events_context_gone(struct context *context)
{
    for (struct event **at = &events; *at;) {
        if ((*at)->context == context)
            event_forget(at);
        else
            at = &(*at)->next;
    }
}

/* The lock is held. */
static struct event *event_make(struct context *context, unsigned flags, struct shared_event *shared)
{
    struct event *event = calloc(1, sizeof *event);
    if (!event)
        return NULL;
    event->context = context;
    event->flags = flags;
    event->shared = shared;
    event->next = events;
    events = event;
    return event;
}

EXPORT CUresult cuEventCreate(CUevent *handle, unsigned int flags)
{
    ENTER(CALL_WORK);
    if (!handle || (flags & ~(unsigned)EVENT_FLAGS)
        || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    struct shared_event *shared = NULL;
    streams_lock();
    if (flags & CU_EVENT_INTERPROCESS)
        shared = shared_event_make();
    struct event *event = shared || !(flags & CU_EVENT_INTERPROCESS) ? event_make(call_.context, flags, shared) : NULL;
    if (!event)
        shared_event_drop(shared);
    streams_unlock();
    *handle = (CUevent)event;
    RETURN(event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult CUDAAPI cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent of)
{
    ENTER(CALL_INIT | CALL_CONTEXT | CALL_ASKS);
    if (!handle)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    streams_lock();
    const struct event *event = event_find(of);
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    if (event)
        result = event->shared ? shared_event_export(event->shared, handle) : CUDA_ERROR_INVALID_VALUE;
    streams_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuIpcOpenEventHandle(CUevent *handle, CUipcEventHandle of)
{
    ENTER(CALL_WORK);
    if (!handle)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    struct shared_event *shared = NULL;
    streams_lock();
    CUresult result = shared_event_open(&of, &shared);
    struct event *event = shared ? event_make(call_.context, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, shared)
                                 : NULL;
    if (event)
        *handle = (CUevent)event;
    else
        shared_event_drop(shared);
    streams_unlock();
    RETURN(result == CUDA_SUCCESS && !event ? CUDA_ERROR_OUT_OF_MEMORY : result);
}

static CUresult destroy(CUevent handle)
{
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    streams_lock();
    for (struct event **at = &events; *at; at = &(*at)->next)
        if (*at == (struct event *)handle) {
            event_forget(at);
            result = CUDA_SUCCESS;
            break;
        }
    streams_unlock();
    return result;
}

EXPORT CUresult cuEventDestroy(CUevent event)
{
    ENTER(CALL_MANAGE);
    RETURN(destroy(event));
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(CALL_MANAGE);
    RETURN(destroy(event));
}

static void run_reach(void *argument)
{
    const struct shared_work *work = argument;
    streams_lock();
    shared_event_reach(work->event, work->number);
    shared_event_drop(work->event);
    streams_unlock();
}

static void run_wait(void *argument)
{
    const struct shared_work *work = argument;
    shared_event_wait(work->event, work->number, work->context);
    streams_lock();
    shared_event_drop(work->event);
    streams_unlock();
}

/* Submit work about an event that other processes may know. The lock is held. */
static CUresult append_shared(struct stream *stream, void (*run)(void *), struct shared_event *event, uint64_t number,
                              struct mark *sets)
{
    struct shared_work *work = malloc(sizeof *work);
    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *work = (struct shared_work){.event = event, .context = stream->context, .number = number};
    shared_event_keep(event);
    CUresult result = stream_append(stream, run, work, false, NULL, sets);
    if (result != CUDA_SUCCESS) {
        shared_event_drop(event);
        free(work);
    }
    return result;
}

static CUresult record(struct context *context, CUevent handle, CUstream to, unsigned flags)
{
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE; /* 1 is for streams that are captured */
    struct mark *mark = calloc(1, sizeof *mark);
    if (!mark)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mark->references = 2; /* the event's and the work's */
    CUresult result = CUDA_SUCCESS;
    streams_lock();
    struct event *event = event_find(handle);
    struct stream *stream = event ? stream_find(context, to, &result) : NULL;
    if (!event || (stream && stream->context != event->context))
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (stream && event->shared) {
        uint64_t number = shared_event_record(event->shared);
        result = append_shared(stream, run_reach, event->shared, number, mark);
        if (result != CUDA_SUCCESS)
            shared_event_reach(event->shared, number);
    } else if (stream)
        result = stream_append(stream, NULL, NULL, true, NULL, mark);
    if (result == CUDA_SUCCESS) {
        mark_drop(event->mark);
        event->mark = mark;
    } else {
        free(mark);
    }
    streams_unlock();
    return result;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(CALL_MANAGE);
    RETURN(record(call_.context, event, stream, 0));
}

EXPORT CUresult cuEventRecord_ptsz(CUevent event, CUstream stream)
{
    ENTER(CALL_MANAGE);
    RETURN(record(call_.context, event, PER_THREAD(stream), 0));
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags)
{
    ENTER(CALL_MANAGE);
    RETURN(record(call_.context, event, stream, flags));
}

EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned int flags)
{
    ENTER(CALL_MANAGE);
    RETURN(record(call_.context, event, PER_THREAD(stream), flags));
}

/* Behind all that the context has to do now, in whatever stream. */
EXPORT CUresult cuCtxRecordEvent(CUcontext handle, CUevent to)
{
    ENTER(CALL_MANAGE);
    driver_lock();
    struct context *context = context_of_handle(handle);
    bool known = context && !context->destroyed;
    driver_unlock();
    struct mark *mark = calloc(1, sizeof *mark);
    if (!mark)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    mark->references = 2; /* the event's and the work's */
    streams_lock();
    struct event *event = known ? event_find(to) : NULL;
    CUresult result;
    if (known && event && event->context == context && !event->shared) {
        result = streams_mark(context, mark);
    } else {
        result = known ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT;
        mark_drop(mark);
    }
    if (result == CUDA_SUCCESS) {
        mark_drop(event->mark);
        event->mark = mark;
    } else {
        mark_drop(mark);
    }
    streams_unlock();
    RETURN(result);
}

/* Whether what it marks now is still to be reached, in whatever process it was recorded. */
static bool pending(const struct event *event)
{
    if (event->shared)
        return !shared_event_reached(event->shared, shared_event_last(event->shared));
    return event->mark && !event->mark->reached;
}

EXPORT CUresult cuEventQuery(CUevent handle)
{
    ENTER(CALL_SYNC);
    streams_lock();
    const struct event *event = event_find(handle);
    CUresult result = event ? (CUresult)event->context->sticky : CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS && pending(event))
        result = CUDA_ERROR_NOT_READY;
    streams_unlock();
    RETURN(result);
}

EXPORT CUresult cuEventSynchronize(CUevent handle)
{
    ENTER(CALL_SYNC);
    streams_lock();
    const struct event *event = event_find(handle);
    struct context *context = event ? event->context : NULL;
    struct mark *mark = event ? event->mark : NULL;
    struct shared_event *shared = event ? event->shared : NULL;
    if (shared) {
        uint64_t number = shared_event_last(shared);
        shared_event_keep(shared);
        streams_unlock();
        shared_event_wait(shared, number, context);
        streams_lock();
        shared_event_drop(shared);
    } else if (mark) {
        mark->references++;
        mark_wait(mark);
        mark_drop(mark);
    }
    streams_unlock();
    RETURN(context ? (CUresult)context->sticky : CUDA_ERROR_INVALID_HANDLE);
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    streams_lock();
    const struct event *first = event_find(start), *last = event_find(end);
    if (!first || !last || first->context != last->context || !first->mark || !last->mark
        || ((first->flags | last->flags) & CU_EVENT_DISABLE_TIMING))
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (first->context->sticky)
        result = (CUresult)first->context->sticky;
    else if (!first->mark->reached || !last->mark->reached)
        result = CUDA_ERROR_NOT_READY;
    else
        *milliseconds = (float)((last->mark->time - first->mark->time) * 1e3);
    streams_unlock();
    return result;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER(CALL_SYNC);
    RETURN(elapsed(milliseconds, start, end));
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    ENTER(CALL_SYNC);
    RETURN(elapsed(milliseconds, start, end));
}

/* The stream goes on once what the event marks now is reached; a later record does not matter. */
static CUresult wait_event(struct context *context, CUstream handle, CUevent awaited, unsigned flags)
{
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    streams_lock();
    struct event *event = event_find(awaited);
    struct stream *stream = event ? stream_find(context, handle, &result) : NULL;
    if (!event) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else if (stream && event->shared) {
        if (pending(event))
            result = append_shared(stream, run_wait, event->shared, shared_event_last(event->shared), NULL);
    } else if (stream && event->mark && !event->mark->reached) {
        event->mark->references++;
        result = stream_append(stream, NULL, NULL, true, event->mark, NULL);
        if (result != CUDA_SUCCESS)
            event->mark->references--;
    }
    streams_unlock();
    return result;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER(CALL_QUERY);
    RETURN(wait_event(call_.context, stream, event, flags));
}

EXPORT CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER(CALL_QUERY);
    RETURN(wait_event(call_.context, PER_THREAD(stream), event, flags));
}
