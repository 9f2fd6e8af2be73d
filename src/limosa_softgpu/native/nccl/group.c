/* Groups: what a thread calls between ncclGroupStart and ncclGroupEnd is one launch for each communicator. */
#include "comm.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct comm *comm; /* held */
    struct operation operation;
};

static _Thread_local struct {
    int depth;
    ncclResult_t failed;
    struct entry *entries;
    int n, room;
    struct start *starts;
    int n_starts;
} group;

void group_begin(void)
{
    group.depth++;
}

ncclResult_t group_said(ncclResult_t result)
{
    if (group.depth > 0 && result != ncclSuccess && result != ncclInProgress)
        group.failed = result;
    return result;
}

ncclResult_t group_add(struct comm *comm, const struct operation *operation)
{
    if (group.depth == 0) {
        struct aside *aside = NULL;
        ncclResult_t result = launch(comm, operation, 1, &aside);
        return result == ncclSuccess ? launch_aside(aside) : result;
    }
    if (group.n == group.room) {
        int room = group.room ? 2 * group.room : 16;
        struct entry *more = realloc(group.entries, (size_t)room * sizeof(*more));
        if (!more)
            return ncclSystemError;
        group.entries = more;
        group.room = room;
    }
    comm_keep(comm);
    group.entries[group.n++] = (struct entry){comm, *operation};
    return ncclSuccess;
}

ncclResult_t group_add_start(const struct start *start)
{
    struct start alone = *start;

    if (group.depth == 0) {
        ncclResult_t result = start_all(&alone, 1);
        /* NCCL says so of a split that goes on: its parent tells. */
        return start->parent && result == ncclInProgress ? ncclSuccess : result;
    }
    struct start *more = realloc(group.starts, (size_t)(group.n_starts + 1) * sizeof(*more));
    if (!more) {
        start_drop(&alone);
        return ncclSystemError;
    }
    group.starts = more;
    group.starts[group.n_starts++] = *start;
    return ncclSuccess;
}

/* Launch what is of the communicator of entry i, and drop it from the list. */
static ncclResult_t launch_of(struct entry *entries, int n, int i, struct operation *together, struct aside **aside)
{
    struct comm *comm = entries[i].comm;
    int found = 0;

    for (int other = i; other < n; other++)
        if (entries[other].comm == comm) {
            together[found++] = entries[other].operation;
            entries[other].comm = NULL;
        }
    ncclResult_t result = launch(comm, together, found, aside);
    while (found-- > 0)
        comm_drop(comm);
    return result;
}

/* What was begun and is not to be. */
static void give_up(struct start *starts, int n_starts, struct entry *entries, int n)
{
    for (int i = 0; i < n_starts; i++) {
        *starts[i].to = NULL;
        if (comm_unlist(starts[i].comm))
            comm_end(starts[i].comm);
        start_drop(&starts[i]);
    }
    for (int i = 0; i < n; i++)
        comm_drop(entries[i].comm);
}

static ncclResult_t worse(ncclResult_t one, ncclResult_t other)
{
    return other != ncclSuccess && (one == ncclSuccess || one == ncclInProgress) ? other : one;
}

ncclResult_t group_end(bool simulate, int *n_operations)
{
    if (group.depth == 0) {
        say("no group was started");
        return ncclInvalidUsage;
    }
    if (--group.depth > 0)
        return ncclSuccess;
    /* Callbacks of the driver's may start a group of their own: this one is taken out first. */
    struct entry *entries = group.entries;
    struct start *starts = group.starts;
    int n = group.n, n_starts = group.n_starts;
    ncclResult_t result = group.failed;
    memset(&group, 0, sizeof(group));
    if (n_operations)
        *n_operations = n;
    for (int i = 0; simulate && i < n; i++) /* NCCL launches these all the same */
        simulate = entries[i].comm->blocking;
    if (result != ncclSuccess) {
        give_up(starts, n_starts, entries, n);
    } else {
        if (simulate) { /* operations: communicators come all the same, as with NCCL */
            give_up(NULL, 0, entries, n);
            n = 0;
        }
        if (n_starts)
            result = start_all(starts, n_starts);
        struct operation *together = n ? malloc((size_t)n * sizeof(*together)) : NULL;
        struct aside *aside = NULL;
        for (int i = 0; together && i < n; i++)
            if (entries[i].comm)
                result = worse(result, launch_of(entries, n, i, together, &aside));
        result = worse(result, launch_aside(aside));
        free(together);
    }
    free(entries);
    free(starts);
    return result;
}
