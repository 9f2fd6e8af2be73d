/* The gate before NCCL (comms.c) of one rank, for a model of ranks: test_shim_meeting.py loads it once for each. */
#include "comms.c"

void *rank_comm(uint64_t id, int ranks, int rank)
{
    struct comm *comm = comms_new((struct comm_id){id, 0}, ranks, rank, NULL);

    comm->joining = false;
    return comm;
}

/* A call, or a group of n: communicators, kinds, peers. */
void rank_enter(void **comms, const int *kinds, const int *peers, size_t n)
{
    struct counted steps[64];

    for (size_t i = 0; i < n && i < 64; i++)
        steps[i] = (struct counted){comms[i], (enum count_kind)kinds[i], peers[i]};
    comms_enter(steps, n);
}

/* All of one moment: collectives of each; which, peer, sent, received of each pair; the wants. */
uint64_t rank_look(uint64_t *collectives, uint64_t *pairs, size_t *n_pairs, struct want *wants, size_t *n_wants)
{
    size_t n = 0;

    comms_lock();
    *n_pairs = 0;
    for (const struct comm *comm = comms_first(); comm; comm = comm->next) {
        collectives[n++] = comm->collectives;
        for (int peer = 0; peer < comm->ranks; peer++)
            if (comm->sent[peer].count || comm->received[peer].count) {
                uint64_t *pair = pairs + 4 * (*n_pairs)++;
                pair[0] = n; /* counted from 1 */
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
    comms_limit((struct comm_id){id, 0}, kind, peer, most);
}
