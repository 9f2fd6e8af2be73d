/* Handles of communicators: comms.c alone, with addresses that its tables and libnccl are given to choose from. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *at; /* where the next record lies */

static void *chosen(size_t n, size_t size)
{
    void *found = at;

    at = NULL;
    return found ? memset(found, 0, n * size) : calloc(n, size);
}

#define calloc chosen
#include "comms.c"
#undef calloc

static struct comm *made(uint64_t id, void *record)
{
    at = record;
    return comms_new((struct comm_id){id, id}, 0, 0, NULL);
}

int main(void)
{
    static _Alignas(64) char world_was[4096], dead[4096];
    struct comm *world = made(1, NULL), *first = made(2, NULL);
    void *handle = comms_made(world, world_was), *of_first = comms_made(first, dead);

    comms_ended(first); /* the program has destroyed it: its place is free, its handle is not */
    struct comm *second = made(3, dead);
    void *of_second = comms_made(second, world_was); /* the world is elsewhere since a move */
    comms_ended(second);
    struct comm *third = made(4, NULL);
    void *of_third = comms_made(third, dead);

    void *all[] = {handle, of_first, of_second, of_third};
    struct comm *whose[] = {world, first, second, third};
    for (int i = 0; i < 4; i++) {
        if (comms_find(all[i]) != whose[i])
            printf("handle %d is another one's\n", i);
        for (int j = 0; j < i; j++)
            if (all[i] == all[j])
                printf("%d and %d have the same handle\n", j, i);
    }
    puts("done");
    return 0;
}
