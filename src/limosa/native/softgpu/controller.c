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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN_MS 500 /* how often a controller looks whether its target is still the same program */

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
    return length > 0 && !strcmp(name, RESTORE_THREAD_NAME "\n") && read_status(tgid, tid, &ignored, &blocked) &&
           (blocked | 1ull << (REQUEST_SIGNAL - 1)) >> (SIGRTMIN - 1) == UINT64_MAX >> (SIGRTMIN - 1);
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
        return CUDA_ERROR_INVALID_VALUE;
    target->pidfd = (int)syscall(SYS_pidfd_open, target->tgid, 0);
    if (target->pidfd < 0)
        return errno == ESRCH || errno == EINVAL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OPERATING_SYSTEM;
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

struct question {
    uint64_t number;
    int listener;
};

static void question_close(struct question *question)
{
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];

    request_path(question->number, "", path);
    unlink(path);
    request_path(question->number, ".ask", path);
    unlink(path);
    close(question->listener);
}

/* Write the request where the target reads it. The names are written with the caller's own umask set aside: a target
 * may be another user's. */
static bool question_open(const struct request *request, struct question *question)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char path[sizeof(address.sun_path)];

    if (getrandom(&question->number, sizeof(question->number), 0) != sizeof(question->number))
        return false;
    request_path(question->number, "", address.sun_path);
    request_path(question->number, ".ask", path);
    question->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (question->listener < 0)
        return false;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    bool good = fd >= 0 && write(fd, request, sizeof(*request)) == sizeof(*request) && fchmod(fd, 0644) == 0;
    if (fd >= 0)
        close(fd);
    good = good && bind(question->listener, (struct sockaddr *)&address, sizeof(address)) == 0 &&
           chmod(address.sun_path, 0666) == 0 && listen(question->listener, 4) == 0;
    if (!good)
        question_close(question);
    return good;
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

/* Wait until a descriptor is readable. False when the target is dead, or another program, and nothing is there. */
static bool wait_for(int fd, const struct target *target)
{
    for (;;) {
        struct pollfd watch[2] = {{.fd = fd, .events = POLLIN}, {.fd = target->pidfd, .events = POLLIN}};
        int ready = poll(watch, 2, LOOK_AGAIN_MS);
        if (ready > 0 && watch[0].revents)
            return true;
        if (ready > 0)
            return poll(watch, 1, 0) > 0; /* it may have answered before it ended */
        if (ready == 0 && !is_restore_thread(target->tgid, target->tid))
            return poll(watch, 1, 0) > 0;
    }
}

/* The target's connection, and nobody else's. */
static int accept_target(const struct question *question, const struct target *target)
{
    while (wait_for(question->listener, target)) {
        int connection = accept4(question->listener, NULL, NULL, SOCK_CLOEXEC);
        struct ucred peer;
        socklen_t size = sizeof(peer);
        if (connection < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            return -1;
        }
        if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid == target->tgid)
            return connection;
        close(connection);
    }
    return -1;
}

static CUresult hear(int connection, const struct target *target, int *value)
{
    struct reply reply;
    char rest;

    if (!wait_for(connection, target) || recv(connection, &reply, sizeof(reply), MSG_WAITALL) != sizeof(reply))
        return CUDA_ERROR_OPERATING_SYSTEM;
    /* Until the target has closed its end, so that CRIU does not meet a connection of ours there. */
    while (wait_for(connection, target) && recv(connection, &rest, 1, 0) > 0)
        ;
    *value = reply.value;
    return (CUresult)reply.result;
}

static CUresult ask_target(const struct target *target, const struct request *request, int *value)
{
    struct question question;

    if (!question_open(request, &question))
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = wake(target, question.number);
    if (result == CUDA_SUCCESS) {
        int connection = accept_target(&question, target);
        if (connection >= 0) {
            result = hear(connection, target, value);
            close(connection);
        } else {
            result = CUDA_ERROR_OPERATING_SYSTEM;
        }
    }
    question_close(&question);
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
    if (fault_rules())
        checkpoint_node_hangs();
    if (fault.actions & FAULT_CRASH_TARGET)
        crash_target(pid);
    request->magic = REQUEST_MAGIC;
    request->faults = fault.actions & (FAULT_NO_DEVICE_MEMORY | FAULT_NO_HOST_MEMORY);
    CUresult result = target_open(pid, &target);
    if (result == CUDA_SUCCESS)
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
    struct request request = {.kind = REQUEST_THREAD};
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
    for (int gpu = 0; node && !driver.initialised && gpu < node->n_gpus; gpu++)
        if (!node->gpus[gpu].persistence)
            return false;
    return true;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    ENTER(CALL_ANY | CALL_OWN_FAULTS);
    struct request request = {.kind = REQUEST_RESTORE};

    if (args) {
        if (!all_zero(args->reserved, sizeof(args->reserved)) || args->reserved1 ||
            args->gpuPairsCount > NODE_MAX_GPUS || (args->gpuPairsCount && !args->gpuPairs))
            RETURN(CUDA_ERROR_INVALID_VALUE);
        request.n_pairs = args->gpuPairsCount;
        for (unsigned i = 0; i < args->gpuPairsCount; i++)
            request.pairs[i] = args->gpuPairs[i];
    }
    if (!gpus_are_awake())
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
