/* libnvidia-ml.so.1: what NVML tells about the GPUs of a node.
 *
 * Everything is read from the node's state when it is asked for; nothing is kept but the count of nvmlInit calls. A
 * process that is checkpointed has no memory on the node and is therefore on no list, as with the real driver.
 */
#define _GNU_SOURCE
#include "nvml_api.h"

#include "fault.h"
#include "node.h"

#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include <fcntl.h>

#define EXPORT __attribute__((visibility("default")))

struct nvmlDevice_st {
    char place; /* a handle is the address of one of these; which one says the GPU */
};
static struct nvmlDevice_st handles[NODE_MAX_GPUS];
static atomic_int initialised;

/* ------------------------------------------------------------------------------------------------ every call --- */

enum { CALL_ANY, CALL_SYSTEM, CALL_DEVICE };

struct call {
    struct fault fault;
    struct node_state *node;
    int gpu;
};

/* True where the call is to go on; else *answer is its result. */
static bool begin(struct call *call, const char *name, int kind, nvmlDevice_t device, nvmlReturn_t *answer)
{
    *call = (struct call){.fault = fault_ask(name, 0), .node = node_open(), .gpu = -1};
    *answer = NVML_SUCCESS;
    if (call->fault.actions & FAULT_RESULT) {
        *answer = (nvmlReturn_t)call->fault.result; /* success as well: nothing is done then */
        return false;
    }
    if (kind == CALL_ANY)
        return true;
    if (!initialised)
        *answer = NVML_ERROR_UNINITIALIZED;
    else if (!call->node)
        *answer = NVML_ERROR_UNKNOWN;
    else if (kind == CALL_DEVICE) {
        call->gpu = device >= handles && device < handles + node_gpus(call->node) ? (int)(device - handles) : -1;
        if (call->gpu < 0)
            *answer = NVML_ERROR_INVALID_ARGUMENT;
        else if (call->node->gpus[call->gpu].lost)
            *answer = NVML_ERROR_GPU_IS_LOST;
    }
    return *answer == NVML_SUCCESS;
}

static nvmlReturn_t end(struct call *call, nvmlReturn_t result)
{
    if (call->fault.actions & FAULT_CRASH_CALLER_AFTER)
        kill(getpid(), SIGKILL);
    return call->fault.actions & FAULT_AFTER ? (nvmlReturn_t)call->fault.after : result;
}

#define ENTER(kind, device)                                                                                            \
    struct call call_;                                                                                                 \
    nvmlReturn_t answer_;                                                                                              \
    if (!begin(&call_, __func__, (kind), (device), &answer_))                                                          \
    return answer_
#define RETURN(result) return end(&call_, (result))
#define GPU (&call_.node->gpus[call_.gpu])

/* What a rule says instead of the truth ("free:0"): the text after the colon, NULL where it lies about something else. */
static const char *lie_about(const struct call *call, const char *what)
{
    size_t length = strlen(what);
    if (!(call->fault.actions & FAULT_LIE) || strncmp(call->fault.lie, what, length) || call->fault.lie[length] != ':')
        return NULL;
    return call->fault.lie + length + 1;
}

static long number_or_lie(const struct call *call, const char *what, long truth)
{
    const char *lie = lie_about(call, what);
    return lie ? strtol(lie, NULL, 10) : truth;
}

static bool switch_or_lie(const struct call *call, const char *what, bool truth)
{
    const char *lie = lie_about(call, what);
    return lie ? !strcmp(lie, "on") : truth;
}

static nvmlReturn_t give_text(const char *text, char *to, unsigned int length)
{
    if (!to)
        return NVML_ERROR_INVALID_ARGUMENT;
    size_t size = strnlen(text, length); /* once: others in the node may write there */
    if (size >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(to, text, size);
    to[size] = 0;
    return NVML_SUCCESS;
}

/* ---------------------------------------------------------------------------------- start, end, words, system --- */

static nvmlReturn_t initialise(void)
{
    struct node_state *node = node_open();
    if (!node)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    initialised++;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit(void)
{
    ENTER(CALL_ANY, NULL);
    RETURN(initialise());
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
    ENTER(CALL_ANY, NULL);
    RETURN(initialise());
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    ENTER(CALL_ANY, NULL);
    if (flags & ~(unsigned int)(NVML_INIT_FLAG_NO_GPUS | NVML_INIT_FLAG_NO_ATTACH))
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    RETURN(initialise());
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    ENTER(CALL_ANY, NULL);
    for (int count = initialised; count > 0;)
        if (atomic_compare_exchange_weak(&initialised, &count, count - 1))
            RETURN(NVML_SUCCESS);
    RETURN(NVML_ERROR_UNINITIALIZED);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct {
        nvmlReturn_t result;
        const char *words;
    } known[] = {
        {NVML_SUCCESS, "Success"},
        {NVML_ERROR_UNINITIALIZED, "Uninitialized"},
        {NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument"},
        {NVML_ERROR_NOT_SUPPORTED, "Not Supported"},
        {NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"},
        {NVML_ERROR_ALREADY_INITIALIZED, "Already Initialized"},
        {NVML_ERROR_NOT_FOUND, "Not Found"},
        {NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size"},
        {NVML_ERROR_INSUFFICIENT_POWER, "Insufficient External Power"},
        {NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"},
        {NVML_ERROR_TIMEOUT, "Timeout"},
        {NVML_ERROR_IRQ_ISSUE, "Interrupt Request Issue"},
        {NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"},
        {NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found"},
        {NVML_ERROR_CORRUPTED_INFOROM, "Corrupted infoROM"},
        {NVML_ERROR_GPU_IS_LOST, "GPU is lost"},
        {NVML_ERROR_RESET_REQUIRED, "GPU requires reset"},
        {NVML_ERROR_OPERATING_SYSTEM, "The operating system has blocked the request."},
        {NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"},
        {NVML_ERROR_IN_USE, "In use by another client"},
        {NVML_ERROR_MEMORY, "Insufficient Memory"},
        {NVML_ERROR_NO_DATA, "No data"},
        {NVML_ERROR_VGPU_ECC_NOT_SUPPORTED, "ECC is enabled: not available to vGPUs"},
        {NVML_ERROR_INSUFFICIENT_RESOURCES, "Insufficient Resources"},
        {NVML_ERROR_FREQ_NOT_SUPPORTED, "Frequency not supported"},
        {NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
        {NVML_ERROR_DEPRECATED, "Deprecated"},
        {NVML_ERROR_NOT_READY, "Not ready"},
        {NVML_ERROR_GPU_NOT_FOUND, "No GPU found"},
        {NVML_ERROR_INVALID_STATE, "Invalid state"},
        {NVML_ERROR_RESET_TYPE_NOT_SUPPORTED, "Reset type not supported"},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (known[i].result == result)
            return known[i].words;
    return "Unknown Error";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER(CALL_SYSTEM, NULL);
    const char *lie = lie_about(&call_, "driver");
    RETURN(give_text(lie ? lie : call_.node->driver_version, version, length));
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    ENTER(CALL_ANY, NULL);
    char text[64] = "13.0";
    if (call_.node)
        snprintf(text, sizeof(text), "%d.%s", call_.node->cuda_version / 1000, call_.node->driver_version);
    RETURN(give_text(text, version, length));
}

static nvmlReturn_t cuda_version(const struct call *call, int *version)
{
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!call->node)
        return NVML_ERROR_LIBRARY_NOT_FOUND;
    *version = (int)number_or_lie(call, "cuda", call->node->cuda_version);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *cudaDriverVersion)
{
    ENTER(CALL_ANY, NULL);
    RETURN(cuda_version(&call_, cudaDriverVersion));
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *cudaDriverVersion)
{
    ENTER(CALL_ANY, NULL);
    RETURN(cuda_version(&call_, cudaDriverVersion));
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    ENTER(CALL_SYSTEM, NULL);
    char path[64], text[1024];
    if (!name || !length)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        RETURN(NVML_ERROR_NOT_FOUND);
    ssize_t got = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    snprintf(name, length, "%s", text); /* cut where there is no room, as the real one does */
    RETURN(NVML_SUCCESS);
}

/* ------------------------------------------------------------------------------------------------- which GPU --- */

/* NVML numbers the GPUs whose nodes the process can open; of the others it knows nothing, as in a container. */
static int gpus_listed(const struct call *call)
{
    int count = 0;
    for (int gpu = 0; gpu < node_gpus(call->node); gpu++)
        count += node_openable(&call->node->gpus[gpu]);
    return count;
}

/* Which GPU has that number; -1: none. */
static int listed_at(const struct call *call, unsigned int index)
{
    for (int gpu = 0; gpu < node_gpus(call->node); gpu++)
        if (node_openable(&call->node->gpus[gpu]) && !index--)
            return gpu;
    return -1;
}

/* Which number a GPU has. */
static unsigned int index_of(const struct call *call, int wanted)
{
    unsigned int index = 0;
    for (int gpu = 0; gpu < wanted; gpu++)
        index += node_openable(&call->node->gpus[gpu]);
    return index;
}

static nvmlReturn_t device_count(const struct call *call, unsigned int *count)
{
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = (unsigned int)number_or_lie(call, "count", gpus_listed(call));
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned int *deviceCount)
{
    ENTER(CALL_SYSTEM, NULL);
    RETURN(device_count(&call_, deviceCount));
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *deviceCount)
{
    ENTER(CALL_SYSTEM, NULL);
    RETURN(device_count(&call_, deviceCount));
}

static nvmlReturn_t handle_of(const struct call *call, int gpu, nvmlDevice_t *device)
{
    if (gpu < 0 || !node_openable(&call->node->gpus[gpu]))
        return NVML_ERROR_NOT_FOUND;
    if (call->node->gpus[gpu].lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = &handles[gpu];
    return NVML_SUCCESS;
}

static nvmlReturn_t handle_by_index(const struct call *call, unsigned int index, nvmlDevice_t *device)
{
    int gpu = device ? listed_at(call, index) : -1;
    return gpu < 0 ? NVML_ERROR_INVALID_ARGUMENT : handle_of(call, gpu, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    ENTER(CALL_SYSTEM, NULL);
    RETURN(handle_by_index(&call_, index, device));
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER(CALL_SYSTEM, NULL);
    RETURN(handle_by_index(&call_, index, device));
}

static void uuid_text(const struct node_gpu *gpu, char text[41])
{
    const uint8_t *u = gpu->uuid;
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
             u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER(CALL_SYSTEM, NULL);
    if (!uuid || !device)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    int found = -1;
    for (int gpu = 0; gpu < node_gpus(call_.node); gpu++) {
        char text[41];
        uuid_text(&call_.node->gpus[gpu], text);
        if (!strcasecmp(text, uuid))
            found = gpu;
    }
    RETURN(handle_of(&call_, found, device));
}

struct bus {
    unsigned int domain, bus, device;
};

/* "00000000:01:00.0", "0000:01:00.0", "01:00.0", "01:00" */
static bool read_bus(const char *text, struct bus *bus)
{
    unsigned int function = 0;
    char end;
    *bus = (struct bus){0};
    int parts = sscanf(text, "%8x:%2x:%2x.%1x%c", &bus->domain, &bus->bus, &bus->device, &function, &end);
    if (parts == 3 || parts == 4)
        return function == 0;
    bus->domain = function = 0;
    parts = sscanf(text, "%2x:%2x.%1x%c", &bus->bus, &bus->device, &function, &end);
    return (parts == 2 || parts == 3) && function == 0;
}

static nvmlReturn_t handle_by_bus(const struct call *call, const char *text, nvmlDevice_t *device)
{
    struct bus wanted, its;
    if (!text || !device || !read_bus(text, &wanted))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int gpu = 0; gpu < node_gpus(call->node); gpu++)
        if (read_bus(call->node->gpus[gpu].pci, &its) && its.domain == wanted.domain && its.bus == wanted.bus
            && its.device == wanted.device)
            return handle_of(call, gpu, device);
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pciBusId, nvmlDevice_t *device)
{
    ENTER(CALL_SYSTEM, NULL);
    RETURN(handle_by_bus(&call_, pciBusId, device));
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pciBusId, nvmlDevice_t *device)
{
    ENTER(CALL_SYSTEM, NULL);
    RETURN(handle_by_bus(&call_, pciBusId, device));
}

/* ---------------------------------------------------------------------------------------------- what it is like --- */

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER(CALL_DEVICE, device);
    const char *lie = lie_about(&call_, "name");
    RETURN(give_text(lie ? lie : GPU->name, name, length));
}

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *type)
{
    ENTER(CALL_DEVICE, device);
    if (!type)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *type = NVML_BRAND_UNKNOWN;
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER(CALL_DEVICE, device);
    if (!index)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *index = index_of(&call_, call_.gpu);
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER(CALL_DEVICE, device);
    char text[41];
    uuid_text(GPU, text);
    const char *lie = lie_about(&call_, "uuid");
    RETURN(give_text(lie ? lie : text, uuid, length));
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minorNumber)
{
    ENTER(CALL_DEVICE, device);
    if (!minorNumber)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *minorNumber = (unsigned int)number_or_lie(&call_, "minor", GPU->minor);
    RETURN(NVML_SUCCESS);
}

static nvmlReturn_t pci_info(const struct node_gpu *gpu, nvmlPciInfo_t *pci, bool old)
{
    struct bus bus;
    if (!pci)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!read_bus(gpu->pci, &bus))
        return NVML_ERROR_UNKNOWN;
    memset(pci, 0, old ? offsetof(nvmlPciInfo_t, busId) : sizeof(*pci)); /* callers of the old one may lack the rest */
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", bus.domain & 0xffff, bus.bus & 0xff,
             bus.device & 0x1f);
    pci->domain = bus.domain;
    pci->bus = bus.bus;
    pci->device = bus.device;
    if (!old)
        snprintf(pci->busId, sizeof(pci->busId), "%08X:%02X:%02X.0", bus.domain, bus.bus & 0xff, bus.device & 0x1f);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER(CALL_DEVICE, device);
    RETURN(pci_info(GPU, pci, true));
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER(CALL_DEVICE, device);
    RETURN(pci_info(GPU, pci, true));
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER(CALL_DEVICE, device);
    RETURN(pci_info(GPU, pci, false));
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER(CALL_DEVICE, device);
    if (!major || !minor)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *major = GPU->cc_major;
    *minor = GPU->cc_minor;
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *pVirtualMode)
{
    ENTER(CALL_DEVICE, device);
    if (!pVirtualMode)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *pVirtualMode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
    RETURN(NVML_SUCCESS);
}

/* ------------------------------------------------------------------------------------------------------- modes --- */

/* Change one field of a GPU under the node's lock; only root may, as with the real driver. */
static nvmlReturn_t set_mode(uint32_t *field, uint32_t value)
{
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    int lock = node_lock();
    if (lock < 0)
        return NVML_ERROR_UNKNOWN;
    *field = value;
    node_unlock(lock);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER(CALL_DEVICE, device);
    if (!mode)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *mode = switch_or_lie(&call_, "persistence", GPU->persistence) ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    ENTER(CALL_DEVICE, device);
    if (mode != NVML_FEATURE_ENABLED && mode != NVML_FEATURE_DISABLED)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    RETURN(set_mode(&GPU->persistence, mode == NVML_FEATURE_ENABLED));
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    ENTER(CALL_DEVICE, device);
    if (!mode)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *mode = (nvmlComputeMode_t)GPU->compute_mode;
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
    ENTER(CALL_DEVICE, device);
    if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD) /* support for it was removed */
        RETURN(NVML_ERROR_NOT_SUPPORTED);
    if (mode != NVML_COMPUTEMODE_DEFAULT && mode != NVML_COMPUTEMODE_PROHIBITED
        && mode != NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    RETURN(set_mode(&GPU->compute_mode, (uint32_t)mode));
}

static bool knows_mig(const struct node_gpu *gpu)
{
    return gpu->cc_major >= 10 || (gpu->cc_minor == 0 && (gpu->cc_major == 8 || gpu->cc_major == 9));
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode, unsigned int *pendingMode)
{
    ENTER(CALL_DEVICE, device);
    if (!currentMode || !pendingMode)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    if (!knows_mig(GPU) && !lie_about(&call_, "mig"))
        RETURN(NVML_ERROR_NOT_SUPPORTED);
    *currentMode = *pendingMode = switch_or_lie(&call_, "mig", GPU->mig);
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activationStatus)
{
    ENTER(CALL_DEVICE, device);
    if (!activationStatus || mode > 1)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    if (!knows_mig(GPU))
        RETURN(NVML_ERROR_NOT_SUPPORTED);
    nvmlReturn_t result = set_mode(&GPU->mig, mode);
    if (result == NVML_SUCCESS)
        *activationStatus = NVML_SUCCESS;
    RETURN(result);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *isMigDevice)
{
    ENTER(CALL_DEVICE, device);
    if (!isMigDevice)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *isMigDevice = 0;
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER(CALL_DEVICE, device);
    if (!count)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    *count = knows_mig(GPU) ? 7 : 0;
    RETURN(NVML_SUCCESS);
}

/* ------------------------------------------------------------------------------------------ memory, processes --- */

static void memory_numbers(const struct call *call, uint64_t *total, uint64_t *used, uint64_t *left)
{
    const char *lie;
    *total = call->node->gpus[call->gpu].memory;
    *used = node_used(call->gpu);
    *left = *used < *total ? *total - *used : 0;
    if ((lie = lie_about(call, "free")))
        *left = strtoull(lie, NULL, 10);
    if ((lie = lie_about(call, "used")))
        *used = strtoull(lie, NULL, 10);
    if ((lie = lie_about(call, "total")))
        *total = strtoull(lie, NULL, 10);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER(CALL_DEVICE, device);
    uint64_t total, used, left;
    if (!memory)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    memory_numbers(&call_, &total, &used, &left);
    *memory = (nvmlMemory_t){.total = total, .free = left, .used = used};
    RETURN(NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER(CALL_DEVICE, device);
    uint64_t total, used, left;
    if (!memory)
        RETURN(NVML_ERROR_INVALID_ARGUMENT);
    if (memory->version != nvmlMemory_v2)
        RETURN(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    memory_numbers(&call_, &total, &used, &left);
    memory->total = total;
    memory->reserved = 0;
    memory->free = left;
    memory->used = used;
    RETURN(NVML_SUCCESS);
}

/* All versions of a list: infos NULL or too short for it tells how long it is. */
static nvmlReturn_t list(const struct call *call, bool wanted, unsigned int *count, nvmlProcessInfo_v1_t *first,
                         nvmlProcessInfo_v2_t *second)
{
    if (!count || (*count && !first && !second))
        return NVML_ERROR_INVALID_ARGUMENT;
    const char *lie = lie_about(call, "processes");
    unsigned int room = *count;
    struct node_process *found = NULL;
    int n = 0;
    if (wanted && !(lie && !strcmp(lie, "none")))
        for (int length = 16;; length = n) {
            struct node_process *more = realloc(found, (size_t)length * sizeof(*found));
            if (!more) {
                free(found);
                return NVML_ERROR_MEMORY;
            }
            found = more;
            n = node_processes(call->gpu, found, length);
            if (n <= length)
                break;
        }
    *count = (unsigned int)n;
    if ((unsigned int)n > room) {
        free(found);
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    for (int i = 0; i < n; i++) {
        if (first)
            first[i] = (nvmlProcessInfo_v1_t){.pid = (unsigned int)found[i].pid, .usedGpuMemory = found[i].bytes};
        if (second)
            second[i] = (nvmlProcessInfo_v2_t){.pid = (unsigned int)found[i].pid,
                                               .usedGpuMemory = found[i].bytes,
                                               .gpuInstanceId = 0xffffffff,
                                               .computeInstanceId = 0xffffffff};
    }
    free(found);
    return NVML_SUCCESS;
}

static bool clients_of_mps(const struct call *call)
{
    return call->node->nvml_flags & NODE_NVML_MPS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *infoCount,
                                                         nvmlProcessInfo_v1_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, !clients_of_mps(&call_), infoCount, infos, NULL));
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *infoCount,
                                                            nvmlProcessInfo_v2_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, !clients_of_mps(&call_), infoCount, NULL, infos));
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount,
                                                            nvmlProcessInfo_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, !clients_of_mps(&call_), infoCount, NULL, infos));
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses(nvmlDevice_t device, unsigned int *infoCount,
                                                            nvmlProcessInfo_v1_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, clients_of_mps(&call_), infoCount, infos, NULL));
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *infoCount,
                                                               nvmlProcessInfo_v2_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, clients_of_mps(&call_), infoCount, NULL, infos));
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount,
                                                               nvmlProcessInfo_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, clients_of_mps(&call_), infoCount, NULL, infos));
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses(nvmlDevice_t device, unsigned int *infoCount,
                                                          nvmlProcessInfo_v1_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, false, infoCount, infos, NULL));
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v2(nvmlDevice_t device, unsigned int *infoCount,
                                                             nvmlProcessInfo_v2_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, false, infoCount, NULL, infos));
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *infoCount,
                                                             nvmlProcessInfo_t *infos)
{
    ENTER(CALL_DEVICE, device);
    RETURN(list(&call_, false, infoCount, NULL, infos));
}
