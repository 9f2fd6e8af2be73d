/* What is said over the control socket: packets (SOCK_SEQPACKET) of one message, records behind it, descriptors beside.
 * parking/protocol.py is the other end; tests/shim compares the two. Numbers are the machine's own: both ends are on it. */
#ifndef LIMOSA_PROTOCOL_H
#define LIMOSA_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL_MAGIC 0x4c4d5341u
#define PROTOCOL_VERSION 3
#define PROTOCOL_MOST 200 /* records, descriptors in a packet */
#define PROTOCOL_STAND_IN 25449 /* seconds: SO_RCVTIMEO of what a restore puts in the place of the socket */
#define PROTOCOL_KEPT_MOST 4096 /* descriptors that are kept while the memory is away */

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

#endif
