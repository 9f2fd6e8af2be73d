/* Streams whose capture begins and ends in many threads, while somebody closes the gate between captures: capture.c and
 * gate.c, with a driver that only knows which stream is being captured. */
#include "capture.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "threads.h"

#define EACH 8 /* streams of a thread: all of them together are more than the first table has room for */
#define PER_THREAD 2 /* the number of the thread's own stream */

struct stream {
    _Atomic int captured;
};
static struct stream streams[THREADS][EACH];
static _Atomic int own_captured; /* by threads' own streams */
static _Thread_local int mine; /* the thread's own one is */
static _Thread_local char context;
static unsigned met; /* how often it was closed between captures */

CUresult cuStreamBeginCapture_ptsz(void *stream, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f);
CUresult cuStreamEndCapture_ptsz(void *stream, void **graph);
CUresult cuStreamDestroy_v2(void *stream);

static CUresult begin_capture(struct stream *stream, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f)
{
    if (stream && stream != (void *)PER_THREAD)
        return atomic_exchange(&stream->captured, 1) ? 900 : 0;
    if (mine)
        return 900;
    mine = 1;
    atomic_fetch_add(&own_captured, 1);
    return 0;
}

static CUresult end_capture(struct stream *stream, void **graph)
{
    if (stream && stream != (void *)PER_THREAD)
        return atomic_exchange(&stream->captured, 0) ? 0 : 901;
    if (!mine)
        return 901;
    mine = 0;
    atomic_fetch_sub(&own_captured, 1);
    return 0;
}

static CUresult is_capturing(struct stream *stream, int *status)
{
    *status = stream && stream != (void *)PER_THREAD ? atomic_load(&stream->captured) : mine;
    return 0;
}

static CUresult destroy(struct stream *stream)
{
    atomic_store(&stream->captured, 0);
    return 0;
}

static CUresult current(CUcontext *now)
{
    *now = &context;
    return 0;
}

void *real_functions[REAL_FUNCTIONS];
void *entry_real(int place)
{
    switch (place) {
    case AT_cuStreamBeginCapture_ptsz: return begin_capture;
    case AT_cuStreamEndCapture_ptsz: return end_capture;
    case AT_cuStreamIsCapturing: return is_capturing;
    case AT_cuStreamDestroy_v2: return destroy;
    default: return NULL;
    }
}
void *entry_call(int place)
{
    return entry_real(place);
}
void *entry_known(int place)
{
    return entry_real(place);
}
bool shim_ready(void)
{
    return true;
}
bool late_free(enum late wait)
{
    return false;
}

static void capture(struct stream *all)
{
    void *graph;
    int n = 1 + any(EACH);

    for (int i = 0; i < n; i++)
        expect(!cuStreamBeginCapture_ptsz(&all[i], 0, 0, 0, 0, 0));
    if (any(4) == 0) { /* once more: an error, and it goes on */
        expect(cuStreamBeginCapture_ptsz(&all[0], 0, 0, 0, 0, 0));
        expect(capture_any());
    }
    for (int i = 0; i < n; i++)
        if (any(8) == 0)
            expect(!cuStreamDestroy_v2(&all[i]));
        else
            expect(!cuStreamEndCapture_ptsz(&all[i], &graph));
}

/* It ends in the middle of a capture of its own stream. */
static void *ends_early(void *nothing)
{
    expect(!cuStreamBeginCapture_ptsz(NULL, 0, 0, 0, 0, 0));
    atomic_fetch_sub(&own_captured, 1); /* with the thread, as far as the driver is concerned */
    return nothing;
}

static void *work(void *data)
{
    intptr_t me = (intptr_t)data;
    void *graph;

    chance = 1 + me;
    while (!over) {
        capture(streams[me]);
        if (any(3) == 0) {
            expect(!cuStreamBeginCapture_ptsz(NULL, 0, 0, 0, 0, 0));
            expect(!cuStreamEndCapture_ptsz(NULL, &graph));
        }
        if (any(50) == 0) {
            pthread_t other;
            pthread_create(&other, NULL, ends_early, NULL);
            pthread_join(other, NULL);
        }
        if (any(20) == 0)
            capture_context_ends(&context);
        atomic_fetch_add(&turns, 1);
    }
    return NULL;
}

/* As still.c does: it is closed when no capture goes on, looked for with nobody inside; opened again where one does, and
 * for a while no new ones begin. */
static void between(void)
{
    for (int tries = 0; tries < 20 && gate_close(1000); tries++) {
        bool goes_on = capture_goes_on();
        if (!goes_on) {
            met++;
            expect(!own_captured);
            for (int i = 0; i < THREADS * EACH; i++)
                expect(!streams[i / EACH][i % EACH].captured);
        }
        capture_hold(HOLD_TO_CLOSE, goes_on);
        gate_open();
        if (!goes_on)
            break;
        usleep(50);
    }
    capture_hold(HOLD_TO_CLOSE, false);
    usleep(100);
}

static void at_the_end(void)
{
    expect(met > 0);
    expect(!capture_any());
    capture_in_child();
}

int main(int argc, char **argv)
{
    real_functions[REAL_cuCtxGetCurrent] = current;
    return run_threads(work, between, at_the_end, atoi(argv[argc - 1]));
}
