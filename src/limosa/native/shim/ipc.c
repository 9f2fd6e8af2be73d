/* Legacy handles (cuIpcGetMemHandle) of memory that is looked after: the driver has none for it, so ours name the
 * process and the memory. Whoever opens one asks that process's shim for a descriptor, and from then on both have the
 * same memory under one number (`share`): it is put away in all of them, and comes back as one. */
#include "ipc.h"
#include "bulk.h"
#include "compiler.h"
#include "count.h"
#include "driver.h"
#include "fds.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "memory.h"
#include "protocol.h"
#include "serve.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x6c696d6f73614951ull
#define LAZY_PEER_ACCESS 1
#define CONNECT_SECONDS 60

struct handle { /* CUipcMemHandle has 64 bytes */
    char bytes[64];
};
struct said {
    uint64_t magic, token, share, id, bytes, asked;
    int32_t pid;
    uint32_t name; /* of its socket, when the handle was made */
};
_Static_assert(sizeof(struct said) <= sizeof(struct handle), "ours fits");

static uint64_t token; /* this process's own: its pid may be somebody else's by the time a handle is opened */

static uint64_t drawn(void)
{
    uint64_t number = 0;

    while (getrandom(&number, sizeof number, 0) != sizeof number || !number)
        ;
    return number;
}

void ipc_in_child(void)
{
    token = 0;
}

bool ipc_is_ours(uint64_t asked)
{
    return asked && asked == token;
}

static CUresult get(struct handle *handle, CUdeviceptr pointer)
{
    typedef CUresult type(struct handle *, CUdeviceptr);
    type *function = (type *)entry_real(AT_cuIpcGetMemHandle);
    struct said said = {.magic = MAGIC, .pid = (int32_t)getpid(), .name = serve_name()};

    memory_lock();
    const struct mapping *mapping = mapping_at(pointer);
    bool ours = handle && mapping && mapping->plain && !mapping->freeing;
    if (ours) {
        struct memory *memory = mapping->memory;
        token = token ? token : drawn();
        memory->share = memory->share ? memory->share : drawn();
        said.token = token;
        said.share = memory->share;
        said.id = memory->id;
        said.bytes = mapping->bytes;
        said.asked = mapping->asked;
    }
    memory_unlock();
    if (!ours) {
        CUresult result = function ? function(handle, pointer) : CUDA_ERROR_NO_DEVICE;
        if (!result && shim_ready())
            left_call(LEFT_IPC);
        return result;
    }
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &said, sizeof said);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcGetMemHandle(struct handle *handle, CUdeviceptr pointer)
{
    entry_called(AT_cuIpcGetMemHandle);
    struct reader *reader = gate_enter();
    CUresult result = get(handle, pointer);
    gate_leave(reader);
    return result;
}

/* Whether that process is at the other end, or somebody whom we would believe anyway: anybody may take a name that is
 * free. By its user where we do not see it by the number that it has for itself. */
static bool answers_itself(int with, const struct said *said)
{
    struct ucred who;
    socklen_t size = sizeof who;

    return !getsockopt(with, SOL_SOCKET, SO_PEERCRED, &who, &size)
        && (who.uid == 0 || who.uid == geteuid() || who.pid == said->pid);
}

/* What is told, and the descriptor with it: that one alone, whatever else has been sent. It is waited for without a limit:
 * whoever works on that process, saving it while it runs, say, is served first. */
static int32_t answer_of(int with, int *fd)
{
    struct message answer = {.result = 0};
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {&answer, sizeof answer};
    struct msghdr back;
    ssize_t got;

    do {
        poll(&(struct pollfd){.fd = with, .events = POLLIN}, 1, -1);
        /* CMSG_SPACE has room for two. */
        back = (struct msghdr){
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int))};
        fds_begin();
        got = recvmsg(with, &back, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        struct cmsghdr *head = got >= 0 ? CMSG_FIRSTHDR(&back) : NULL;
        if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS
            && head->cmsg_len == CMSG_LEN(sizeof(int))) {
            memcpy(fd, CMSG_DATA(head), sizeof *fd);
            fds_note(*fd);
        }
        fds_end();
    } while (got < 0 && (errno == EINTR || errno == EAGAIN));
    if (got == sizeof answer && !(back.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && answer.magic == PROTOCOL_MAGIC
        && answer.version == PROTOCOL_VERSION && answer.verb == VERB_SHARE && (answer.result || *fd >= 0))
        return answer.result;
    return got == sizeof answer ? -EPROTO : -ENOENT;
}

/* The number in what a shim's thread is called; not sscanf, which other C libraries have by another name. */
static bool number_in(const char *text, size_t n, uint32_t *number)
{
    static const char before[] = "limosa-", digits[] = "0123456789abcdef";
    size_t at = sizeof before - 1;

    if (n < at + 8 || memcmp(text, before, at))
        return false;
    uint32_t found = 0;
    for (size_t i = 0; i < 8; i++) {
        const char *digit = memchr(digits, text[at + i], sizeof digits - 1);
        if (!digit)
            return false;
        found = found << 4 | (uint32_t)(digit - digits);
    }
    *number = found;
    return true;
}

/* What the socket of that process is called now: it has another name after a restore from an image. Where we do not see the
 * process by the number that it has for itself, what it was when the handle was made. */
static uint32_t name_of(const struct said *said)
{
    char path[64], text[16];
    uint32_t name = said->name;
    snprintf(path, sizeof path, "/proc/%d/task", said->pid);
    DIR *threads = opendir(path);
    bool found = false;

    for (struct dirent *thread; threads && !found && (thread = readdir(threads));) {
        snprintf(path, sizeof path, "/proc/%d/task/%.16s/comm", said->pid, thread->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text);
        if (fd >= 0)
            close(fd);
        found = n > 0 && number_in(text, (size_t)n, &name);
    }
    if (threads)
        closedir(threads);
    return name;
}

/* Asks the shim of the process that made the handle. Returns what is told, and the connection: while it lasts nobody else
 * is served there, so that memory is neither put away nor taken back before it is open here. */
static int32_t ask(const struct said *said, int *fd, int *connection)
{
    struct message asked = {.magic = PROTOCOL_MAGIC,
                            .version = PROTOCOL_VERSION,
                            .verb = VERB_SHARE,
                            .a = said->id,
                            .b = said->token,
                            .c = said->share};
    struct timeval limit = {CONNECT_SECONDS, 0};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int n = snprintf(address.sun_path + 1, sizeof address.sun_path - 1, SERVE_NAME, name_of(said));
    int32_t result = -ENOENT;

    fds_begin(); /* a child that had it would keep the shim at the other end waiting */
    int with = fds_note(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    fds_end();
    if (with < 0)
        return -ENOMEM;
    setsockopt(with, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(with, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)))
        result = errno == EAGAIN || errno == EINTR ? -EAGAIN : -ENOENT; /* so many others wait there */
    else if (answers_itself(with, said) && send(with, &asked, sizeof asked, MSG_NOSIGNAL) == sizeof asked)
        result = answer_of(with, fd);
    if (!result) {
        *connection = with;
        return 0;
    }
    if (*fd >= 0)
        fds_close(*fd);
    *fd = -1;
    shutdown(with, SHUT_RDWR);
    fds_close(with);
    return result;
}

/* Open already in this context: the same address again. */
static bool again(CUdeviceptr *pointer, const struct said *said)
{
    CUcontext context = NULL;
    struct mapping *mapping;
    bool found = false;

    real(cuCtxGetCurrent)(&context);
    memory_lock();
    for (size_t i = 0; !found && (mapping = mapping_nth(i)); i++)
        if (mapping->opened && !mapping->freeing && mapping->memory->share == said->share
            && mapping->context == context) {
            mapping->times++;
            *pointer = mapping->at;
            found = true;
        }
    memory_unlock();
    return found;
}

static struct memory *noted(struct mapping *mapping, const struct said *said, CUhandle driver, int fd,
                            const CUmemAllocationProp *prop)
{
    memory_lock();
    struct memory *memory = memory_new(driver, said->bytes, prop);
    if (memory) {
        mapping->memory = memory;
        memory->share = said->share;
        memory->owner = said->pid;
        if (mapping_add(mapping)) {
            memory->kept = fds_away(fd);
        } else {
            memory_let_go(memory);
            memory = NULL;
        }
    }
    memory_unlock();
    return memory;
}

/* The descriptor is ours from here on. */
static CUresult import(CUdeviceptr *pointer, const struct said *said, int fd)
{
    struct mapping *mapping = calloc(1, sizeof *mapping);
    CUmemAllocationProp prop = {.type = ALLOCATION_PINNED, .location = {LOCATION_DEVICE, 0}};
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    CUhandle driver = 0;
    CUdeviceptr at = 0;
    CUdevice device = 0;

    if (!mapping)
        goto no_mapping;
    *mapping = (struct mapping){.bytes = said->bytes, .asked = said->asked, .opened = true, .times = 1};
    result = CUDA_ERROR_INVALID_CONTEXT;
    if (real(cuCtxGetCurrent)(&mapping->context) || real(cuCtxGetDevice)(&device))
        goto no_import;
    result = CUDA_ERROR_INVALID_VALUE;
    bulk_guard(true);
    if (real(cuMemImportFromShareableHandle)(&driver, (void *)(uintptr_t)fd, HANDLE_POSIX_FD))
        goto no_import;
    /* Which of our GPUs it is on: the driver knows. */
    if (real(cuMemGetAllocationPropertiesFromHandle)(&prop, driver) || prop.location.type != LOCATION_DEVICE
        || prop.location.id < 0 || prop.location.id >= MAX_DEVICES)
        prop.location = (CUmemLocation){LOCATION_DEVICE, device};
    prop.requestedHandleTypes = 0;
    mapping->access[device] = ACCESS_READWRITE;
    mapping->access[prop.location.id] = ACCESS_READWRITE;
    if (real(cuMemAddressReserve)(&at, said->bytes, 0, 0, 0))
        goto no_address;
    mapping->at = at;
    if (real(cuMemMap)(at, said->bytes, 0, driver, 0))
        goto no_map;
    if (memory_show(mapping))
        goto no_record;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!noted(mapping, said, driver, fd, &prop))
        goto no_record;
    *pointer = at;
    return CUDA_SUCCESS;

no_record:
    real(cuMemUnmap)(at, said->bytes);
no_map:
    real(cuMemAddressFree)(at, said->bytes);
no_address:
    real(cuMemRelease)(driver);
no_import:
    memory_lock();
    memory_guard();
    memory_unlock();
    free(mapping);
no_mapping:
    fds_close(fd);
    return result;
}

static CUresult open_ours(CUdeviceptr *pointer, const struct said *said, unsigned flags)
{
    int fd = -1, connection = -1;
    int32_t told;

    if (!pointer || flags != LAZY_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    if (said->pid == (int32_t)getpid() && ipc_is_ours(said->token))
        return CUDA_ERROR_INVALID_CONTEXT; /* one's own memory */
    for (;;) {
        struct reader *reader = gate_enter();
        bool there = again(pointer, said);
        gate_leave(reader);
        if (there)
            return CUDA_SUCCESS;
        /* Outside of the gate: that process's may be closed together with ours. While its memory is away nobody can open
         * it, as with a process that the driver holds. */
        if ((told = ask(said, &fd, &connection)) != -EAGAIN)
            break;
        poll(NULL, 0, 20);
    }
    switch (told) {
    case 0: break;
    case -ENOENT: return CUDA_ERROR_INVALID_HANDLE; /* as where the exporter is gone */
    case -ENOMEM: return CUDA_ERROR_OUT_OF_MEMORY;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    struct reader *reader = gate_enter();
    CUresult result = import(pointer, said, fd);
    gate_leave(reader);
    shutdown(connection, SHUT_RDWR); /* also for a child that was forked meanwhile and has it, too */
    fds_close(connection);
    return result;
}

static CUresult open_any(int place, CUdeviceptr *pointer, struct handle handle, unsigned flags)
{
    typedef CUresult type(CUdeviceptr *, struct handle, unsigned);
    type *function = (type *)entry_call(place);
    CUcontext context = NULL;
    struct said said;

    memcpy(&said, &handle, sizeof said);
    if (said.magic == MAGIC && shim_ready())
        return open_ours(pointer, &said, flags);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(pointer, handle, flags);
    if (!result && shim_ready() && !real(cuCtxGetCurrent)(&context))
        left_add(LEFT_IPC, *pointer, 0, context);
    gate_leave(reader);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, struct handle handle, unsigned flags)
{
    return open_any(AT_cuIpcOpenMemHandle, pointer, handle, flags);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, struct handle handle, unsigned flags)
{
    return open_any(AT_cuIpcOpenMemHandle_v2, pointer, handle, flags);
}

static CUresult close_any(CUdeviceptr pointer)
{
    typedef CUresult type(CUdeviceptr);
    type *function = (type *)entry_real(AT_cuIpcCloseMemHandle);

    memory_lock();
    struct mapping *mapping = mapping_at(pointer);
    bool ours = mapping && mapping->opened && mapping->at == pointer && mapping->times > 0 && !mapping->freeing;
    int times = ours ? --mapping->times : 0;
    CUcontext context = ours ? mapping->context : NULL;
    memory_unlock();
    if (!ours) {
        struct left_piece *piece = left_take(pointer);
        CUresult result = function ? function(pointer) : CUDA_ERROR_NO_DEVICE;
        left_freed(piece, result);
        return result;
    }
    if (times > 0)
        return CUDA_SUCCESS;
    CUresult result = wait_for_work(context);
    memory_lock();
    size_t place = mapping_place(pointer);
    mapping = mapping_nth(place);
    if (mapping && mapping->at == pointer && mapping->opened && !mapping->times) {
        if (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) { /* later: nobody may wait now */
            mapping->freeing = true;
            late_add(mapping, NULL, NULL, false);
            result = CUDA_SUCCESS;
        } else {
            mapping_take_away(place);
        }
    }
    memory_unlock();
    return result;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    entry_called(AT_cuIpcCloseMemHandle);
    struct reader *reader = gate_enter();
    CUresult result = close_any(pointer);
    gate_leave(reader);
    return result;
}
