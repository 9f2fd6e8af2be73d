/* The clock of clock.c in a library that watches over communicators: this one. */
#include "clock.c"

void *find_in(void *library, const char *symbol)
{
    return dlsym(library, symbol);
}

/* Of this library, by the linker's own names: what lies beside it is another one's. */
extern const char __ehdr_start, _end;

bool find_span(const void *address, struct span *span)
{
    *span = (struct span){(uintptr_t)&__ehdr_start, (uintptr_t)&_end};
    return (uintptr_t)address >= span->begin && (uintptr_t)address < span->end;
}

void becomes_known(void)
{
    clock_watched_by((const void *)becomes_known);
}

int64_t reads(void)
{
    return _ZNSt6chrono3_V212steady_clock3nowEv();
}

/* Reads it until it is told to end; returns whether it was ever seen to go back. */
static atomic_bool enough;

void ends(void)
{
    atomic_store(&enough, true);
}

bool goes_back(void)
{
    for (int64_t last = reads(), now; !atomic_load(&enough); last = now)
        if ((now = reads()) < last)
            return true;
    return false;
}

/* Waits until the clock is so much further, as std::condition_variable does; returns how long that took by the kernel's. */
int64_t waits(int64_t nanoseconds)
{
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    int64_t begun = kernels(), moment = reads() + nanoseconds;
    struct timespec until = {moment / SECOND, moment % SECOND};

    pthread_mutex_lock(&mutex);
    while (pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &until) != ETIMEDOUT)
        ;
    pthread_mutex_unlock(&mutex);
    return kernels() - begun;
}

/* The same as std::future::wait_for does. */
int64_t expects(int64_t nanoseconds)
{
    int64_t begun = kernels(), moment = reads() + nanoseconds;
    unsigned none = 0;

    while (FUTEX_WAIT_UNTIL(NULL, &none, 0, true, moment / SECOND, moment % SECOND))
        ;
    return kernels() - begun;
}
