/* Streams that are being captured into a graph. While one is, the driver refuses a wait for its context, and may spoil the
 * capture for it: so nobody of ours may wait then, and whoever closes the gate lets captures finish first. */
#include "capture.h"
#include "compiler.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PER_THREAD_STREAM ((void *)2)

typedef CUresult is_capturing(void *, int *);

struct capture {
    void *stream;
    CUcontext context; /* it was begun in it: ends with it */
    const struct reader *thread; /* that has begun it */
};

/* Held for a few instructions, and across a call of the driver (a look) only while the gate is closed. */
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static struct capture *captures;
static size_t n_captures, room;
static _Atomic size_t n_now; /* as many, for those who only look */
static _Atomic uint32_t held; /* by whom (enum hold): no thread is to begin its first one */

static bool same(const struct capture *capture, const void *stream, const struct reader *thread)
{
    return capture->stream == stream && (stream != PER_THREAD_STREAM || capture->thread == thread);
}

static void take_out(size_t i)
{
    captures[i] = captures[--n_captures];
    atomic_store(&n_now, n_captures);
}

static void begun(void *stream, const struct reader *thread)
{
    CUcontext context = NULL;

    real(cuCtxGetCurrent)(&context);
    pthread_mutex_lock(&one);
    if (n_captures == room) {
        size_t more = room ? 2 * room : 16;
        struct capture *bigger = realloc(captures, more * sizeof *captures);
        if (bigger) {
            captures = bigger;
            room = more;
        }
    }
    if (n_captures < room)
        captures[n_captures++] = (struct capture){stream, context, thread};
    atomic_store(&n_now, n_captures);
    pthread_mutex_unlock(&one);
}

static bool ended(const void *stream, const struct reader *thread)
{
    bool was = false;

    pthread_mutex_lock(&one);
    for (size_t i = n_captures; i-- > 0;)
        if (same(&captures[i], stream, thread)) {
            take_out(i);
            was = true;
        }
    pthread_mutex_unlock(&one);
    return was;
}

void capture_context_ends(CUcontext context)
{
    if (!atomic_load_explicit(&n_now, memory_order_relaxed))
        return;
    pthread_mutex_lock(&one);
    for (size_t i = n_captures; i-- > 0;)
        if (captures[i].context == context)
            take_out(i);
    pthread_mutex_unlock(&one);
}

void capture_thread_ends(const struct reader *thread)
{
    if (atomic_load_explicit(&n_now, memory_order_relaxed))
        ended(PER_THREAD_STREAM, thread);
}

bool capture_any(void)
{
    return atomic_load_explicit(&n_now, memory_order_relaxed) != 0;
}

/* With the gate closed and nobody inside, so that no stream is destroyed meanwhile. The default stream of a thread is
 * known to that thread alone. What cannot be asked is believed to go on. */
bool capture_goes_on(void)
{
    is_capturing *ask = (is_capturing *)entry_known(AT_cuStreamIsCapturing);

    pthread_mutex_lock(&one);
    for (size_t i = n_captures; i-- > 0;) {
        int status = 1;
        if (ask && captures[i].stream != PER_THREAD_STREAM && !ask(captures[i].stream, &status) && !status)
            take_out(i);
    }
    bool any = n_captures != 0;
    pthread_mutex_unlock(&one);
    return any;
}

void capture_hold(enum hold why, bool hold)
{
    if (hold)
        atomic_fetch_or(&held, (uint32_t)why);
    else if (atomic_fetch_and(&held, ~(uint32_t)why) == (uint32_t)why)
        syscall(SYS_futex, &held, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

/* A thread that is inside (a call within a call; this one not counted), or in the middle of a capture of its own, goes on:
 * somebody waits for it. */
static bool has_to_wait(uint32_t depth)
{
    if (!UNLIKELY(atomic_load_explicit(&held, memory_order_relaxed)))
        return false;
    const struct reader *thread = gate_mine();
    bool has = thread && atomic_load_explicit(&thread->inside, memory_order_relaxed) > depth;
    pthread_mutex_lock(&one);
    for (size_t i = 0; i < n_captures && !has; i++)
        has = captures[i].thread == thread;
    pthread_mutex_unlock(&one);
    return !has;
}

/* Looked at again behind the gate: it may be held since before that was opened. */
static struct reader *enter_when_let_go(void)
{
    for (;;) {
        while (has_to_wait(0)) {
            uint32_t by = atomic_load(&held);
            if (by)
                syscall(SYS_futex, &held, FUTEX_WAIT_PRIVATE, by, NULL, NULL, 0);
        }
        struct reader *reader = gate_enter();
        if (!has_to_wait(1))
            return reader;
        gate_leave(reader);
    }
}

void capture_in_child(void)
{
    pthread_mutex_init(&one, NULL);
    n_captures = 0;
    atomic_store(&n_now, 0);
    atomic_store(&held, 0);
}

/* Their arguments are words, six at most: handed on as they are. usual: the stream that is meant where none is named. */
static CUresult begin(int place, void *usual, void *stream, const uint64_t *w)
{
    typedef CUresult type(void *, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
    type *function = (type *)entry_call(place);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return function(stream, w[0], w[1], w[2], w[3], w[4]);
    entry_real(AT_cuStreamIsCapturing); /* the shim's own thread does not look it up */
    struct reader *reader = enter_when_let_go();
    CUresult result = function(stream, w[0], w[1], w[2], w[3], w[4]);
    if (!result)
        begun(stream ? stream : usual, reader);
    return gate_left(reader, result);
}

#define BEGINS(name, usual)                                                                                            \
    EXPORT CUresult name(void *stream, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f)                     \
    {                                                                                                                  \
        return begin(AT_##name, usual, stream, (const uint64_t[]){b, c, d, e, f});                                     \
    }
BEGINS(cuStreamBeginCapture, NULL)
BEGINS(cuStreamBeginCapture_ptsz, PER_THREAD_STREAM)
BEGINS(cuStreamBeginCapture_v2, NULL)
BEGINS(cuStreamBeginCapture_v2_ptsz, PER_THREAD_STREAM)
BEGINS(cuStreamBeginCaptureToGraph, NULL)
BEGINS(cuStreamBeginCaptureToGraph_ptsz, PER_THREAD_STREAM)

/* A call that failed may have ended it all the same, or not (another thread's): the driver is asked, by the thread whose
 * stream it may be. */
static CUresult end(int place, void *usual, void *stream, void **graph)
{
    typedef CUresult type(void *, void **);
    type *function = (type *)entry_call(place);
    is_capturing *ask = (is_capturing *)entry_real(AT_cuStreamIsCapturing);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(stream, graph);
    int status = 0;
    void *meant = stream ? stream : usual;
    if (!result || (meant && ask && !ask(meant, &status) && !status))
        ended(meant, reader);
    late_free(LATE_LOOK);
    return gate_left(reader, result);
}

EXPORT CUresult cuStreamEndCapture(void *stream, void **graph)
{
    return end(AT_cuStreamEndCapture, NULL, stream, graph);
}

EXPORT CUresult cuStreamEndCapture_ptsz(void *stream, void **graph)
{
    return end(AT_cuStreamEndCapture_ptsz, PER_THREAD_STREAM, stream, graph);
}

static CUresult destroy(int place, void *stream)
{
    typedef CUresult type(void *);
    type *function = (type *)entry_call(place);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    bool was = capture_any() && ended(stream, reader); /* before: its address may be another one's right after */
    CUresult result = function(stream);
    if (result && was)
        begun(stream, reader);
    late_free(LATE_LOOK);
    return gate_left(reader, result);
}

EXPORT CUresult cuStreamDestroy(void *stream)
{
    return destroy(AT_cuStreamDestroy, stream);
}

EXPORT CUresult cuStreamDestroy_v2(void *stream)
{
    return destroy(AT_cuStreamDestroy_v2, stream);
}
