/* Failing on purpose: rules in NODE_FOLDER/faults, one file each, read anew when node_state.fault_generation changes.
 *
 * A file holds one rule, words separated by spaces:
 *
 *   function=cuCheckpointProcessRestore   which function (a shell pattern: cuMem*, nvml*, *); the default is *
 *                    step:NAME is a point in the middle of a checkpoint or restore, in the target (its own "caller");
 *                    only a pattern that begins with "step:" means one
 *   nth=3            only the third matching call (counted over the whole node, in the file's name plus ".count");
 *                    every=1 instead: each one; the default is the first. A hazard is on all the time unless nth is given
 *   caller=WHO       only calls made by that process     target=WHO   only checkpoint calls about that process
 *                    WHO is a pid, or a pattern of a name: the last part of the path of the program or of one of the
 *                    first three words of its command line (python3, train.py), or what /proc/PID/comm has
 *   result=CUDA_ERROR_UNKNOWN | 999     answer this, do nothing
 *   after=RESULT     do the work, then answer this
 *   hang             wait until the rule's file is gone, then go on
 *   delay=SECONDS
 *   crash=caller | target               SIGKILL, before the work     crash-after=caller | target   after it
 *   state=N          cuCheckpointProcessGetState reports N
 *   memory=device | host                as if that memory were full
 *   lost=GPU         the GPU of that index falls off the bus at this call, for good
 *   hazard=NAME      one of facts' reported hazards, see docs/softgpu.md
 *
 * and for NVML: lie=free:BYTES | used:BYTES | total:BYTES | processes:none | name:TEXT | uuid:TEXT | count:N | minor:N |
 *   mig:on | persistence:off | driver:TEXT | cuda:N
 *
 * Names that begin with a dot or end in ".count" are no rules: a rule is written under such a name and then renamed.
 * Words that mean nothing make the whole rule void, and the node's log says so.
 */
#ifndef LIMOSA_FAULT_H
#define LIMOSA_FAULT_H

#include <stdbool.h>
#include <sys/types.h>

enum fault_action {
    FAULT_NONE = 0,
    FAULT_RESULT = 1,
    FAULT_AFTER = 2,
    FAULT_CRASH_CALLER = 4,
    FAULT_CRASH_TARGET = 8,
    FAULT_CRASH_CALLER_AFTER = 16,
    FAULT_CRASH_TARGET_AFTER = 32,
    FAULT_STATE = 64,
    FAULT_NO_DEVICE_MEMORY = 128,
    FAULT_NO_HOST_MEMORY = 256,
    FAULT_LIE = 512,
};

struct fault {
    unsigned actions; /* of enum fault_action */
    int result, after, state;
    char lie[64];
};

/* Ask what is to go wrong with this call; hangs and delays happen in here. target: the pid a checkpoint call is about, 0
 * for none. Cheap when there are no rules. FAULT_CRASH_CALLER is carried out in here. */
struct fault fault_ask(const char *function, pid_t target);

/* Whether a hazard is switched on for this process (hazard=NAME rules; caller= and target= mean this process; nth=
 * respected). */
bool fault_hazard(const char *name);

/* Whether there are rules at all. */
bool fault_rules(void);

/* As fault_hazard, and wait until its rule is taken away, at most `seconds` (negative: no limit). */
bool fault_hazard_wait(const char *name, double seconds);

/* The same for a controller in a call about a target: caller= and target= mean these two. */
bool fault_hazard_about(const char *name, pid_t target, double seconds);

#endif
