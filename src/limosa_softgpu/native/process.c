/* The process: cuInit, the gate, what every call passes through, the device nodes, fork. */
#define _GNU_SOURCE
#include "driver.h"
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* checkpoint.c: the first call after a restore may be a hazard. */
__attribute__((weak)) void checkpoint_first_call(const char *name);

#define CONTROL_MAPPINGS 4 /* of /dev/nvidiactl: enough to be seen, and to be in CRIU's way, as the real ones */
#define CONTROL_BYTES 65536

struct driver driver = {.mutex = PTHREAD_MUTEX_INITIALIZER};
_Thread_local bool driver_own_thread;

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;

void driver_lock(void)
{
    pthread_mutex_lock(&driver.mutex);
}

void driver_unlock(void)
{
    pthread_mutex_unlock(&driver.mutex);
}

void driver_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct timespec driver_deadline(double seconds)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double whole = (double)(time_t)seconds;
    now.tv_sec += (time_t)whole;
    now.tv_nsec += (long)((seconds - whole) * 1e9);
    if (now.tv_nsec >= 1000000000) {
        now.tv_nsec -= 1000000000;
        now.tv_sec++;
    }
    return now;
}

/* ---------------------------------------------------------------------------------------------- threads of ours --- */

struct beginning {
    void *(*body)(void *);
    void *argument;
    char name[16];
};

static void *thread_begin(void *argument)
{
    struct beginning beginning = *(struct beginning *)argument;
    free(argument);
    driver_own_thread = true;
    pthread_setname_np(pthread_self(), beginning.name);
    return beginning.body(beginning.argument);
}

int driver_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument)
{
    struct beginning *beginning = malloc(sizeof *beginning);
    if (!beginning)
        return ENOMEM;
    *beginning = (struct beginning){.body = body, .argument = argument};
    snprintf(beginning->name, sizeof beginning->name, "%s", name);
    /* Blocked before it starts: a signal of the application's must never be handled on one of our threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, thread_begin, beginning);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        free(beginning);
    return error;
}

/* ----------------------------------------------------------------------------------------------------- the gate --- */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t opened, left;
    bool closed; /* the process is locked */
    bool shut;   /* it is checkpointed */
    bool deadly; /* as a hazard: who would wait for what is checkpointed crashes */
    int inside, asking;
} gate = {.mutex = PTHREAD_MUTEX_INITIALIZER};

void gate_enter(void)
{
    pthread_mutex_lock(&gate.mutex);
    while (gate.closed)
        pthread_cond_wait(&gate.opened, &gate.mutex);
    gate.inside++;
    pthread_mutex_unlock(&gate.mutex);
}

void gate_leave(void)
{
    pthread_mutex_lock(&gate.mutex);
    if (--gate.inside == 0 && gate.closed)
        pthread_cond_broadcast(&gate.left);
    pthread_mutex_unlock(&gate.mutex);
}

int gate_close(unsigned timeout_ms, bool (*abandoned)(const void *), const void *argument)
{
    struct timespec deadline = driver_deadline(timeout_ms / 1e3);
    int error = 0;
    pthread_mutex_lock(&gate.mutex);
    gate.closed = true;
    while (gate.inside > 0 && !error) {
        struct timespec look = driver_deadline(0.1);
        bool last = timeout_ms
            && (deadline.tv_sec < look.tv_sec || (deadline.tv_sec == look.tv_sec && deadline.tv_nsec <= look.tv_nsec));
        error = pthread_cond_timedwait(&gate.left, &gate.mutex, last ? &deadline : &look);
        if (error == ETIMEDOUT && !last && !abandoned(argument))
            error = 0;
    }
    if (gate.inside == 0)
        error = 0;
    if (error) {
        gate.closed = false;
        pthread_cond_broadcast(&gate.opened);
    }
    pthread_mutex_unlock(&gate.mutex);
    return error;
}

void gate_open(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.closed = false;
    pthread_cond_broadcast(&gate.opened);
    pthread_mutex_unlock(&gate.mutex);
}

void gate_shut(void)
{
    bool deadly = fault_hazard("synchronise-while-checkpointed-segfaults");
    pthread_mutex_lock(&gate.mutex);
    gate.shut = true;
    gate.deadly = deadly;
    while (gate.asking > 0)
        pthread_cond_wait(&gate.left, &gate.mutex);
    pthread_mutex_unlock(&gate.mutex);
}

void gate_unshut(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.shut = gate.deadly = false;
    pthread_cond_broadcast(&gate.opened);
    pthread_mutex_unlock(&gate.mutex);
}

/* Where CALL_AWAITS and CALL_ASKS come in and go out. */
static CUresult ask_enter(unsigned flags)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&gate.mutex);
    if (flags & CALL_AWAITS) {
        if (gate.shut && gate.deadly)
            raise(SIGSEGV);
        while (gate.shut)
            pthread_cond_wait(&gate.opened, &gate.mutex);
    }
    if (flags & CALL_ASKS) {
        if (gate.shut)
            result = flags & CALL_EXPORTS ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_OPERATING_SYSTEM;
        else
            gate.asking++;
    }
    pthread_mutex_unlock(&gate.mutex);
    return result;
}

static void ask_leave(void)
{
    pthread_mutex_lock(&gate.mutex);
    if (--gate.asking == 0)
        pthread_cond_broadcast(&gate.left);
    pthread_mutex_unlock(&gate.mutex);
}

/* --------------------------------------------------------------------------------------------------- every call --- */

static CUresult refuse_context(const struct call *call)
{
    if (!call->context)
        return CUDA_ERROR_INVALID_CONTEXT;
    driver_lock();
    bool destroyed = call->context->destroyed;
    bool lost = !destroyed && driver.node->gpus[context_gpu(call->context)].lost;
    driver_unlock();
    if (destroyed)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (lost && !call->context->sticky)
        call->context->sticky = CUDA_ERROR_UNKNOWN; /* fallen off the bus: nothing of it works any more */
    return (CUresult)call->context->sticky;
}

static void leave(const struct call *call)
{
    if ((call->flags & CALL_GATED) && !driver_own_thread)
        gate_leave();
    if (call->flags & CALL_ASKS)
        ask_leave();
}

CUresult call_begin(struct call *call, const char *name, unsigned flags)
{
    *call = (struct call){.name = name, .flags = flags};
    if (flags & (CALL_INIT | CALL_CONTEXT | CALL_GATED)) {
        if (driver_own_thread)
            return CUDA_ERROR_NOT_PERMITTED; /* a host function or callback: it must not call the driver */
        if (!driver.initialised)
            return CUDA_ERROR_NOT_INITIALIZED;
    }
    if ((flags & CALL_GATED) && !driver_own_thread)
        gate_enter();
    CUresult refused = CUDA_SUCCESS;
    /* Before cuInit as well, when nothing of the node is kept open for it. A forked child has no driver to fail. */
    bool ask = !(flags & CALL_OWN_FAULTS) && !driver.forked;
    if (ask) {
        struct fault fault = fault_ask(name, 0);
        call->faults = fault.actions;
        if (fault.actions & FAULT_AFTER)
            call->late = (CUresult)fault.after;
        if (fault.actions & FAULT_RESULT)
            refused = (CUresult)fault.result;
    }
    bool asked = false;
    if (refused == CUDA_SUCCESS && (flags & (CALL_AWAITS | CALL_ASKS))) {
        refused = ask_enter(flags);
        asked = refused == CUDA_SUCCESS;
    }
    if (refused == CUDA_SUCCESS && (flags & (CALL_GATED | CALL_AWAITS | CALL_ASKS)) && checkpoint_first_call)
        checkpoint_first_call(name);
    if (refused == CUDA_SUCCESS && (flags & CALL_INIT)) {
        call->context = context_current();
        if (flags & CALL_CONTEXT)
            refused = refuse_context(call);
    }
    if (refused != CUDA_SUCCESS) {
        if (!asked)
            call->flags &= ~(unsigned)CALL_ASKS;
        leave(call);
    }
    return refused;
}

CUresult call_end(struct call *call, CUresult result)
{
    if (call->faults & FAULT_CRASH_CALLER_AFTER)
        kill(getpid(), SIGKILL);
    leave(call);
    return result == CUDA_SUCCESS && call->late ? call->late : result;
}

/* ------------------------------------------------------------------------------------------------- device nodes --- */

static struct {
    int n_fds, fds[2 * NODE_MAX_GPUS + 8];
    void *mappings[CONTROL_MAPPINGS];
} nodes;

uint32_t devices_openable(void)
{
    uint32_t openable = 0;
    for (int i = 0; i < node_gpus(driver.node); i++) {
        const struct node_gpu *gpu = &driver.node->gpus[i];
        if (!gpu->lost && node_openable(gpu))
            openable |= 1u << i;
    }
    return openable;
}

static int node_descriptor(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    nodes.fds[nodes.n_fds++] = fd;
    return fd;
}

int devices_open(void)
{
    int control = node_descriptor("/dev/nvidiactl", O_RDWR);
    int uvm = control < 0 ? control : node_descriptor("/dev/nvidia-uvm", O_RDWR);
    int error = uvm < 0 ? uvm : 0;
    uint32_t openable = devices_openable();
    for (int i = 0; i < node_gpus(driver.node) && !error; i++) {
        char path[64];
        if (!(openable & (1u << i)))
            continue;
        snprintf(path, sizeof path, "/dev/nvidia%d", driver.node->gpus[i].minor);
        int fd = node_descriptor(path, O_PATH);
        error = fd < 0 ? fd : 0;
    }
    for (int i = 0; i < CONTROL_MAPPINGS && !error; i++) {
        void *at = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, control, 0);
        if (at == MAP_FAILED)
            error = -errno;
        else
            nodes.mappings[i] = at;
    }
    if (error)
        devices_close();
    return error;
}

void devices_close(void)
{
    for (int i = 0; i < CONTROL_MAPPINGS; i++)
        if (nodes.mappings[i])
            munmap(nodes.mappings[i], CONTROL_BYTES);
    for (int i = 0; i < nodes.n_fds; i++)
        close(nodes.fds[i]);
    memset(&nodes, 0, sizeof nodes);
}

__attribute__((weak)) int gpu_after(int gpu)
{
    return gpu;
}

/* ------------------------------------------------------------------------------------------------------- cuInit --- */

static bool is_space(char letter)
{
    return letter == ' ' || (letter >= '\t' && letter <= '\r');
}

/* The GPU that one word of CUDA_VISIBLE_DEVICES means, as an index in candidates[], or -1. */
static int named_gpu(const char *word, const int *candidates, int n, bool by_uuid)
{
    while (is_space(*word))
        word++;
    if (!by_uuid) {
        char *end;
        if (*word < '0' || *word > '9')
            return -1; /* also a negative number: it ends the list */
        unsigned long index = strtoul(word, &end, 10);
        return index < (unsigned long)n ? (int)index : -1;
    }
    char wanted[64] = "";
    size_t length = 0;
    if (strncmp(word, "GPU-", 4) != 0)
        return -1;
    for (word += 4; *word && *word != ',' && length < sizeof wanted - 1; word++)
        if (!is_space(*word))
            wanted[length++] = *word;
    int found = -1;
    for (int i = 0; i < n; i++) {
        char uuid[40];
        const uint8_t *u = driver.node->gpus[candidates[i]].uuid;
        snprintf(uuid, sizeof uuid, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
                 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
        if (strncasecmp(uuid, wanted, length) != 0)
            continue;
        if (found >= 0)
            return -1; /* the prefix of more than one */
        found = i;
    }
    return length ? found : -1;
}

/* Which GPUs the application sees, in which order: those whose node it can open, chosen by CUDA_VISIBLE_DEVICES, whose
 * list ends at the first word that names none; a GPU named twice makes all of it empty. */
static void enumerate_devices(void)
{
    int candidates[NODE_MAX_GPUS] = {0}, n = 0;
    for (int i = 0; i < node_gpus(driver.node); i++)
        if (driver.openable & (1u << i))
            candidates[n++] = i;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    driver.n_devices = 0;
    if (!list) {
        driver.n_devices = n;
        memcpy(driver.devices, candidates, sizeof candidates);
        return;
    }
    bool by_uuid = strncmp(list, "GPU-", 4) == 0;
    uint32_t named = 0;
    for (const char *word = list; word; word = strchr(word, ',') ? strchr(word, ',') + 1 : NULL) {
        int i = named_gpu(word, candidates, n, by_uuid);
        if (i < 0)
            break;
        if (named & (1u << i)) {
            driver.n_devices = 0;
            break;
        }
        named |= 1u << i;
        driver.devices[driver.n_devices++] = candidates[i];
    }
}

static CUresult initialise(void)
{
    double since = node_now();
    driver.openable = devices_openable();
    enumerate_devices();
    for (int i = 0; i < driver.n_devices; i++)
        driver.known[i] = driver.at_first[i] = driver.node->gpus[driver.devices[i]];
    driver.n_at_first = driver.n_devices;
    driver.openable_at_first = driver.openable;
    /* Also without a GPU, as with a real driver: such a process has a state, and cannot be locked. */
    if (!driver.restore_thread && restore_thread_start() != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (driver.n_devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    if (devices_open() != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    node_pace(since, driver.node->rates.init_fixed * __builtin_popcount(driver.openable), 0, 0);
    driver.initialised = true;
    return CUDA_SUCCESS;
}

static CUresult open_node(void)
{
    pthread_mutex_lock(&init_mutex);
    struct node_state *node = driver.node;
    if (!driver.initialised)
        node = node ? node_reopen() : node_open(); /* it was closed if cuInit has failed before */
    if (node)
        driver.node = node;
    pthread_mutex_unlock(&init_mutex);
    return node ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuInit(unsigned int flags)
{
    if (driver.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = open_node(); /* first: it holds the faults that are asked for, also after a cuInit that failed */
    if (result != CUDA_SUCCESS)
        return result;
    struct call call_;
    CUresult refused = call_begin(&call_, __func__, driver.initialised ? CALL_GATED : CALL_ANY);
    pthread_mutex_lock(&init_mutex);
    if (!driver.initialised) {
        result = refused;
        if (result == CUDA_SUCCESS)
            result = node_reopen() ? initialise() : CUDA_ERROR_NO_DEVICE;
        if (result != CUDA_SUCCESS)
            node_close(); /* a process that cannot use a GPU keeps nothing of the node mapped */
    }
    pthread_mutex_unlock(&init_mutex);
    if (refused != CUDA_SUCCESS)
        return refused;
    RETURN(result);
}

/* --------------------------------------------------------------------------------------------------------- fork --- */

/* The locks are taken so that what the child inherits is whole: it has to close what the lists name. */
static void fork_prepare(void)
{
    pthread_mutex_lock(&init_mutex);
    driver_lock();
    streams_lock();
    pthread_mutex_lock(&gate.mutex);
}

static void fork_parent(void)
{
    pthread_mutex_unlock(&gate.mutex);
    streams_unlock();
    driver_unlock();
    pthread_mutex_unlock(&init_mutex);
}

static void fork_child(void)
{
    pthread_mutex_init(&init_mutex, NULL);
    pthread_mutex_init(&driver.mutex, NULL);
    pthread_mutex_init(&gate.mutex, NULL);
    driver_condition(&gate.opened);
    driver_condition(&gate.left);
    gate.closed = gate.shut = gate.deadly = false;
    gate.inside = gate.asking = 0;
    driver.restore_thread = 0;
    streams_forked();
    if (!driver.initialised)
        return;
    driver.initialised = false;
    driver.forked = true;
    driver.node = NULL;
    driver.state = CU_PROCESS_STATE_RUNNING;
    driver_own_thread = false;
    memset(&nodes, 0, sizeof nodes); /* its descriptors and mappings stay, as a real driver's do */
    contexts_forked();
    memory_forked();
    vmm_forked();
}

__attribute__((constructor)) static void loaded(void)
{
    driver_condition(&gate.opened);
    driver_condition(&gate.left);
    pthread_atfork(fork_prepare, fork_parent, fork_child);
}
