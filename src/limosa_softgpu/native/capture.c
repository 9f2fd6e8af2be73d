/* Captures of streams: that there is one, and what spoils it. Nothing can be captured: a graph is always empty, whatever is
 * submitted to a stream that is being captured is refused (queue.h), and an empty graph can only be destroyed. */
#include "queue.h"

#include <stdlib.h>

struct graph {
    char nothing;
};

static _Thread_local CUstreamCaptureMode mode_of_thread;

bool stream_forbids(const struct stream *stream)
{
    if (stream->capture == CU_STREAM_CAPTURE_STATUS_NONE || stream->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED
        || mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    return pthread_equal(stream->capturer, pthread_self())
        || (mode_of_thread == CU_STREAM_CAPTURE_MODE_GLOBAL && stream->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static CUresult begin(struct context *context, CUstream handle, CUstreamCaptureMode mode)
{
    CUresult result = CUDA_SUCCESS;

    if ((int)mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    streams_lock();
    struct stream *stream = stream_find(context, handle, &result);
    if (stream && stream->legacy)
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    else if (stream && stream->capture != CU_STREAM_CAPTURE_STATUS_NONE)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (stream) {
        stream->capture = CU_STREAM_CAPTURE_STATUS_ACTIVE;
        stream->capture_mode = mode;
        stream->capturer = pthread_self();
    }
    streams_unlock();
    return result;
}

static CUresult make_empty(CUgraph *graph)
{
    struct graph *made = calloc(1, sizeof *made);
    *graph = (CUgraph)made;
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end(struct context *context, CUstream handle, CUgraph *graph)
{
    CUresult result = CUDA_SUCCESS;

    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    streams_lock();
    struct stream *stream = stream_find(context, handle, &result);
    if (stream && stream->capture == CU_STREAM_CAPTURE_STATUS_NONE)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (stream && stream->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED
             && !pthread_equal(stream->capturer, pthread_self()))
        result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    else if (stream) {
        if (stream->capture == CU_STREAM_CAPTURE_STATUS_INVALIDATED)
            result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else
            result = make_empty(graph);
        stream->capture = CU_STREAM_CAPTURE_STATUS_NONE;
    }
    streams_unlock();
    return result;
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    ENTER(CALL_MANAGE);
    RETURN(begin(call_.context, stream, mode));
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
    ENTER(CALL_MANAGE);
    RETURN(begin(call_.context, PER_THREAD(stream), mode));
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    ENTER(CALL_MANAGE);
    RETURN(end(call_.context, stream, graph));
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    ENTER(CALL_MANAGE);
    RETURN(end(call_.context, PER_THREAD(stream), graph));
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER(CALL_INIT);
    if (!graph)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    free(graph);
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    ENTER(CALL_INIT);
    if (!mode || (int)*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode before = mode_of_thread;
    mode_of_thread = *mode;
    *mode = before;
    RETURN(CUDA_SUCCESS);
}
