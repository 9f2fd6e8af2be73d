/* For programs that drive one part of the shim by threads: a choice of its own for each, so many seconds, what was wrong. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define THREADS 6
#define ENOUGH 5000 /* of what threads do */
#define ENOUGH_ROUNDS 100 /* of what is done meanwhile */

static _Atomic unsigned over, wrong, turns;
static _Thread_local unsigned chance;

static unsigned any(unsigned below)
{
    chance = chance * 1103515245 + 12345;
    return (chance >> 16) % below;
}

static void expect(int right)
{
    if (!right)
        atomic_fetch_add(&wrong, 1);
}

static double since(const struct timespec *begin)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec - begin->tv_sec + (now.tv_nsec - begin->tv_nsec) / 1e9;
}

/* THREADS threads and what the main one does again and again meanwhile: for so long, and longer on a machine that has little
 * time for them. Tells what was wrong, and how much was done. */
static int run_threads(void *(*work)(void *), void (*meanwhile)(void), void (*at_the_end)(void), int seconds)
{
    pthread_t threads[THREADS];
    struct timespec begin;
    unsigned rounds = 0;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (intptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)i);
    for (; since(&begin) < seconds || ((turns < ENOUGH || rounds < ENOUGH_ROUNDS) && since(&begin) < 20 * seconds);
         rounds++)
        meanwhile();
    over = 1;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    at_the_end();
    printf("%u wrong\n", wrong);
    fprintf(stderr, "%u turns\n", turns);
    return 0;
}
