/* Legacy handles (cuIpcGetMemHandle) of memory that is looked after: the driver has none for it, so ours name the
 * process and the memory. Whoever opens one asks that process's shim for a descriptor. Memory that was given away so is
 * shared: it stays where it is from then on. */
#include "memory.h"
#include "protocol.h"
#include "shim.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define MAGIC 0x6c696d6f73614950ull
#define LAZY_PEER_ACCESS 1
#define ANSWER_SECONDS 5

struct handle { /* CUipcMemHandle has 64 bytes */
    char bytes[64];
};
struct said {
    uint64_t magic, start_time, id, bytes;
    int32_t pid, device;
};
_Static_assert(sizeof(struct said) <= sizeof(struct handle), "ours fits");

struct opened {
    struct said said;
    CUcontext context;
    CUdeviceptr at;
    CUhandle driver;
    int times;
};
static struct opened *opened; /* guarded by memory_lock */
static size_t n_opened;

/* Of a process that there is; 0 of none. Its number may be somebody else's by the time a handle is opened. */
static uint64_t start_time(int pid)
{
    char text[1024], *at;
    uint64_t value = 0;

    snprintf(text, sizeof text, "/proc/%d/stat", pid);
    FILE *file = fopen(text, "re");
    size_t n = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[n] = 0;
    at = strrchr(text, ')');
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at)
        value = strtoull(at + 1, NULL, 10);
    return value;
}

static CUresult get(struct handle *handle, CUdeviceptr pointer)
{
    typedef CUresult type(struct handle *, CUdeviceptr);
    type *function = (type *)entry_real(entry_of("cuIpcGetMemHandle"));
    struct said said = {.magic = MAGIC, .pid = (int32_t)getpid(), .start_time = start_time(getpid())};

    pthread_mutex_lock(&memory_lock);
    const struct mapping *mapping = mapping_at(pointer);
    bool ours = handle && said.start_time && mapping && mapping->plain && !mapping->freeing;
    if (ours) {
        said.id = mapping->memory->id;
        said.bytes = mapping->bytes;
        said.device = mapping->memory->asked.location.id;
        mapping->memory->shared = true;
    }
    pthread_mutex_unlock(&memory_lock);
    if (!ours)
        return function ? function(handle, pointer) : CUDA_ERROR_NO_DEVICE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &said, sizeof said);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcGetMemHandle(struct handle *handle, CUdeviceptr pointer)
{
    struct reader *reader = gate_enter();
    CUresult result = shim_ready() ? get(handle, pointer) : CUDA_ERROR_NO_DEVICE;
    gate_leave(reader);
    return result;
}

/* A descriptor from the shim of the process that made the handle. Asked outside of the gate: that process's may be
 * closed together with ours. */
static CUresult descriptor(const struct said *said, int *fd)
{
    struct message asked = {.magic = PROTOCOL_MAGIC, .version = PROTOCOL_VERSION, .verb = VERB_EXPORT}, answer;
    struct {
        struct message message;
        uint64_t id;
    } packet = {asked, said->id};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {&answer, sizeof answer};
    struct msghdr back = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct timeval limit = {ANSWER_SECONDS, 0};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, "limosa/shim/%d", said->pid);
    int with = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CUresult result = CUDA_ERROR_INVALID_HANDLE; /* as where the exporter is gone */

    if (with < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (start_time(said->pid) != said->start_time) {
        close(with);
        return result;
    }
    setsockopt(with, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(with, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (!connect(with, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n))
        && send(with, &packet, sizeof packet, MSG_NOSIGNAL) == sizeof packet
        && recvmsg(with, &back, MSG_CMSG_CLOEXEC) == sizeof answer) {
        struct cmsghdr *head = CMSG_FIRSTHDR(&back);
        result = CUDA_ERROR_INVALID_VALUE;
        if (!answer.result && head && head->cmsg_type == SCM_RIGHTS) {
            memcpy(fd, CMSG_DATA(head), sizeof *fd);
            result = CUDA_SUCCESS;
        }
    }
    close(with);
    return result;
}

static CUresult import(const struct said *said, int fd, struct opened *made)
{
    CUmemAccessDesc access = {{LOCATION_DEVICE, 0}, ACCESS_READWRITE};

    *made = (struct opened){.said = *said, .times = 1};
    if (real(cuCtxGetCurrent)(&made->context) || real(cuCtxGetDevice)(&access.location.id))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (real(cuMemImportFromShareableHandle)(&made->driver, (void *)(uintptr_t)fd, HANDLE_POSIX_FD))
        return CUDA_ERROR_INVALID_VALUE;
    if (!real(cuMemAddressReserve)(&made->at, said->bytes, 0, 0, 0)) {
        if (!real(cuMemMap)(made->at, said->bytes, 0, made->driver, 0)) {
            if (!real(cuMemSetAccess)(made->at, said->bytes, &access, 1)) {
                left_add(LEFT_SHARED, said->bytes);
                return CUDA_SUCCESS;
            }
            real(cuMemUnmap)(made->at, said->bytes);
        }
        real(cuMemAddressFree)(made->at, said->bytes);
    }
    real(cuMemRelease)(made->driver);
    return CUDA_ERROR_INVALID_VALUE;
}

/* Open already in this context: the same address again. */
static bool again(CUdeviceptr *pointer, const struct said *said)
{
    CUcontext context = NULL;
    bool found = false;

    real(cuCtxGetCurrent)(&context);
    pthread_mutex_lock(&memory_lock);
    for (size_t i = 0; i < n_opened && !found; i++)
        if (!memcmp(&opened[i].said, said, sizeof *said) && opened[i].context == context) {
            opened[i].times++;
            *pointer = opened[i].at;
            found = true;
        }
    pthread_mutex_unlock(&memory_lock);
    return found;
}

static CUresult open_ours(CUdeviceptr *pointer, const struct said *said, unsigned flags)
{
    struct opened made;
    int fd = -1;

    if (!pointer || flags != LAZY_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (said->pid == (int32_t)getpid() && said->start_time == start_time(getpid()))
        return CUDA_ERROR_INVALID_CONTEXT; /* one's own memory */
    struct reader *reader = gate_enter();
    bool there = again(pointer, said);
    gate_leave(reader);
    if (there)
        return CUDA_SUCCESS;
    CUresult result = descriptor(said, &fd);
    if (result)
        return result;
    reader = gate_enter();
    result = import(said, fd, &made);
    if (!result) {
        pthread_mutex_lock(&memory_lock);
        struct opened *more = realloc(opened, (n_opened + 1) * sizeof *more);
        if (more) {
            opened = more;
            opened[n_opened++] = made;
            *pointer = made.at;
        }
        pthread_mutex_unlock(&memory_lock);
        result = more ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    gate_leave(reader);
    close(fd);
    return result;
}

static CUresult open_any(const char *name, CUdeviceptr *pointer, struct handle handle, unsigned flags)
{
    typedef CUresult type(CUdeviceptr *, struct handle, unsigned);
    type *function = (type *)entry_real(entry_of(name));
    struct said said;

    memcpy(&said, &handle, sizeof said);
    if (said.magic == MAGIC && shim_ready())
        return open_ours(pointer, &said, flags);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(pointer, handle, flags);
    gate_leave(reader);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, struct handle handle, unsigned flags)
{
    return open_any("cuIpcOpenMemHandle", pointer, handle, flags);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, struct handle handle, unsigned flags)
{
    return open_any("cuIpcOpenMemHandle_v2", pointer, handle, flags);
}

static CUresult close_any(CUdeviceptr pointer)
{
    typedef CUresult type(CUdeviceptr);
    type *function = (type *)entry_real(entry_of("cuIpcCloseMemHandle"));
    struct opened gone = {.times = -1};

    pthread_mutex_lock(&memory_lock);
    for (size_t i = 0; i < n_opened; i++)
        if (opened[i].at == pointer) {
            gone = opened[i];
            gone.times = --opened[i].times;
            if (!gone.times)
                opened[i] = opened[--n_opened];
            break;
        }
    pthread_mutex_unlock(&memory_lock);
    if (gone.times < 0)
        return function ? function(pointer) : CUDA_ERROR_NO_DEVICE;
    if (gone.times > 0)
        return CUDA_SUCCESS;
    CUresult result = real(cuCtxSynchronize)();
    real(cuMemUnmap)(gone.at, gone.said.bytes);
    real(cuMemRelease)(gone.driver);
    real(cuMemAddressFree)(gone.at, gone.said.bytes);
    return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    struct reader *reader = gate_enter();
    CUresult result = close_any(pointer);
    gate_leave(reader);
    return result;
}
