/* What a controller (controller.c) and the restore thread of its target (checkpoint.c) say to each other.
 *
 * A controller writes its request to NODE_FOLDER/requests/<number>.ask, listens on a socket requests/<number>, and sends
 * the target's restore thread a real-time signal whose value is the number. The thread connects, reads the request, does
 * the work, writes a reply and closes. So nothing is registered anywhere, a process that CRIU brought back answers at
 * once, requests queue up behind the one being served, and between two of them the target holds nothing that CRIU would
 * have to know of. The connection also tells each side that the other is gone.
 */
#ifndef LIMOSA_CHECKPOINT_H
#define LIMOSA_CHECKPOINT_H

#include "driver.h"

#include <signal.h>
#include <sys/un.h>

#define RESTORE_THREAD_NAME "cuda-restore"
/* Sent to that one thread only, which alone has it blocked for sure. */
#define REQUEST_SIGNAL (SIGRTMAX - 2)
#define REQUESTS_FOLDER NODE_FOLDER "/requests"
#define REQUEST_MAGIC 0x3151524774666f53ull /* "SoftGRQ1" */

enum request_kind {
    REQUEST_STATE = 1,
    REQUEST_THREAD,
    REQUEST_LOCK,
    REQUEST_CHECKPOINT,
    REQUEST_RESTORE,
    REQUEST_UNLOCK,
};

struct request {
    uint64_t magic;
    uint32_t kind;
    uint32_t timeout_ms; /* of a lock; 0: none */
    uint32_t faults;     /* FAULT_NO_DEVICE_MEMORY, FAULT_NO_HOST_MEMORY: what the target is to run out of */
    uint32_t n_pairs;    /* of a restore; 0: no map */
    CUcheckpointGpuPair pairs[NODE_MAX_GPUS];
};

struct reply {
    int32_t result; /* CUresult */
    int32_t value;  /* a state */
};

/* requests/<number>, and with ".ask" behind it. */
void request_path(uint64_t number, const char *suffix, char path[sizeof(((struct sockaddr_un *)0)->sun_path)]);

/* Called for each gated call once it is let through: the hazard of the first call after a restore. */
void checkpoint_first_call(const char *name);

/* A hazard, switched on: once a restored process has been killed, checkpoint calls hang until the switch is off. */
void checkpoint_node_hangs(void);

#endif
