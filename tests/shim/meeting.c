/* The gate before NCCL (comms.c) of one rank, for a model of ranks: test_shim_meeting.py loads it once for each. What makes and
 * ends a communicator here does, in the order of nccl.c, what the functions there do around the real call. */
#include "comms.c"
#include "protocol.h"

/* One that is there from the beginning. */
void *rank_comm(uint64_t id, int ranks, int rank)
{
    struct comm *comm = comms_new((struct comm_id){id, 0}, ranks, rank, NULL);

    comm->joining = false;
    return comm;
}

/* Before the gate: by a unique id, the call is counted on what it makes. */
void *rank_begins(uint64_t id, int ranks, int rank)
{
    return comms_new((struct comm_id){id, 0}, ranks, rank, NULL);
}

/* Behind it: by a split, which is counted on its parent. */
void *rank_splits(uint64_t id)
{
    return comms_new((struct comm_id){id, 0}, 0, -1, NULL);
}

static int told_ranks, told_rank;

static int tell_ranks(void *real, int *ranks)
{
    (void)real;
    *ranks = told_ranks;
    return 0;
}

static int tell_rank(void *real, int *rank)
{
    (void)real;
    *rank = told_rank;
    return 0;
}

/* It has come. */
void rank_made(struct comm *comm, int ranks, int rank)
{
    static _Atomic bool used;

    comms_made(comm, malloc(1));
    while (atomic_exchange(&used, true))
        ;
    told_ranks = ranks;
    told_rank = rank;
    if (comm->ranks <= 0)
        comms_sized(comm, comm->real, tell_ranks, tell_rank);
    atomic_store(&used, false);
    comm->joining = false;
}

void rank_ended(struct comm *comm)
{
    comms_ended(comm);
}

/* A call, or a group of n: communicators, kinds, peers. */
void rank_enter(void **comms, const int *kinds, const int *peers, size_t n)
{
    struct counted steps[64];

    for (size_t i = 0; i < n && i < 64; i++)
        steps[i] = (struct counted){comms[i], (enum count_kind)kinds[i], peers[i]};
    comms_enter(steps, n);
}

/* All of one moment, as cut.c tells it: communicators; which, peer, sent, received of each pair; the wants. */
uint64_t rank_look(struct comm_record *comms, size_t *n_comms, uint64_t *pairs, size_t *n_pairs, struct want *wants,
                   size_t *n_wants)
{
    comms_lock();
    *n_comms = *n_pairs = 0;
    for (const struct comm *comm = comms_first(); comm; comm = comm->next) {
        if (comm->ended)
            continue;
        comms[(*n_comms)++] = (struct comm_record){
            .id = {comm->id.a, comm->id.b},
            .number = comm->number,
            .collectives = comm->collectives,
            .rank = comm->rank,
            .ranks = comm->ranks,
            .device = 0,
            .flags = comm->joining ? COMM_JOINING : 0,
        };
        for (int peer = 0; comm->sent && comm->received && peer < comm->ranks; peer++)
            if (comm->sent[peer].count || comm->received[peer].count) {
                uint64_t *pair = pairs + 4 * (*n_pairs)++;
                pair[0] = comm->number;
                pair[1] = (uint64_t)peer;
                pair[2] = comm->sent[peer].count;
                pair[3] = comm->received[peer].count;
            }
    }
    *n_wants = comms_wants(wants, 64);
    uint64_t inside_now = comms_inside();
    comms_unlock();
    return inside_now;
}

void rank_limit(uint64_t id, uint32_t kind, uint32_t peer, uint64_t most)
{
    comms_limit((struct comm_id){id, 0}, kind, -1, peer, most);
}
