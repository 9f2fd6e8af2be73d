/* What is said over the control socket: packets (SOCK_SEQPACKET) of one message, records behind it, descriptors beside.
 * parking/protocol.py is the other end; tests/shim compares the two. Numbers are the machine's own: both ends are on it. */
#ifndef LIMOSA_PROTOCOL_H
#define LIMOSA_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL_MAGIC 0x4c4d5341u
#define PROTOCOL_VERSION 3
#define PROTOCOL_MOST 200 /* records, descriptors in a packet */
#define PROTOCOL_WORDS 4096 /* of 8 bytes, behind a message to the shim */
#define PROTOCOL_STAND_IN 25449 /* seconds: SO_RCVTIMEO of what a restore puts in the place of the socket */
#define PROTOCOL_KEPT_MOST 4096 /* descriptors that are kept while the memory is away */
#define PROTOCOL_PLACES_MOST 40 /* places, in one packet that is no longer than PROTOCOL_MOST ids */

enum verb {
    VERB_HELLO = 1, /* → state, pid, memories, bytes that can be put away */
    VERB_LIST, /* → packets of records, a: how many there are in all, b: of them in this packet */
    VERB_EXPORT, /* ids → descriptors, in that order */
    VERB_CLOSE, /* a: milliseconds → gate closed, all work done; or result 600, 900 (a stream is being
                 * captured), and the gate is open */
    VERB_OPEN,
    VERB_UNMAP,
    VERB_MAP, /* ids with descriptors → d: where it failed (1 import, 2 map, 3 access), device << 16 */
    VERB_STACK, /* a: bytes, 0: what it was before */
    VERB_COUNTS, /* → what was left to the driver, as records (kind, calls, bytes); b: checkpoints that were refused, because
                  * memory was there that the driver would never have brought back */
    VERB_BULK, /* a: bytes to have ready for the driver's own saving, 0: none → b: ready, c: asked for the last time */
    VERB_DEVICES, /* → the UUIDs of the process's GPUs by its own numbers, 16 bytes each, a of them; behind them those that it
                   * saw when it initialised the driver, b of them: of others it cannot import memory. a: those alone, for which
                   * the driver is not asked: the process may be checkpointed */
    VERB_KEEP, /* descriptors to be kept while the memory is away: whoever kills the vault loses nothing. In packets: from the
                * a-th on, of b in all; those before are let go of when all b are there. b is 0: let go */
    VERB_KEPT, /* → them, from the a-th on; a: how many there are, 0 where one of them is gone */
    VERB_CALLED, /* → functions that were called or asked for: packets; a: how many there are in all, b: of them in this
                  * packet; of each what is known of it (enum role), what was done (1: called, 2: asked for), its name, 0 */
    VERB_SHARE, /* of another process's shim: a: memory, b: token, c: share of a legacy handle → its descriptor, or -EAGAIN
                 * while it is away */
    VERB_SHARERS, /* → whom memory was given by such handles: packets of pairs (share, pid), a and b as for LIST */
    VERB_MAKE, /* ids of memory that is away → it is made anew by this process: descriptors; MAP without one maps that */
    VERB_PLACES, /* a: a number of the operation; places, at most PROTOCOL_PLACES_MOST: where its GPUs are, once a restore
                  * has changed them. The latest of one operation counts, as if the others had not been */
    /* NCCL's communicators; b: enum gate_phase of their gate. */
    VERB_COMMS, /* a: 0 → comm_records, 1 → pair_records, 2 → want_records; packets: a: how many in all, b: in this one;
                      * c: phase | calls that are inside << 32, d: goes up with every count */
    VERB_CUT, /* calls that were not counted yet wait from here on */
    VERB_LIMITS, /* limit_records: those are let through up to there */
    VERB_REST, /* a: milliseconds → nobody passes any more, all work is done */
    VERB_SHUT, /* numbers, a: milliseconds → these communicators are closed; all their ranks are at rest */
    VERB_IDS, /* numbers → unique ids to make those with, 128 bytes each */
    VERB_JOIN, /* join_records, a: milliseconds → those communicators are made again, in this order */
    VERB_LET, /* all calls pass; what was not made again is at its end */
};

enum state { STATE_OPEN, STATE_CLOSED, STATE_AWAY };

struct message {
    uint32_t magic;
    uint16_t version, verb;
    uint32_t number;
    int32_t result; /* CUresult, or minus an errno */
    uint64_t a, b, c, d;
};

enum { RECORD_PLAIN = 1, RECORD_SHARED = 2, RECORD_AWAY = 4, RECORD_MAPPED = 8, RECORD_IMPORTED = 16 };

struct record {
    uint64_t id, bytes, at; /* at: where it is first mapped */
    uint64_t share; /* other processes have it, too, by this number; else 0 */
    uint32_t device, flags;
    int32_t owner; /* pid of the process that gave it, where another did; -1: nobody knows which; else 0 */
    uint32_t nothing;
};

/* COMM_AGAIN: it was made again an odd number of times. COMM_NEWER: the process calls, or may call, a function that is in no
 * list. */
enum {
    COMM_JOINING = 1,
    COMM_CLOSED = 2,
    COMM_CAPTURED = 4,
    COMM_STRANGE = 8,
    COMM_MEMORY = 16,
    COMM_AGAIN = 32,
    COMM_NEWER = 64,
};

struct comm_record {
    uint64_t id[2]; /* the same in all ranks */
    uint64_t number; /* in this process */
    uint64_t collectives;
    int32_t rank, ranks, device;
    uint32_t flags;
    char why[32]; /* the function that makes it strange, or is newer */
};

struct pair_record {
    uint64_t number, sent, received;
    uint32_t peer, nothing;
};

struct limit_record {
    uint64_t id[2];
    uint64_t limit;
    uint16_t kind, rank; /* enum count_kind; of this process's ranks, from 1 on: 0 for all of them */
    uint32_t peer;
};

struct join_record {
    uint64_t number;
    char unique_id[128];
};

/* One GPU of those that the process could open: the UUID of where it was before the operation, of where it is now, and that
 * one's PCI bus id. */
struct gpu_place {
    unsigned char was[16], is[16];
    uint32_t domain;
    uint8_t bus, slot, function, nothing;
};

#endif
