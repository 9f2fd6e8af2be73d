/* What a controller (controller.c) and the restore thread of its target (checkpoint.c) say to each other.
 *
 * A controller writes its request to NODE_FOLDER/requests/<number>.ask and sends the target's restore thread a real-time
 * signal whose value is the number. The thread reads the request, takes its name away, does the work, and writes
 * <number>.answer, for which the controller looks. Both are symbolic links whose text is what they say: they are there
 * or not, and neither reading nor writing one takes a descriptor.
 *
 * So nothing is registered anywhere, a process that CRIU brought back answers at once, requests queue up behind the one
 * being served, and a process that is frozen for CRIU in the middle of an answer holds nothing that CRIU would stumble
 * over.
 */
#ifndef LIMOSA_CHECKPOINT_H
#define LIMOSA_CHECKPOINT_H

#include "driver.h" // IWYU pragma: export

#include <signal.h>

#define RESTORE_THREAD_NAME "cuda-restore"
/* Sent to that one thread only, which alone has it blocked for sure. */
#define REQUEST_SIGNAL (SIGRTMAX - 2)
#define REQUESTS_FOLDER NODE_FOLDER "/requests"
#define REQUEST_MAGIC 0x3151524774666f53ull /* "SoftGRQ1" */

enum request_kind {
    REQUEST_STATE = 1,
    REQUEST_LOCK,
    REQUEST_CHECKPOINT,
    REQUEST_RESTORE,
    REQUEST_UNLOCK,
};

struct request {
    uint64_t magic;
    uint64_t pid_namespace; /* the controller's pid is one of this namespace (an inode) */
    int32_t controller;
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

/* requests/<number>.ask and .answer */
#define REQUEST_PATH_ROOM 96
void request_path(uint64_t number, const char *suffix, char path[REQUEST_PATH_ROOM]);

/* A request as the text of a link: hexadecimal, without the pairs that it does not have. (Short enough then for the file
 * system to keep it in the link itself: a node whose memory is all taken can still be asked.) */
#define REQUEST_BYTES(n_pairs) (offsetof(struct request, pairs) + (n_pairs) * sizeof(CUcheckpointGpuPair))
#define REQUEST_TEXT_ROOM (2 * sizeof(struct request) + 1)

/* False where the text is no request. */
bool request_read(const char *text, size_t length, struct request *request);

/* Whether a program runs under that pid (a zombie's has gone); true where that cannot be known from here. */
bool controller_lives(pid_t controller, uint64_t pid_namespace);

/* Called for each gated call once it is let through: the hazard of the first call after a restore. */
void checkpoint_first_call(const char *name);

/* A hazard, switched on: once a restored process has been killed, checkpoint calls hang until the switch is off. */
void checkpoint_node_hangs(void);

#endif
