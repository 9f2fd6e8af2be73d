/* Which communicators there are, and how long each is kept: a handle that is wrong, or of a communicator that has gone, is
 * never followed. */
#include "comm.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the list, references and the last words */
static struct comm *comms;
static char last_words[256];

/* A child has no communicator: their memory and threads are its parent's. */
static void forked(void)
{
    pthread_mutex_init(&mutex, NULL);
    comms = NULL;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forked);
}

void say(const char *format, ...)
{
    va_list arguments;

    pthread_mutex_lock(&mutex);
    va_start(arguments, format);
    vsnprintf(last_words, sizeof(last_words), format, arguments);
    va_end(arguments);
    pthread_mutex_unlock(&mutex);
}

const char *said_last(void)
{
    return last_words;
}

struct comm *comm_new(int n, int rank, const char *name)
{
    struct comm *comm = calloc(1, sizeof(*comm));

    if (!comm)
        return NULL;
    comm->references = 1;
    comm->n = n;
    comm->rank = rank;
    strcpy(comm->name, name);
    pthread_mutex_init(&comm->mutex, NULL);
    pthread_mutex_init(&comm->launching, NULL);
    pthread_cond_init(&comm->changed, NULL);
    return comm;
}

void comm_list(struct comm *comm)
{
    pthread_mutex_lock(&mutex);
    comm->references++;
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&mutex);
}

void comm_keep(struct comm *comm)
{
    pthread_mutex_lock(&mutex);
    comm->references++;
    pthread_mutex_unlock(&mutex);
}

struct comm *comm_hold(ncclComm_t handle)
{
    struct comm *found;

    pthread_mutex_lock(&mutex);
    for (found = comms; found && found != handle; found = found->next)
        ;
    if (found)
        found->references++;
    pthread_mutex_unlock(&mutex);
    if (!found)
        say("this is no communicator");
    return found;
}

void comm_drop(struct comm *comm)
{
    pthread_mutex_lock(&mutex);
    bool last = --comm->references == 0;
    pthread_mutex_unlock(&mutex);
    if (!last)
        return;
    while (comm->registrations) {
        struct registration *next = comm->registrations->next;
        free(comm->registrations);
        comm->registrations = next;
    }
    free((void *)(uintptr_t)comm->config.netName);
    free((void *)(uintptr_t)comm->config.commName);
    pthread_cond_destroy(&comm->changed);
    pthread_mutex_destroy(&comm->mutex);
    pthread_mutex_destroy(&comm->launching);
    free(comm);
}

bool comm_unlist(struct comm *comm)
{
    pthread_mutex_lock(&mutex);
    struct comm **at = &comms;
    while (*at && *at != comm)
        at = &(*at)->next;
    bool found = *at != NULL;
    if (found)
        *at = comm->next;
    pthread_mutex_unlock(&mutex);
    if (found)
        comm_drop(comm);
    return found;
}
