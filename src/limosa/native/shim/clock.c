/* The steady clock of whoever watches over NCCL: it all but stands still while the communicators are closed.
 *
 * PyTorch's watchdog notes the steady time before it calls NCCL, and ends the process once a call is older than the process
 * group's time limit, ten minutes as usual: it looks at the clock before it looks whether the call is done. A rank that was
 * suspended stands in such a call. So, for the library that asks NCCL for asynchronous errors, and for no other, the time
 * between the closing of communicators and their coming back is left out. It reads std::chrono::steady_clock by a function of
 * libstdc++, which is ours. What waits until a moment of that clock is told the kernel's moment.
 *
 * It creeps meanwhile, and does not stand: a thread with a moment left to wait would wake each such moment all night.
 *
 * Readers take no lock. An odd number says that the clock is being changed; who finds that it has changed reads again. So
 * nobody sees it go back. */
#include "clock.h"
#include "compiler.h"
#include "find.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define MOST_WATCHING 8
#define CREEPS 14 /* slower by so many powers of two: a week is 37 seconds */

static struct watching {
    _Atomic uintptr_t begin, end;
    _Atomic int64_t before; /* how far the kernel's was ahead when the library became known: that time it has seen */
    atomic_bool reads; /* by our function; else the moments that it waits for are the kernel's own */
} watching[MOST_WATCHING];
static _Atomic unsigned n_watching;

static _Atomic unsigned changes; /* 0: it has never stood still, and is the kernel's */
static _Atomic int64_t stopped_at; /* by the kernel's; 0: it goes */
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

static int64_t now_of(int64_t kernel)
{
    int64_t stopped = atomic_load(&stopped_at), now = kernel - atomic_load(&behind);

    if (!stopped)
        return now;
    /* Of an image the kernel's may be another one, and earlier. */
    return now + (stopped - kernel) + (kernel > stopped ? (kernel - stopped) >> CREEPS : 0);
}

/* The time, and how far the kernel's is ahead of it. */
static int64_t stopped_time(int64_t *ahead)
{
    for (;;) {
        unsigned before = atomic_load(&changes);
        int64_t kernel = kernels(), now = now_of(kernel);
        *ahead = kernel - now;
        if (!(before & 1) && atomic_load(&changes) == before)
            return now;
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
    if (atomic_load(&stopped_at))
        return;
    atomic_fetch_add(&changes, 1);
    atomic_store(&stopped_at, kernels());
    atomic_fetch_add(&changes, 1);
}

void clock_go(void)
{
    if (!atomic_load(&stopped_at))
        return;
    atomic_fetch_add(&changes, 1);
    int64_t kernel = kernels(), now = now_of(kernel);
    atomic_store(&stopped_at, 0);
    atomic_store(&behind, kernel - now);
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

    if (!atomic_load(&n_watching)) /* looked at behind the clock, as all that follows: see above */
        return now;
    struct watching *who = watches(__builtin_return_address(0));
    if (!who)
        return now;
    atomic_store_explicit(&who->reads, true, memory_order_relaxed);
    return atomic_load(&changes) ? stopped_time(&ahead) + atomic_load(&who->before) : now;
}

/* A moment of a caller's clock by the kernel's. */
static int64_t kernels_moment(const void *caller, int64_t moment)
{
    const struct watching *who = atomic_load(&changes) ? watches(caller) : NULL;
    int64_t ahead;

    if (!who || !atomic_load_explicit(&who->reads, memory_order_relaxed))
        return moment;
    stopped_time(&ahead);
    moment += ahead - atomic_load(&who->before);
    return moment > 0 ? moment : 0;
}

typedef int clockwait(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static clockwait *_Atomic real_clockwait;
typedef bool futex_wait(void *, unsigned *, unsigned, bool, int64_t, int64_t);
static futex_wait *_Atomic real_futex_wait;

#define FUTEX_WAIT_UNTIL                                                                                               \
    _ZNSt28__atomic_futex_unsigned_base26_M_futex_wait_until_steadyEPjjbNSt6chrono8durationIlSt5ratioILl1ELl1EEEENS2_IlS3_ILl1ELl1000000000EEEE
#define NAME_OF(symbol) TEXT_OF(symbol)
#define TEXT_OF(symbol) #symbol

/* Also from another library's constructor, which may come before ours. */
__attribute__((constructor)) static void begin(void)
{
    atomic_store(&real_clockwait, (clockwait *)find_in(RTLD_NEXT, "pthread_cond_clockwait"));
    atomic_store(&real_futex_wait, (futex_wait *)find_in(RTLD_NEXT, NAME_OF(FUTEX_WAIT_UNTIL)));
    dlerror(); /* nobody else's business */
}

/* std::condition_variable, where the C library has it (2.30); where not, nobody is linked with it. */
EXPORT int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                                  const struct timespec *until)
{
    struct timespec moved;

    if (UNLIKELY(!atomic_load_explicit(&real_clockwait, memory_order_relaxed))) {
        begin();
        if (!atomic_load(&real_clockwait))
            return EINVAL;
    }
    if (UNLIKELY(atomic_load(&changes)) && clock == CLOCK_MONOTONIC && until->tv_sec >= 0
        && until->tv_sec < INT64_MAX / SECOND / 2 && until->tv_nsec >= 0 && until->tv_nsec < SECOND) {
        int64_t moment = kernels_moment(__builtin_return_address(0), until->tv_sec * SECOND + until->tv_nsec);
        moved = (struct timespec){moment / SECOND, moment % SECOND};
        until = &moved;
    }
    return atomic_load_explicit(&real_clockwait, memory_order_relaxed)(condition, mutex, clock, until);
}

/* std::future with a limit: false where the moment has come. Libraries may have a copy of their own, and libstdc++ is not there for
 * all to see where a library that is loaded later has brought it: then the kernel is asked as it asks (not as a private one). */
EXPORT bool FUTEX_WAIT_UNTIL(void *of, unsigned *address, unsigned value, bool has_end, int64_t seconds, int64_t rest)
{
    futex_wait *real = atomic_load(&real_futex_wait);

    if (has_end && seconds >= 0 && rest >= 0 && seconds < INT64_MAX / SECOND / 2) {
        int64_t moment = kernels_moment(__builtin_return_address(0), seconds * SECOND + rest);
        seconds = moment / SECOND;
        rest = moment % SECOND;
    }
    if (real)
        return real(of, address, value, has_end, seconds, rest);
    if (has_end && (seconds < 0 || rest < 0))
        return false;
    struct timespec until = {seconds, rest};
    return !syscall(SYS_futex, address, FUTEX_WAIT_BITSET, value, has_end ? &until : NULL, NULL, FUTEX_BITSET_MATCH_ANY)
        || errno != ETIMEDOUT;
}
