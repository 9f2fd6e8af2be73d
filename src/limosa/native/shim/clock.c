/* The steady clock of whoever watches over NCCL: it stands still while the communicators are closed.
 *
 * PyTorch's watchdog notes the steady time before it calls NCCL, and ends the process once a call is older than the process
 * group's time limit, ten minutes as usual: it looks at the clock before it looks whether the call is done. A rank that was
 * suspended stands in such a call. So, for the library that asks NCCL for asynchronous errors, and for no other, the time
 * between the closing of communicators and their coming back is left out. It reads std::chrono::steady_clock by a function of
 * libstdc++, which is ours. What waits until a moment of that clock is told the kernel's moment.
 *
 * Readers take no lock. An odd number says that the clock is being changed; who finds that it has changed reads again. So
 * nobody sees it go back. */
#include "clock.h"
#include "compiler.h"
#include "find.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define SECOND 1000000000LL
#define MOST_WATCHING 8

static struct watching {
    _Atomic uintptr_t begin, end;
    _Atomic int64_t before; /* how far the kernel's was ahead when the library became known: that time it has seen */
} watching[MOST_WATCHING];
static _Atomic unsigned n_watching;

static _Atomic unsigned changes; /* 0: it has never stood still, and is the kernel's */
static _Atomic int64_t stands_at; /* 0: it goes */
static _Atomic int64_t behind; /* the kernel's by so much */

static struct watching *watches(const void *caller)
{
    uintptr_t at = (uintptr_t)caller;

    for (unsigned i = 0; i < MOST_WATCHING; i++) {
        uintptr_t end = atomic_load_explicit(&watching[i].end, memory_order_acquire);
        if (at < end && at >= atomic_load_explicit(&watching[i].begin, memory_order_relaxed))
            return &watching[i];
    }
    return NULL;
}

static int64_t kernels(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND + now.tv_nsec;
}

/* The time, and how far the kernel's is ahead of it. */
static int64_t stopped_time(int64_t *ahead)
{
    for (;;) {
        unsigned before = atomic_load(&changes);
        int64_t now = kernels(), at = atomic_load(&stands_at);
        at = at ? at : now - atomic_load(&behind);
        *ahead = now - at;
        if (!(before & 1) && atomic_load(&changes) == before)
            return at;
        sched_yield();
    }
}

void clock_watched_by(const void *caller)
{
    struct span span;
    int64_t ahead;

    if (watches(caller) || atomic_load(&n_watching) >= MOST_WATCHING || !find_span(caller, &span))
        return;
    unsigned place = atomic_fetch_add(&n_watching, 1); /* two threads at once: the same library twice */
    if (place >= MOST_WATCHING)
        return;
    stopped_time(&ahead);
    atomic_store(&watching[place].before, ahead);
    atomic_store(&watching[place].begin, span.begin);
    atomic_store(&watching[place].end, span.end);
}

void clock_stop(void)
{
    if (atomic_load(&stands_at))
        return;
    atomic_fetch_add(&changes, 1);
    atomic_store(&stands_at, kernels() - atomic_load(&behind));
    atomic_fetch_add(&changes, 1);
}

void clock_go(void)
{
    int64_t at = atomic_load(&stands_at);

    if (!at)
        return;
    atomic_fetch_add(&changes, 1);
    atomic_store(&behind, kernels() - at);
    atomic_store(&stands_at, 0);
    atomic_fetch_add(&changes, 1);
}

/* It may have been forked in the middle of either. */
void clock_in_child(void)
{
    atomic_store(&changes, (atomic_load(&changes) + 1) & ~1U);
    clock_go();
}

/* std::chrono::steady_clock::now() */
EXPORT int64_t _ZNSt6chrono3_V212steady_clock3nowEv(void)
{
    int64_t ahead, now = kernels();
    const struct watching *who;

    if (!atomic_load(&changes)
        || !(who = watches(__builtin_return_address(0)))) /* looked at behind the clock: see above */
        return now;
    return stopped_time(&ahead) + atomic_load(&who->before);
}

/* A moment of a caller's clock by the kernel's. */
static int64_t kernels_moment(const void *caller, int64_t moment)
{
    const struct watching *who = watches(caller);
    int64_t ahead;

    if (!who)
        return moment;
    stopped_time(&ahead);
    return moment + ahead - atomic_load(&who->before);
}

typedef int clockwait(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static clockwait *real_clockwait;

__attribute__((constructor)) static void begin(void)
{
    real_clockwait = (clockwait *)find_in(RTLD_NEXT, "pthread_cond_clockwait");
}

/* std::condition_variable, where the C library has it (2.30); where not, nobody is linked with it. */
EXPORT int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                                  const struct timespec *until)
{
    struct timespec moved;

    if (UNLIKELY(!real_clockwait))
        return EINVAL;
    if (UNLIKELY(atomic_load(&changes)) && clock == CLOCK_MONOTONIC && until->tv_sec >= 0
        && until->tv_sec < INT64_MAX / SECOND / 2) {
        int64_t moment = kernels_moment(__builtin_return_address(0), until->tv_sec * SECOND + until->tv_nsec);
        moved = (struct timespec){moment / SECOND, moment % SECOND};
        until = &moved;
    }
    return real_clockwait(condition, mutex, clock, until);
}
