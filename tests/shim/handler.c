/* The gate as a signal finds it between a call's counting and its look: gate.c alone, with what it wants of others. */
#include "gate.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

void capture_thread_ends(struct reader *reader)
{
}

static _Atomic int through;
static struct reader *_Atomic mine;

static void *interrupted(void *nothing)
{
    struct reader *reader = gate_enter();
    gate_leave(reader);
    mine = reader;
    while (!atomic_load(&gate_closed))
        ;
    /* What gate_enter does first; then the handler comes. */
    atomic_store(&reader->inside, 1);
    gate_leave(gate_enter());
    through = 1;
    printf("behind it %u\n", atomic_load(&reader->inside));
    /* Inside of a call that has passed, a handler passes, whatever the gate is. */
    atomic_store(&reader->inside, 0);
    gate_enter();
    atomic_store(&gate_closed, 1);
    gate_leave(gate_enter());
    atomic_store(&gate_closed, 0);
    printf("inside %u\n", atomic_load(&reader->inside));
    gate_leave(reader);
    printf("outside %u\n", atomic_load(&reader->inside));
    return nothing;
}

int main(void)
{
    pthread_t thread;

    pthread_create(&thread, NULL, interrupted, NULL);
    while (!mine)
        ;
    printf("closed %d\n", gate_close(2000));
    usleep(300000);
    printf("through %d\n", through);
    gate_open();
    pthread_join(thread, NULL);
    return 0;
}
