/* A thread that asks NCCL for a communicator's asynchronous error without a pause, for nccl_rank.py. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

static int (*ask)(void *, int *);
static void *comm;
static pthread_t thread;
static atomic_bool over;
static _Atomic int came;

static void *go_on(void *none)
{
    int error = 0;

    while (!atomic_load(&over) && !error)
        if (ask(comm, &error) || error)
            atomic_store(&came, error ? error : -1);
    return none;
}

int begin_asking(int (*function)(void *, int *), void *of)
{
    ask = function;
    comm = of;
    return pthread_create(&thread, NULL, go_on, NULL);
}

/* What has come of it: 0 as long as all is well. */
int end_asking(void)
{
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    return atomic_load(&came);
}
