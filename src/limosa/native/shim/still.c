/* Holds the process still, takes its memory away and gives it back. */
#include "still.h"
#include "bulk.h"
#include "capture.h"
#include "contexts.h"
#include "driver.h"
#include "fds.h"
#include "gate.h"
#include "late.h"
#include "memory.h"
#include "park.h"
#include "protocol.h"
#include "serve.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LIMIT_STACK 0
#define LOOK_MS 100
#define USUAL_STACK 1024 /* what it is where nobody has set it */

static _Atomic int waiting; /* a wait for the device that was given up on is still under way */
static size_t stack_before[MAX_DEVICES]; /* 0: it has not been lowered */
static bool keeps_stack;
static enum state state;

enum state still_state(void)
{
    return state;
}

void still_keep_stack(bool keep)
{
    keeps_stack = keep;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

struct wait {
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool over;
    _Atomic bool left; /* nobody waits for it any longer */
    CUresult result;
    size_t n_made;
    CUcontext made[]; /* the application's own contexts: it may go on, and change its list, before this is over */
};

static void *wait_for_device(void *data)
{
    struct wait *wait = data;

    gate_exempt();
    capture_leave_alone();
    CUresult result = park_wait(wait->made, wait->n_made, &wait->left);
    pthread_mutex_lock(&wait->lock);
    wait->result = result;
    wait->over = true;
    bool left_alone = wait->left;
    pthread_cond_signal(&wait->done);
    pthread_mutex_unlock(&wait->lock);
    if (left_alone) {
        free(wait);
        atomic_store(&waiting, 0);
    }
    return NULL;
}

/* The device cannot be waited for with a limit: somebody else waits, and is left to it when the time is up. */
static CUresult device_done(uint64_t milliseconds)
{
    size_t n_made = contexts_count();
    struct wait *wait = calloc(1, sizeof *wait + n_made * sizeof wait->made[0]);
    uint64_t last = now_ms() + milliseconds;
    pthread_attr_t attributes;
    pthread_condattr_t clock;
    pthread_t thread;
    CUresult result = CUDA_ERROR_NOT_READY;

    if (!wait)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (; atomic_load(&waiting); poll(NULL, 0, 1))
        if (now_ms() >= last) {
            free(wait);
            return CUDA_ERROR_NOT_READY;
        }
    atomic_store(&waiting, 1);
    wait->n_made = n_made;
    contexts_copy(wait->made);
    pthread_mutex_init(&wait->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&wait->done, &clock);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, wait_for_device, wait)) {
        free(wait);
        atomic_store(&waiting, 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&wait->lock);
    while (!wait->over && now_ms() < last && !serve_is_alone()) { /* who has asked may have left */
        uint64_t next = now_ms() + LOOK_MS < last ? now_ms() + LOOK_MS : last;
        struct timespec then = {(time_t)(next / 1000), (long)(next % 1000) * 1000000};
        pthread_cond_timedwait(&wait->done, &wait->lock, &then);
    }
    bool over = wait->over;
    result = over ? wait->result : CUDA_ERROR_NOT_READY;
    wait->left = !over;
    pthread_mutex_unlock(&wait->lock);
    if (over) {
        free(wait);
        atomic_store(&waiting, 0);
    }
    return result;
}

/* Closes it at a moment at which no stream is being captured: looked for when it is closed and nobody is inside, so no
 * capture can begin afterwards. Those that go on are let finish, with the gate open; for half of the time no new ones are
 * let begin beside them, or a program that captures all the time would never be met between two. Not longer: a capture
 * may wait for a thread that wants to begin one. */
static int32_t close_between_captures(uint64_t begun, uint64_t milliseconds)
{
    for (;;) {
        uint64_t spent = now_ms() - begun;
        if (!gate_close(milliseconds > spent ? milliseconds - spent : 1))
            return CUDA_ERROR_NOT_READY;
        if (!capture_goes_on())
            return 0;
        capture_hold(HOLD_TO_CLOSE, now_ms() - begun < milliseconds / 2);
        gate_open();
        /* Not known to be over, it may be so all the same: the driver is asked now and then. */
        for (int turn = 0; turn < 20 && (capture_any() || !turn); turn++) {
            spent = now_ms() - begun;
            if (spent >= milliseconds)
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            if (spent >= milliseconds / 2)
                capture_hold(HOLD_TO_CLOSE, false);
            poll(NULL, 0, 1);
        }
    }
}

int32_t still_close(uint64_t milliseconds)
{
    uint64_t begun = now_ms();

    if (state != STATE_OPEN)
        return -EALREADY;
    int32_t closed = close_between_captures(begun, milliseconds);
    capture_hold(HOLD_TO_CLOSE, false); /* whoever waited there waits at the gate from here on, or goes on */
    if (closed)
        return closed;
    uint64_t spent = now_ms() - begun;
    CUresult result = device_done(milliseconds > spent ? milliseconds - spent : 1);
    if (result) {
        gate_open();
        return result;
    }
    state = STATE_CLOSED;
    late_at_rest(); /* what was freed need not be put away */
    bulk_gate(true);
    return 0;
}

static bool all_there(void)
{
    const struct mapping *mapping;
    const struct memory *memory;

    for (size_t i = 0; (mapping = mapping_nth(i)); i++)
        if (mapping->away)
            return false;
    for (size_t i = 0; (memory = memory_nth(i)); i++)
        if (!memory->driver)
            return false;
    return true;
}

int32_t still_unmap(void)
{
    const struct memory *memory;
    size_t coming = PROTOCOL_MOST;

    if (state == STATE_OPEN)
        return -EINVAL;
    for (size_t i = 0; (memory = memory_nth(i)); i++)
        coming += park_can(memory) && memory->kept < 0;
    if (!fds_room(coming))
        return -EMFILE; /* what comes back is held by a descriptor each */
    state = STATE_AWAY; /* or still is: a part may have come back before something failed */
    CUresult result = park_unmap();
    if (all_there())
        state = STATE_CLOSED;
    return result;
}

/* Descriptors are ours from here on. */
int32_t still_map(const uint64_t *ids, const int *fds, size_t n, size_t n_fds)
{
    int32_t result = state == STATE_OPEN ? -EINVAL : 0;

    for (size_t i = 0; i < n; i++) {
        struct memory *memory = memory_by_id(ids[i]);
        int fd = i < n_fds ? fds[i] : -1;
        if (result || !memory || (fd < 0 && !memory->driver && !memory->made)) {
            if (fd >= 0)
                fds_close(fd);
            result = result ? result : CUDA_ERROR_INVALID_HANDLE;
        } else {
            result = park_map(memory, fd);
        }
    }
    for (size_t i = n; i < n_fds; i++)
        fds_close(fds[i]);
    if (state == STATE_AWAY && all_there())
        state = STATE_CLOSED;
    return result;
}

/* The local memory of a context is saved with it: less stack, less to save. Each primary context has its own; one whose
 * limit the application has set is left alone. 0: what was lowered is put back. */
int32_t still_stack(size_t bytes)
{
    int n = 0;
    CUresult result = CUDA_SUCCESS;

    if (state == STATE_OPEN)
        return -EINVAL;
    result = real(cuDeviceGetCount)(&n);
    for (int device = 0; device < n && device < MAX_DEVICES && !result; device++) {
        CUcontext context = NULL;
        unsigned flags;
        int active = 0;
        if (bytes ? keeps_stack || stack_before[device] : !stack_before[device])
            continue;
        if ((result = real(cuDevicePrimaryCtxGetState)(device, &flags, &active)) == 0 && !active) {
            stack_before[device] = 0; /* it went with the context */
            continue;
        }
        if (result || (result = real(cuDevicePrimaryCtxRetain)(&context, device))) {
            if (!bytes)
                break; /* a context that cannot be reached has the low limit still */
            result = CUDA_SUCCESS; /* one that is not lowered takes longer to save */
            continue;
        }
        if (!(result = real(cuCtxSetCurrent)(context))) {
            size_t now = 0;
            if (!bytes) {
                if (!(result = real(cuCtxSetLimit)(LIMIT_STACK, stack_before[device])))
                    stack_before[device] = 0;
            } else if (!(result = real(cuCtxGetLimit)(&now, LIMIT_STACK)) && now == USUAL_STACK && bytes < now) {
                if (!(result = real(cuCtxSetLimit)(LIMIT_STACK, bytes)))
                    stack_before[device] = now;
            }
        }
        real(cuCtxSetCurrent)(NULL);
        real(cuDevicePrimaryCtxRelease_v2)(device);
    }
    return result;
}

/* Whoever comes through finds the stack as it was. */
int32_t still_open(void)
{
    if (state == STATE_AWAY)
        return -EBUSY; /* the application would meet addresses with nothing behind them */
    int32_t result = state == STATE_CLOSED ? still_stack(0) : 0;
    if (result)
        return result;
    park_unmake();
    state = STATE_OPEN;
    bulk_gate(false);
    gate_open();
    bulk_prepare(0); /* behind it: giving back takes a while, too */
    return 0;
}

void still_in_child(void)
{
    state = STATE_OPEN;
    memset(stack_before, 0, sizeof stack_before);
    atomic_store(&waiting, 0);
}
