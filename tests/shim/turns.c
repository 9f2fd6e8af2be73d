/* The gate opened and closed at once, again and again, while threads go through: nobody is in the driver behind a closed
 * gate. gate.c alone, with what it wants of others, and with a pause before each of its stores: what can come between two
 * of its instructions comes there. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define THREADS 6

static _Thread_local unsigned turn;

static void pause_now_and_then(void)
{
    turn = turn * 1103515245 + 12345;
    if (turn >> 16 & 1)
        usleep(50);
}

#ifdef __clang__
#define STORE __c11_atomic_store
#else
#define STORE __atomic_store_n
#endif
#undef atomic_store_explicit
#define atomic_store_explicit(at, value, order) (pause_now_and_then(), STORE(at, value, order))
#include "gate.c"

static _Atomic unsigned in_driver, over;

void capture_thread_ends(const struct reader *reader)
{
}

static void *calls(void *nothing)
{
    while (!atomic_load_explicit(&over, memory_order_relaxed)) {
        struct reader *reader = gate_enter();
        atomic_fetch_add(&in_driver, 1);
        pause_now_and_then();
        atomic_fetch_sub(&in_driver, 1);
        gate_leave(reader);
    }
    return nothing;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    unsigned wrong = 0, turns = 0;
    time_t end = time(NULL) + atoi(argv[argc - 1]);

    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, calls, NULL);
    for (; time(NULL) < end; turns++) {
        if (!gate_close(5000))
            break;
        for (int look = 0; look < 10; look++, usleep(5))
            wrong += atomic_load(&in_driver) != 0;
        gate_open();
        usleep(turns % 200);
    }
    printf("%u\n", wrong);
    fprintf(stderr, "%u turns\n", turns);
    over = 1;
    gate_open();
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
