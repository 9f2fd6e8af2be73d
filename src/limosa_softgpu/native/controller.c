/* The controller's side of the checkpoint calls: finding the target's restore thread, asking it, waiting for its answer.
 *
 * Like the real driver's, a call blocks for as long as the target is stopped or busy with another request. It ends, with
 * OPERATING_SYSTEM, when the target is killed or becomes another program.
 */
#define _GNU_SOURCE
#include "checkpoint.h"
#include "fault.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN 0.5 /* seconds after which a controller looks whether its target is still the same program */

struct target {
    pid_t tgid, tid;
    int pidfd;
};

/* ------------------------------------------------------------------------------------------ finding the target --- */

/* Read /proc/PID/status (task < 0) or /proc/PID/task/TASK/status: Tgid, and the mask of blocked signals. */
static bool read_status(pid_t pid, pid_t task, pid_t *tgid, uint64_t *blocked)
{
    char path[64], line[256];
    int found = 0;

    if (task < 0)
        snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    else
        snprintf(path, sizeof(path), "/proc/%d/task/%d/status", (int)pid, (int)task);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (fgets(line, sizeof(line), file)) {
        if (!strncmp(line, "Tgid:", 5)) {
            *tgid = (pid_t)strtol(line + 5, NULL, 10);
            found |= 1;
        } else if (!strncmp(line, "SigBlk:", 7)) {
            *blocked = strtoull(line + 7, NULL, 16);
            found |= 2;
        }
    }
    fclose(file);
    return found == 3;
}

/* A thread of that name which has every real-time signal blocked, as only threads of ours have: our signal would end the
 * process where it is not expected. The kernel takes the one that is waited for out of the mask meanwhile. */
static bool is_restore_thread(pid_t tgid, pid_t tid)
{
    char path[64], name[32] = "";
    uint64_t blocked;
    pid_t ignored;

    snprintf(path, sizeof(path), "/proc/%d/task/%d/comm", (int)tgid, (int)tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, name, sizeof(name) - 1);
    close(fd);
    return length > 0 && !strcmp(name, RESTORE_THREAD_NAME "\n") && read_status(tgid, tid, &ignored, &blocked)
        && (blocked | 1ull << (REQUEST_SIGNAL - 1)) >> (SIGRTMIN - 1) == UINT64_MAX >> (SIGRTMIN - 1);
}

static pid_t find_restore_thread(pid_t tgid)
{
    char path[64];
    pid_t found = 0;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)tgid);
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && !found && (entry = readdir(folder));)
        if (isdigit((unsigned char)entry->d_name[0]) && is_restore_thread(tgid, (pid_t)atoi(entry->d_name)))
            found = (pid_t)atoi(entry->d_name);
    if (folder)
        closedir(folder);
    return found;
}

/* 1: a libcuda is mapped there, 0: none is, -1: it may not be looked at. */
static int has_library(pid_t tgid)
{
    char path[64], line[4096];
    int found = 0;

    snprintf(path, sizeof(path), "/proc/%d/maps", (int)tgid);
    FILE *file = fopen(path, "re");
    if (!file)
        return errno == EACCES || errno == EPERM ? -1 : 0;
    while (!found && fgets(line, sizeof(line), file))
        found = strstr(line, "/libcuda.so") != NULL;
    fclose(file);
    return found;
}

/* Whether a process sees the node that we see: two nodes on one machine share their process ids. As has_library. */
static int on_this_node(pid_t tgid)
{
    char path[128];
    struct stat ours, theirs;

    snprintf(path, sizeof(path), "/proc/%d/root" NODE_FOLDER "/state", (int)tgid);
    if (stat(NODE_FOLDER "/state", &ours) != 0)
        return 0;
    if (stat(path, &theirs) != 0)
        return errno == EACCES || errno == EPERM ? -1 : 0;
    return ours.st_dev == theirs.st_dev && ours.st_ino == theirs.st_ino;
}

/* Find the process and its restore thread. A thread's id does as well as its process's (facts: the real driver's own
 * carelessness). */
static CUresult target_open(pid_t pid, struct target *target)
{
    uint64_t blocked;

    target->pidfd = -1;
    if (pid <= 0 || !read_status(pid, -1, &target->tgid, &blocked))
        return CUDA_ERROR_OPERATING_SYSTEM;
    target->pidfd = (int)syscall(SYS_pidfd_open, target->tgid, 0);
    if (target->pidfd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (target->tgid != pid) {
        if (fault_hazard_about("thread-id-refused", target->tgid, 0))
            return CUDA_ERROR_OPERATING_SYSTEM;
        fault_hazard_about("thread-id-as-pid", target->tgid, 0); /* it is always so; with a rule it is noted */
    }
    target->tid = find_restore_thread(target->tgid);
    if (!target->tid)
        return CUDA_ERROR_NOT_INITIALIZED;
    int here = on_this_node(target->tgid), library = here == 1 ? has_library(target->tgid) : here;
    if (library < 0)
        return CUDA_ERROR_NOT_PERMITTED;
    return library ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static bool is_dead(const struct target *target)
{
    struct pollfd watch = {.fd = target->pidfd, .events = POLLIN};
    return poll(&watch, 1, 0) > 0;
}

/* ------------------------------------------------------------------------------------------------- asking it --- */

static void question_close(uint64_t number)
{
    char path[REQUEST_PATH_ROOM];

    request_path(number, ".ask", path);
    unlink(path);
    request_path(number, ".answer", path);
    unlink(path);
}

/* Clear up after controllers that were killed: a target cannot, its answer may come just before the end of who asked. */
static void sweep(void)
{
    DIR *folder = opendir(REQUESTS_FOLDER);
    if (!folder)
        return;
    int fd = dirfd(folder);

    for (struct dirent *entry; fd >= 0 && (entry = readdir(folder));) {
        const char *suffix = strchr(entry->d_name, '.');
        char text[REQUEST_TEXT_ROOM];
        struct request request;
        int result, value, controller;
        unsigned long long pid_namespace;
        bool stale = false;

        if (!suffix || (strcmp(suffix, ".ask") != 0 && strcmp(suffix, ".answer") != 0))
            continue;
        ssize_t length = readlinkat(fd, entry->d_name, text, sizeof(text) - 1);
        if (length <= 0)
            continue;
        text[length] = 0;
        if (!strcmp(suffix, ".ask"))
            stale = request_read(text, (size_t)length, &request)
                && !controller_lives(request.controller, request.pid_namespace);
        else if (sscanf(text, "%d %d %d %llu", &result, &value, &controller, &pid_namespace) == 4)
            stale = !controller_lives(controller, pid_namespace);
        if (stale)
            unlinkat(fd, entry->d_name, 0);
    }
    closedir(folder);
}

static bool question_open(struct request *request, uint64_t *number)
{
    char path[REQUEST_PATH_ROOM], text[REQUEST_TEXT_ROOM];
    unsigned char bytes[sizeof *request];

    request->magic = REQUEST_MAGIC;
    request->controller = getpid();
    request->pid_namespace = node_pid_namespace();
    memcpy(bytes, request, sizeof bytes);
    for (size_t i = 0; i < REQUEST_BYTES(request->n_pairs); i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    if (getrandom(number, sizeof(*number), 0) != sizeof(*number))
        return false;
    request_path(*number, ".ask", path);
    return symlink(text, path) == 0;
}

/* Wake the restore thread. Looked at once more right before: a signal that is not expected would end the process. */
static CUresult wake(const struct target *target, uint64_t number)
{
    siginfo_t info = {.si_code = SI_QUEUE};

    info.si_pid = getpid();
    info.si_uid = getuid();
    info.si_value.sival_ptr = (void *)(uintptr_t)number;
    for (;;) {
        if (!is_restore_thread(target->tgid, target->tid) || is_dead(target))
            return CUDA_ERROR_OPERATING_SYSTEM;
        if (syscall(SYS_rt_tgsigqueueinfo, target->tgid, target->tid, REQUEST_SIGNAL, &info) == 0)
            return CUDA_SUCCESS;
        if (errno != EAGAIN) /* too many signals are queued for that user: wait for some to be taken */
            return errno == EPERM ? CUDA_ERROR_NOT_PERMITTED : CUDA_ERROR_OPERATING_SYSTEM;
        node_pace(node_now(), 0.01, 0, 0);
    }
}

static bool answered(uint64_t number, struct reply *reply)
{
    char path[REQUEST_PATH_ROOM], text[32];

    request_path(number, ".answer", path);
    ssize_t length = readlink(path, text, sizeof(text) - 1);
    if (length <= 0)
        return false;
    text[length] = 0;
    return sscanf(text, "%d %d", &reply->result, &reply->value) == 2;
}

/* Look for the answer, ever more rarely, until it is there or the target is dead or another program. */
static bool wait_for_answer(uint64_t number, const struct target *target, struct reply *reply)
{
    double pause = 20e-6, looked = node_now();

    while (!answered(number, reply)) {
        struct pollfd watch = {.fd = target->pidfd, .events = POLLIN};
        struct timespec limit = {.tv_nsec = (long)(pause * 1e9)};
        bool gone = ppoll(&watch, 1, &limit, NULL) > 0;
        if (!gone && node_now() - looked > LOOK_AGAIN) {
            gone = !is_restore_thread(target->tgid, target->tid);
            looked = node_now();
        }
        if (gone)
            return answered(number, reply); /* it may have answered before it ended */
        pause = pause < 2e-3 ? pause * 1.3 : pause;
    }
    return true;
}

/* Hazards that a controller meets whatever its target does. */
static void meet_hazards(const struct request *request, pid_t pid)
{
    uint32_t kind = request->kind;
    if (kind == REQUEST_STATE || kind == REQUEST_LOCK || kind == REQUEST_RESTORE)
        fault_hazard_about("lock-hangs-when-stopped", pid, -1); /* as if it were stopped */
    if (kind == REQUEST_STATE)
        fault_hazard_about("state-blocks-in-flight", pid, -1); /* as if there were something in flight */
}

/* A hazard: the controller is killed while its target is at work, which goes on. */
static void die_in_the_middle(const struct request *request, uint64_t number, const struct target *target)
{
    char path[REQUEST_PATH_ROOM], text[8];

    if ((request->kind != REQUEST_CHECKPOINT && request->kind != REQUEST_RESTORE)
        || !fault_hazard_about("stays-locked-after-controller-death", target->tgid, 0))
        return;
    request_path(number, ".ask", path);
    while (readlink(path, text, sizeof(text)) > 0 && !is_dead(target))
        node_pace(node_now(), 0.001, 0, 0);
    node_pace(node_now(), 0.02, 0, 0); /* it has been read; now it is looked whether its controller lives */
    kill(getpid(), SIGKILL);
}

static CUresult ask_target(const struct target *target, struct request *request, int *value)
{
    struct reply reply;
    uint64_t number;

    if (!question_open(request, &number))
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = wake(target, number);
    if (result == CUDA_SUCCESS) {
        if (fault_rules())
            die_in_the_middle(request, number, target);
        if (wait_for_answer(number, target, &reply)) {
            result = (CUresult)reply.result;
            *value = reply.value;
        } else {
            result = CUDA_ERROR_OPERATING_SYSTEM;
        }
    }
    question_close(number);
    sweep();
    return result;
}

/* ---------------------------------------------------------------------------------------------- the functions --- */

static void crash_target(pid_t pid)
{
    pid_t tgid;
    uint64_t blocked;
    if (read_status(pid, -1, &tgid, &blocked))
        kill(tgid, SIGKILL);
}

/* One call: faults, the target, its answer. value is what a state query answers, thread what a thread query does. */
static CUresult ask(const char *name, pid_t pid, struct request *request, int *value, pid_t *thread)
{
    struct fault fault = fault_ask(name, pid);
    struct target target;
    int ignored = 0;

    if (fault.actions & FAULT_RESULT)
        return (CUresult)fault.result;
    if (fault_rules()) {
        checkpoint_node_hangs();
        meet_hazards(request, pid);
    }
    if (fault.actions & FAULT_CRASH_TARGET)
        crash_target(pid);
    request->faults = fault.actions & (FAULT_NO_DEVICE_MEMORY | FAULT_NO_HOST_MEMORY);
    CUresult result = target_open(pid, &target);
    /* Which thread it is can be seen from outside: that query waits for nothing. */
    if (result == CUDA_SUCCESS && !thread)
        result = ask_target(&target, request, value ? value : &ignored);
    if (target.pidfd >= 0)
        close(target.pidfd);
    if (result == CUDA_SUCCESS && thread)
        *thread = target.tid;
    if (result == CUDA_SUCCESS && value && fault.actions & FAULT_STATE)
        *value = fault.state;
    if (fault.actions & FAULT_CRASH_TARGET_AFTER)
        crash_target(pid);
    if (fault.actions & FAULT_CRASH_CALLER_AFTER)
        kill(getpid(), SIGKILL);
    return fault.actions & FAULT_AFTER ? (CUresult)fault.after : result;
}

static bool all_zero(const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (((const char *)bytes)[i])
            return false;
    return true;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {.kind = REQUEST_STATE};
    int value = 0;

    if (!state)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    CUresult result = ask(__func__, pid, &request, &value, NULL);
    if (result == CUDA_SUCCESS)
        *state = (CUprocessState)value;
    RETURN(result);
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {0};
    pid_t thread = 0;

    if (!tid)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    CUresult result = ask(__func__, pid, &request, NULL, &thread);
    if (result == CUDA_SUCCESS)
        *tid = thread;
    RETURN(result);
}

EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {.kind = REQUEST_LOCK};

    if (args) {
        if (args->reserved0 || !all_zero(args->reserved1, sizeof(args->reserved1)))
            RETURN(CUDA_ERROR_INVALID_VALUE);
        request.timeout_ms = args->timeoutMs;
    }
    RETURN(ask(__func__, pid, &request, NULL, NULL));
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {.kind = REQUEST_CHECKPOINT};

    if (args && !all_zero(args, sizeof(*args)))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(ask(__func__, pid, &request, NULL, NULL));
}

/* cuda.h: "requires persistence mode to be enabled or cuInit to have been called before". */
static bool gpus_are_awake(void)
{
    const struct node_state *node = node_open();
    for (int gpu = 0; node && !driver.initialised && gpu < node_gpus(node); gpu++)
        if (!node->gpus[gpu].persistence)
            return false;
    return true;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {.kind = REQUEST_RESTORE};

    if (args) {
        if (!all_zero(args->reserved, sizeof(args->reserved)) || args->reserved1 || args->gpuPairsCount > NODE_MAX_GPUS)
            RETURN(CUDA_ERROR_INVALID_VALUE);
        request.n_pairs = args->gpuPairsCount;
        /* Without a pointer to them this crashes, as it does with a real driver. */
        for (unsigned i = 0; i < args->gpuPairsCount; i++)
            request.pairs[i] = args->gpuPairs[i];
    }
    if (!gpus_are_awake() || fault_hazard_about("needs-persistence", pid, 0))
        RETURN(CUDA_ERROR_NOT_INITIALIZED);
    RETURN(ask(__func__, pid, &request, NULL, NULL));
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {.kind = REQUEST_UNLOCK};

    if (args && !all_zero(args, sizeof(*args)))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(ask(__func__, pid, &request, NULL, NULL));
}
