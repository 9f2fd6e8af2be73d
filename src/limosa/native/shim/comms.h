/* The communicators of the process: what the application holds, what is behind it, and the gate that NCCL's calls pass.
 *
 * The application's handle is the first real communicator's address, and stays what it is; after a move another real one
 * is behind it. The gate is apart from the driver's: while it is being closed, calls that other ranks have made already are
 * let through, up to a limit for each communicator (DESIGN.md, "The cut"). */
#ifndef LIMOSA_COMMS_H
#define LIMOSA_COMMS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver_api.h"
#include "nccl_api.h"

/* The same in all ranks of a communicator: from its unique id, or from its parent's and how it was made. */
struct comm_id {
    uint64_t a, b;
};

enum count_kind { COUNT_COLLECTIVE, COUNT_SEND, COUNT_RECEIVE };

/* How often a rank has sent to, or received from, another; and how often it may while the gate is being closed. */
struct pair {
    uint64_t count, limit;
};

struct registered {
    struct registered *next;
    void *buffer, *real; /* the application's handle is the structure's address */
    size_t bytes;
};

/* An operator of the application's own: it goes on using the first number. */
struct reduction {
    struct reduction *next, *later; /* of the communicator's; of those that a group's end destroys */
    struct comm *comm;
    int number, real, type, residence;
    void *scalar; /* where it is on the device */
    unsigned char value[8]; /* where it was the host's */
};

struct comm {
    struct comm *next; /* in the order in which they were made; never taken out */
    void *handle;
    void *_Atomic real; /* NULL: not made yet, closed, or at its end */
    void *_Atomic coming; /* where NCCL writes that of a split or a shrink: maybe long after the call, of one that failed too */
    void **place; /* where the application waits for its handle of that; NULL: it has it. With the lock held */
    struct comm_id id;
    uint64_t number, children;
    int rank, ranks, device;
    CUcontext context;
    struct nccl_config *config; /* a copy, its texts too; NULL: none was given */
    struct comm *parent; /* it was split from it, or shrunk */
    bool joining; /* the call that makes it is under way */
    bool doomed; /* its parent was aborted meanwhile */
    atomic_bool measuring; /* a thread does it just now */
    _Atomic uint64_t busy; /* it does not block, and what was begun on it goes on behind the call: which; 0: nothing */
    bool ended; /* destroyed or aborted by the application, or never came; if it has failed the real one is there still */
    bool closed; /* by us */
    unsigned made_again; /* how often */
    bool has_new_id; /* that it is to be made again with; the rank that drew it keeps it until that is done */
    struct nccl_unique_id new_id;
    const char *_Atomic strange; /* the function that was called on it and that we cannot repeat */
    _Atomic uint32_t captured; /* operations that are part of a CUDA graph */
    uint64_t collectives, limit;
    struct pair *sent, *received; /* one for each rank */
    struct registered *registered;
    struct reduction *reductions;
};

/* What a call counts as: one of a group's, too. */
struct counted {
    struct comm *comm;
    enum count_kind kind;
    int peer;
};

enum gate_phase { PHASE_OPEN, PHASE_CUT, PHASE_SHUT };

struct comm_id comm_id_mix(struct comm_id id, const void *bytes, size_t n);
struct nccl_config *comms_copy(const struct nccl_config *config); /* with its texts; NULL of NULL */
/* NULL: no communicator of the application's. Takes no lock. */
struct comm *comms_find(const void *handle);
struct comm *comms_new(struct comm_id id, int ranks, int rank, const struct nccl_config *config);
/* The real one is there: from here on the application can name it. Returns what it is to have. */
void *comms_made(struct comm *comm, void *real);
/* The same of one that comes later, once: written to its place, as NCCL would. False: it has not come (NULL). */
bool comms_arrived(struct comm *comm, void *real);
void comms_ended(struct comm *comm);
/* It did not come into being. The application has a handle of it, and is to abort that. */
void comms_failed(struct comm *comm);
/* What cannot be counted, as a communicator that is to be made: let through where some rank has made it already. */
void comms_enter(const struct counted *steps, size_t n);
void comms_leave(void);
/* Before that: NCCL has refused it, so it is none. The other ranks may never call it. */
void comms_uncount(const struct counted *steps, size_t n);
/* For those who only ask: false while communicators are closed; else comms_asked is to follow. Nothing is another than before
 * by that, and nobody waits for them but comms_shut: a rank may ask without a pause. */
bool comms_ask(void);
void comms_asked(void);
/* For a call that is never counted, whenever it comes. One that is captured waits only while communicators are being closed.
 * False: it is to wait; else comms_leave is to follow. */
bool comms_enter_uncounted(bool captured);
void comms_wait(void); /* until the gate may have been opened */
/* It is there: whoever makes it has come to its end. */
void comms_came(struct comm *comm);
/* A split's size and rank are known only when it is there. */
void comms_sized(struct comm *comm, void *real, int (*count)(void *, int *), int (*rank)(void *, int *));
enum gate_phase comms_phase(void);

/* For the shim's own thread. */
struct comm *comms_first(void);
void comms_lock(void);
void comms_unlock(void);
/* Nobody is inside or asks, and nobody comes in until comms_others(): what NCCL tells of a communicator is told to one thread
 * at a time. False: somebody is. */
bool comms_alone(void);
void comms_others(void);
uint64_t comms_changes(void); /* goes up with every count: two looks with the same number saw the same */
unsigned comms_inside(void);
struct want {
    struct comm_id id;
    uint64_t wanted;
    uint32_t kind, peer, thread;
    uint32_t rank; /* that wants it, from 1 on; 0: it has none yet */
};
/* What threads that wait at the gate want to get to; with the lock held. */
size_t comms_wants(struct want *found, size_t most);
void comms_cut(void); /* no call is let through that was not counted yet */
/* Raises it; rank: which of the process's ranks, or -1 for all of them. */
void comms_limit(struct comm_id id, uint32_t kind, int rank, uint32_t peer, uint64_t limit);
bool comms_shut(void); /* false: somebody is inside, or asks still */
bool comms_rest(void); /* no captured call passes either; false: one is inside */
void comms_open(void);
void comms_in_child(void);

#endif
