/* The target's side of the checkpoint calls: its restore thread, and what it does with the process.
 *
 *   running --lock--> locked --checkpoint--> checkpointed --restore--> locked --unlock--> running
 *
 * The thread serves one request at a time. A failed lock leaves the process running, a failed checkpoint leaves it locked
 * and whole, a refused map leaves it checkpointed. Only a restore that fails after it has begun to take device memory is
 * final: the process stays checkpointed for ever, as with the real driver.
 */
#define _GNU_SOURCE
#include "checkpoint.h"
#include "block.h"
#include "fault.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* memory.c: peer access between the process's GPUs, and one plain allocation of 512 MiB or more. */
bool memory_has_peer_hazard(void);

#define LOOK_SECONDS 0.1 /* how often a waiting lock looks after its controller */
#define IPC_BRANCH 610 /* the first driver that checkpoints memory opened from another process */
#define NODE_MPS 1u /* node_state.nvml_flags: compute processes are clients of MPS */

/* What is kept of the process while it is checkpointed. Touched by the restore thread only. */
static struct {
    char *memory; /* the one mapping that holds all device memory */
    size_t mapped;
    uint64_t device_bytes;
    bool contexts;
    int n_gpus; /* those that the process could open: what a map has to speak of, by their names of then */
    int gpu[NODE_MAX_GPUS];
    struct node_gpu was[NODE_MAX_GPUS];
    CUresult lost; /* what every restore answers, after the checkpoint of a process that cannot come back */
    bool poisoned; /* a restore has failed in the middle */
    bool imported; /* what another process has shared by legacy IPC is open: what makes it lost */
    bool refused;  /* a checkpoint has failed: the next ones are UNKNOWN, for good (measured) */
    bool switched; /* it failed by a hazard or fault that was switched on: until the unlock, so that it can be over */
} kept;

static bool moving; /* a restore is under way: gpu_after answers by `after` */
static int after[NODE_MAX_GPUS];

static atomic_bool fresh; /* nothing was called since the last restore */

int gpu_after(int gpu)
{
    return moving && gpu >= 0 && gpu < NODE_MAX_GPUS ? after[gpu] : gpu;
}

void checkpoint_first_call(const char *name)
{
    if (!atomic_load_explicit(&fresh, memory_order_relaxed) || !atomic_exchange(&fresh, false))
        return;
    if (strstr(name, "Synchronize") && fault_hazard("first-synchronise-segfaults")) {
        volatile int *nowhere = NULL;
        /* NOLINTNEXTLINE(clang-analyzer-core.NullDereference): the hazard is this very access. */
        *nowhere = 0;
    }
}

/* A point in the middle of the work, at which rules can strike (fault.h). */
static CUresult step(const char *name)
{
    struct fault fault = fault_ask(name, getpid());
    if (fault.actions & (FAULT_CRASH_TARGET | FAULT_CRASH_TARGET_AFTER | FAULT_CRASH_CALLER_AFTER))
        kill(getpid(), SIGKILL);
    if (fault.actions & FAULT_RESULT)
        return (CUresult)fault.result;
    return fault.actions & FAULT_AFTER ? (CUresult)fault.after : CUDA_SUCCESS;
}

static int driver_branch(void)
{
    return atoi(driver.node->driver_version);
}

/* Bits of the GPUs on which the process has a context. */
static uint32_t gpus_in_use(void)
{
    uint32_t used = 0;
    driver_lock();
    for (const struct context *context = contexts; context; context = context->next)
        if (!context->destroyed)
            used |= 1u << context_gpu(context);
    driver_unlock();
    return used;
}

static bool any_gpu(uint32_t gpus, bool (*is)(const struct node_gpu *))
{
    for (int gpu = 0; gpu < node_gpus(driver.node); gpu++)
        if (gpus >> gpu & 1 && is(&driver.node->gpus[gpu]))
            return true;
    return false;
}

static bool is_lost(const struct node_gpu *gpu)
{
    return __atomic_load_n(&gpu->lost, __ATOMIC_RELAXED) != 0;
}

static bool is_mig(const struct node_gpu *gpu)
{
    return gpu->mig != 0;
}

/* ------------------------------------------------------------------- a hazard: killing what has been restored --- */

#define KILL_HAZARD "kill-after-restore-hangs"

static char mark[128];  /* the file that says that this process has been restored; "" for none */
static pid_t mark_owner; /* not a child that was forked since */

/* Also at a normal end of the process: that is no kill. */
__attribute__((destructor)) static void unmark(void)
{
    if (mark[0] && mark_owner == getpid())
        unlink(mark);
    mark[0] = 0;
}

static void mark_restored(void)
{
    if (!fault_hazard(KILL_HAZARD))
        return;
    mark_owner = getpid();
    snprintf(mark, sizeof(mark), REQUESTS_FOLDER "/restored-%d-%llu", (int)getpid(),
             (unsigned long long)node_start_time(getpid()));
    int fd = node_open_file(mark, O_WRONLY | O_CREAT);
    if (fd >= 0)
        close(fd);
}

void checkpoint_node_hangs(void)
{
    DIR *folder = opendir(REQUESTS_FOLDER);
    bool killed = false;

    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        int pid;
        unsigned long long started;
        if (sscanf(entry->d_name, "restored-%d-%llu", &pid, &started) == 2)
            killed |= !node_same_start(node_start_time((pid_t)pid), started);
    }
    if (folder)
        closedir(folder);
    if (killed)
        fault_hazard_wait(KILL_HAZARD, -1);
}

/* ------------------------------------------------------------------------------------------- lock and unlock --- */

/* Nobody wants a lock that is still waiting when its controller has gone. */
static bool abandoned(const void *request)
{
    const struct request *of = request;
    return !controller_lives(of->controller, of->pid_namespace);
}

/* Work that has been submitted is part of what a lock waits for, so that a kernel (or a collective) that never ends makes
 * it time out, whether or not a thread of the application waits for it. */
static CUresult lock_process(const struct request *request)
{
    if (!driver.initialised) /* its cuInit has found no GPU */
        return CUDA_ERROR_OPERATING_SYSTEM;
    double limit = request->timeout_ms ? request->timeout_ms / 1000.0 : -1, since = node_now();
    CUresult result = step("step:lock-begin");

    if (result != CUDA_SUCCESS)
        return result;
    if (any_gpu(driver.openable, is_mig) || driver.node->nvml_flags & NODE_MPS || fault_hazard("vgpu")
        || fault_hazard("mig-not-supported") || fault_hazard("mps-not-supported"))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (fault_hazard_wait("collective-deadlocks-lock", limit))
        return CUDA_ERROR_NOT_READY;
    if (gate_close(request->timeout_ms, abandoned, request) != 0)
        return CUDA_ERROR_NOT_READY;
    for (;;) {
        double left = limit < 0 ? LOOK_SECONDS : limit - (node_now() - since);
        double look = left < LOOK_SECONDS ? left : LOOK_SECONDS;
        bool drained = streams_drain(look > 0 ? look : 0);
        if (abandoned(request) || (!drained && left <= 0)) {
            gate_open();
            return CUDA_ERROR_NOT_READY;
        }
        if (drained)
            break;
    }
    result = step("step:lock-closed");
    if (result != CUDA_SUCCESS) {
        gate_open();
        return result;
    }
    node_pace(node_now(), driver.node->rates.lock_fixed, 0, 0);
    driver.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

static CUresult unlock_process(void)
{
    double since = node_now();
    CUresult result = step("step:unlock-begin");
    if (result != CUDA_SUCCESS)
        return result;
    node_pace(since, driver.node->rates.unlock_fixed, 0, 0);
    kept.switched = false;
    driver.state = CU_PROCESS_STATE_RUNNING; /* conclude() opens the gate */
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------------------------------------ checkpoint --- */

/* Note the GPUs that a map of the next restore must speak of. */
static void note_gpus(void)
{
    uint32_t gpus = devices_openable() | gpus_in_use();
    kept.n_gpus = 0;
    for (int gpu = 0; gpu < node_gpus(driver.node); gpu++)
        if (gpus >> gpu & 1) {
            kept.gpu[kept.n_gpus] = gpu;
            kept.was[kept.n_gpus++] = driver.node->gpus[gpu];
        }
}

/* What the driver does not notice until it is too late. */
static CUresult note_losses(void)
{
    kept.imported = memory_has_imported() || fault_hazard("ipc-lost");
    if (kept.imported)
        return CUDA_ERROR_INVALID_VALUE;
    if (memory_has_peer_hazard() && fault_hazard("peer-large-allocation-lost"))
        return CUDA_ERROR_INVALID_VALUE;
    if (vmm_has_imported() || fault_hazard("nccl-shared-memory-lost"))
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

static CUresult checkpoint_process(const struct request *request)
{
    const struct node_rates *rates = &driver.node->rates;
    double since = node_now();
    CUresult result = step("step:checkpoint-begin");

    if (result != CUDA_SUCCESS)
        return result;
    fault_hazard_wait("multicast-hangs", -1);
    streams_drain(-1);
    if (kept.refused || kept.switched)
        return CUDA_ERROR_UNKNOWN;
    if (memory_has_managed()) {
        kept.refused = true;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (fault_hazard("managed-not-supported")) {
        kept.switched = true;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (memory_has_imported() && driver_branch() >= IPC_BRANCH) {
        node_log("checkpoints of CUDA IPC, which drivers from %d on can do, are not implemented", IPC_BRANCH);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    uint32_t used = gpus_in_use();
    if (any_gpu(used, is_lost))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;

    uint64_t device_bytes = memory_bytes() + vmm_bytes();
    size_t size = device_bytes + (used ? node_checkpoint_bytes(driver.node) : 0);
    char *memory = NULL;
    if (size) {
        /* One call of the C library's mmap, as with the real driver, so that a preloaded library can answer it. */
        memory = request->faults & FAULT_NO_HOST_MEMORY
            ? MAP_FAILED
            : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED) {
            kept.refused = !(request->faults & FAULT_NO_HOST_MEMORY);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (fault_hazard("killed-by-cgroup"))
        kill(getpid(), SIGKILL);
    if (device_bytes)
        vmm_save(memory_save(memory)); /* device_bytes are what these two write */
    node_pace(since, used ? rates->checkpoint_fixed : rates->checkpoint_fixed / 10, device_bytes, rates->checkpoint);
    result = step("step:checkpoint-saved");
    if (result != CUDA_SUCCESS) {
        if (size)
            munmap(memory, size);
        return result;
    }

    kept.memory = memory;
    kept.mapped = size;
    kept.device_bytes = device_bytes;
    kept.contexts = used != 0;
    kept.poisoned = false;
    kept.lost = note_losses();
    note_gpus();
    gate_shut();
    memory_release();
    vmm_release();
    contexts_release();
    devices_close();
    unmark();
    step("step:checkpoint-released");
    driver.state = CU_PROCESS_STATE_CHECKPOINTED;
    node_close();
    return CUDA_SUCCESS;
}

/* --------------------------------------------------------------------------------------------------- restore --- */

static int find_gpu(const void *uuid)
{
    for (int gpu = 0; gpu < node_gpus(driver.node); gpu++)
        if (!memcmp(driver.node->gpus[gpu].uuid, uuid, sizeof(driver.node->gpus[gpu].uuid)))
            return gpu;
    return -1;
}

static bool same_chip(const struct node_gpu *one, const struct node_gpu *other)
{
    return !strcmp(one->name, other->name) && one->cc_major == other->cc_major && one->cc_minor == other->cc_minor;
}

/* Where a GPU goes by the map: each must be on a left side exactly once. NULL: the map does not say. */
static const void *mapped_to(const struct node_gpu *was, const struct request *request)
{
    const void *to = NULL;
    if (!request->n_pairs)
        return was->uuid;
    for (uint32_t i = 0; i < request->n_pairs; i++)
        if (!memcmp(request->pairs[i].oldUuid.bytes, was->uuid, sizeof(was->uuid))) {
            if (to)
                return NULL;
            to = request->pairs[i].newUuid.bytes;
        }
    return to;
}

static bool was_openable(const void *uuid)
{
    for (int i = 0; i < kept.n_gpus; i++)
        if (!memcmp(kept.was[i].uuid, uuid, sizeof(kept.was[i].uuid)))
            return true;
    return false;
}

/* Fill `after`. The map must be one from all GPUs that the process could open at its checkpoint into those that it can
 * open now, one to one, each onto the same chip. */
static CUresult choose_gpus(const struct request *request)
{
    uint32_t openable = devices_openable(), taken = 0;
    bool moves = false;

    for (int gpu = 0; gpu < NODE_MAX_GPUS; gpu++)
        after[gpu] = gpu;
    if (request->n_pairs && (request->n_pairs != (uint32_t)kept.n_gpus || driver_branch() < 580))
        return CUDA_ERROR_INVALID_VALUE;
    if (!request->n_pairs && fault_hazard("no-map-refused"))
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < kept.n_gpus; i++) {
        const void *uuid = mapped_to(&kept.was[i], request);
        int gpu = uuid ? find_gpu(uuid) : -1;
        if (gpu < 0 || taken >> gpu & 1 || !same_chip(&kept.was[i], &driver.node->gpus[gpu])
            || !(openable >> gpu & 1 || was_openable(uuid)))
            return CUDA_ERROR_INVALID_VALUE;
        taken |= 1u << gpu;
        moves |= gpu != kept.gpu[i];
        after[kept.gpu[i]] = gpu;
    }
    if (moves && fault_hazard("chips-differ"))
        return CUDA_ERROR_INVALID_VALUE;
    /* A right map, but a node that was there has been covered meanwhile: measured. */
    return taken & ~openable ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* Take device memory. What was taken is given back where there is not enough. */
static CUresult claim(const struct request *request)
{
    int failed = request->faults & FAULT_NO_DEVICE_MEMORY || fault_hazard("restore-poisons") ? -ENOMEM : 0;
    if (!failed)
        failed = contexts_claim();
    if (!failed)
        failed = memory_claim();
    if (!failed)
        failed = vmm_claim();
    CUresult result = CUDA_SUCCESS;
    if (failed)
        result = block_result(failed);
    else
        result = step("step:restore-claimed");
    if (result != CUDA_SUCCESS) {
        vmm_release();
        memory_release();
        contexts_release();
    }
    return result;
}

/* As if it had come from another machine: it is told the bus id of then, which no GPU of this one has. */
static void come_from_elsewhere(struct node_gpu *known)
{
    unsigned domain, bus, device, function;
    if (sscanf(known->pci, "%x:%x:%x.%x", &domain, &bus, &device, &function) == 4)
        snprintf(known->pci, sizeof(known->pci), "%08X:%02X:%02X.%X", domain, (bus & 0x7f) | 0x80, device & 0x1f,
                 function & 7);
}

static CUresult restore_opened(const struct request *request)
{
    double since = node_now();
    CUresult result = step("step:restore-begin");

    if (result == CUDA_SUCCESS) {
        result = kept.lost;
        kept.poisoned = kept.imported; /* of these the first restore says what it is, and the next ones nothing more */
    }
    if (result == CUDA_SUCCESS)
        result = choose_gpus(request);
    if (result != CUDA_SUCCESS)
        return result;
    if (devices_open() != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    moving = true;
    result = claim(request);
    if (result != CUDA_SUCCESS) {
        moving = false;
        kept.poisoned = true;
        devices_close();
        return result;
    }
    if (kept.device_bytes)
        vmm_load(memory_load(kept.memory));
    const struct node_rates *rates = &driver.node->rates;
    node_pace(since, kept.contexts ? rates->restore_fixed : rates->restore_fixed / 10, kept.device_bytes,
              rates->restore);
    bool elsewhere = fault_hazard("bus-id-remembered");
    driver_lock();
    for (int i = 0; i < driver.n_devices; i++) {
        if (elsewhere)
            come_from_elsewhere(&driver.known[i]);
        driver.devices[i] = gpu_after(driver.devices[i]);
        memcpy(driver.known[i].uuid, driver.node->gpus[driver.devices[i]].uuid, sizeof(driver.known[i].uuid));
    }
    driver.openable = devices_openable();
    driver_unlock();
    moving = false;
    if (kept.mapped)
        munmap(kept.memory, kept.mapped);
    memset(&kept, 0, sizeof(kept));
    mark_restored();
    step("step:restore-loaded");
    fresh = true;
    driver.state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

static CUresult restore_process(const struct request *request)
{
    if (kept.poisoned)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (!node_reopen())
        return CUDA_ERROR_NO_DEVICE;
    driver.node = node_open();
    CUresult result = restore_opened(request);
    if (result != CUDA_SUCCESS)
        node_close();
    return result;
}

/* ----------------------------------------------------------------------------------------- serving requests --- */

void request_path(uint64_t number, const char *suffix, char path[REQUEST_PATH_ROOM])
{
    snprintf(path, REQUEST_PATH_ROOM, REQUESTS_FOLDER "/%016llx%s", (unsigned long long)number, suffix);
}

struct job {
    uint64_t number;
    struct request request;
};

bool controller_lives(pid_t controller, uint64_t pid_namespace)
{
    char path[64], text[8];

    if (!pid_namespace || pid_namespace != node_pid_namespace())
        return true; /* it cannot be known */
    snprintf(path, sizeof(path), "/proc/%d/exe", (int)controller);
    return readlink(path, text, sizeof(text)) >= 0 || (errno != ENOENT && errno != ESRCH);
}

static int digit(char letter)
{
    if (letter >= '0' && letter <= '9')
        return letter - '0';
    return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

bool request_read(const char *text, size_t length, struct request *request)
{
    unsigned char *bytes = (unsigned char *)request;
    memset(request, 0, sizeof(*request));
    for (size_t i = 0; i < length / 2 && i < sizeof(*request); i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        bytes[i] = (unsigned char)(high << 4 | low);
    }
    return request->magic == REQUEST_MAGIC && request->n_pairs <= NODE_MAX_GPUS
        && length == 2 * REQUEST_BYTES(request->n_pairs);
}

/* Take a request: false where its controller is gone. */
static bool take(uint64_t number, struct job *job)
{
    char path[REQUEST_PATH_ROOM], text[REQUEST_TEXT_ROOM];

    request_path(number, ".ask", path);
    ssize_t length = readlink(path, text, sizeof(text));
    unlink(path);
    job->number = number;
    return length > 0 && request_read(text, (size_t)length, &job->request)
        && controller_lives(job->request.controller, job->request.pid_namespace);
}

static void answer(const struct job *job, CUresult result, int value)
{
    const struct request *request = &job->request;
    char path[REQUEST_PATH_ROOM], text[96];

    if (!controller_lives(request->controller, request->pid_namespace))
        return; /* nobody would take it away */
    request_path(job->number, ".answer", path);
    snprintf(text, sizeof(text), "%d %d %d %llu", (int)result, value, (int)request->controller,
             (unsigned long long)request->pid_namespace);
    if (symlink(text, path) != 0) { /* the node is full: its controller waits until this process ends */
    }
}

static CUresult work(const struct request *request)
{
    int state = driver.state;
    switch (request->kind) {
    case REQUEST_LOCK: return state == CU_PROCESS_STATE_RUNNING ? lock_process(request) : CUDA_ERROR_ILLEGAL_STATE;
    case REQUEST_CHECKPOINT:
        return state == CU_PROCESS_STATE_LOCKED ? checkpoint_process(request) : CUDA_ERROR_ILLEGAL_STATE;
    case REQUEST_RESTORE:
        return state == CU_PROCESS_STATE_CHECKPOINTED ? restore_process(request) : CUDA_ERROR_ILLEGAL_STATE;
    case REQUEST_UNLOCK: return state == CU_PROCESS_STATE_LOCKED ? unlock_process() : CUDA_ERROR_ILLEGAL_STATE;
    default: return CUDA_SUCCESS;
    }
}

/* Answer. A process whose threads go on may end at once: its controller is answered first. */
static void conclude(const struct job *job, CUresult result)
{
    answer(job, result, driver.state);
    if (job->request.kind == REQUEST_RESTORE && result == CUDA_SUCCESS)
        gate_unshut();
    if (job->request.kind == REQUEST_UNLOCK && result == CUDA_SUCCESS)
        gate_open();
}

/* Wait for a request, at most `seconds` (negative: no limit). A process that a debugger or CRIU stops is interrupted
 * here, and comes back. */
static bool next(double seconds, uint64_t *number)
{
    sigset_t set;
    siginfo_t info;
    struct timespec limit = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};

    sigemptyset(&set);
    sigaddset(&set, REQUEST_SIGNAL);
    if (sigtimedwait(&set, &info, seconds < 0 ? NULL : &limit) < 0 || info.si_code != SI_QUEUE)
        return false;
    *number = (uint64_t)(uintptr_t)info.si_value.sival_ptr;
    return true;
}

/* Newer drivers answer a state query in the middle of the work, with numbers of their own. */
struct helper {
    const struct request *request;
    CUresult result;
    atomic_bool done;
};

static void *help(void *argument)
{
    struct helper *helper = argument;
    helper->result = work(helper->request);
    helper->done = true;
    return NULL;
}

static void work_and_tell(const struct job *job)
{
    enum { ROOM = 64 };
    struct helper helper = {.request = &job->request};
    struct job waiting[ROOM];
    int n = 0;
    uint64_t number;
    pthread_t thread;

    if (driver_thread(&thread, "cuda-helper", help, &helper) != 0) {
        conclude(job, work(&job->request));
        return;
    }
    while (!helper.done) {
        if (n == ROOM || !next(0.002, &number)) {
            if (n == ROOM)
                node_pace(node_now(), 0.002, 0, 0);
            continue;
        }
        if (!take(number, &waiting[n]))
            continue;
        if (waiting[n].request.kind == REQUEST_STATE)
            answer(&waiting[n], CUDA_SUCCESS, job->request.kind == REQUEST_CHECKPOINT ? 4 : 5);
        else
            n++;
    }
    pthread_join(thread, NULL);
    conclude(job, helper.result);
    /* Those that came meanwhile are served in their turn. */
    for (int i = 0; i < n; i++)
        conclude(&waiting[i], work(&waiting[i].request));
}

static void serve(uint64_t number)
{
    struct job job;
    if (!take(number, &job))
        return;
    bool long_work = job.request.kind == REQUEST_CHECKPOINT || job.request.kind == REQUEST_RESTORE;
    bool tells = false;
    if (long_work) {
        /* The switch is looked up where the node is open: at a checkpoint, for the restore that follows it as well. */
        static bool told;
        if (job.request.kind == REQUEST_CHECKPOINT && driver.state == CU_PROCESS_STATE_LOCKED)
            told = fault_hazard("states-4-and-5");
        tells = told;
    }
    if (tells)
        work_and_tell(&job);
    else
        conclude(&job, work(&job.request));
}

static void *body(void *started)
{
    uint64_t number;
    driver.restore_thread = gettid();
    sem_post(started);
    for (;;)
        if (next(-1, &number))
            serve(number);
    return NULL;
}

int restore_thread_start(void)
{
    sem_t started;
    pthread_t thread;

    sem_init(&started, 0, 0);
    int problem = driver_thread(&thread, RESTORE_THREAD_NAME, body, &started);
    if (!problem) {
        while (sem_wait(&started) != 0)
            ;
        pthread_detach(thread);
    }
    sem_destroy(&started);
    return problem;
}
