#include "park.h"
#include "bulk.h"
#include "driver.h"
#include "fds.h"
#include "memory.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

bool park_can(const struct memory *memory)
{
    return !memory->shared && (memory->mappings || memory->references);
}

int park_descriptor(struct memory *memory, CUresult *result)
{
    int fd = -1;

    *result = CUDA_SUCCESS;
    if (memory->kept >= 0) {
        fd = fcntl(memory->kept, F_DUPFD_CLOEXEC, 0);
        *result = fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        return fd;
    }
    if (!memory->driver)
        *result = CUDA_ERROR_INVALID_HANDLE;
    else
        *result = real(cuMemExportToShareableHandle)(&fd, memory->driver, HANDLE_POSIX_FD, 0);
    if (*result)
        return -1;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

/* A context that has ended has no work. One that ended in a way that nobody saw is dropped so. */
static CUresult wait_in(CUcontext context, const _Atomic bool *enough)
{
    CUresult result = real(cuCtxSetCurrent)(context);

    if (!result && !atomic_load(enough))
        result = real(cuCtxSynchronize)();
    real(cuCtxSetCurrent)(NULL);
    return result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED ? CUDA_SUCCESS : result;
}

CUresult park_wait(const CUcontext *made, size_t n_made, const _Atomic bool *enough)
{
    /* cuCtxSynchronize waits for the current context alone: each primary one that is active, and each that
     * the application has made. */
    CUresult result = CUDA_SUCCESS;
    int n = 0;

    if ((result = real(cuDeviceGetCount)(&n)))
        return result;
    for (int device = 0; device < n && !result && !atomic_load(enough); device++) {
        CUcontext context = NULL;
        unsigned flags;
        int active = 0;
        if (real(cuDevicePrimaryCtxGetState)(device, &flags, &active) || !active)
            continue;
        if ((result = real(cuDevicePrimaryCtxRetain)(&context, device)))
            break;
        result = wait_in(context, enough);
        real(cuDevicePrimaryCtxRelease_v2)(device);
    }
    for (size_t i = 0; i < n_made && !result && !atomic_load(enough); i++)
        result = wait_in(made[i], enough);
    return result;
}

/* Lets go of what was made for it and has not become its own. */
static void unmake(struct memory *memory)
{
    if (memory->made)
        real(cuMemRelease)(memory->made);
    memory->made = 0;
}

void park_unmake(void)
{
    struct memory *memory;

    for (size_t i = 0; (memory = memory_nth(i)); i++)
        unmake(memory);
}

CUresult park_unmap(void)
{
    struct mapping *mapping;
    struct memory *memory;

    for (size_t i = 0; (mapping = mapping_nth(i)); i++)
        if (park_can(mapping->memory) && !mapping->away) {
            CUresult result = real(cuMemUnmap)(mapping->at, mapping->bytes);
            if (result)
                return result; /* the rest is where it was, and park_map puts back what is not */
            mapping->away = true;
        }
    park_unmake();
    for (size_t i = 0; (memory = memory_nth(i)); i++)
        if (park_can(memory) && memory->driver) {
            /* Not let go of, the driver would save it, and never bring back what was imported. */
            CUresult result = real(cuMemRelease)(memory->driver);
            if (result)
                return result;
            memory->driver = 0;
            if (memory->kept >= 0)
                fds_close(memory->kept);
            memory->kept = -1;
        }
    memory_guard();
    return CUDA_SUCCESS;
}

static struct park_trouble trouble;

struct park_trouble park_trouble(void)
{
    return trouble;
}

/* Imports it where it is not there, and maps it everywhere it was. Whatever has been done stays done on failure. */
static CUresult put_back(struct memory *memory, CUhandle *driver, int fd)
{
    CUresult result = CUDA_SUCCESS;
    struct mapping *mapping;

    trouble.step = PARK_IMPORT;
    if (!*driver)
        result = real(cuMemImportFromShareableHandle)(driver, (void *)(uintptr_t)fd, HANDLE_POSIX_FD);
    for (size_t i = 0; !result && (mapping = mapping_of(memory, &i)); i++) {
        if (!mapping->away)
            continue;
        trouble.step = PARK_MAP;
        if ((result = real(cuMemMap)(mapping->at, mapping->bytes, mapping->offset, *driver, 0)))
            break;
        trouble.step = PARK_SHOW;
        if ((result = memory_show(mapping)))
            real(cuMemUnmap)(mapping->at, mapping->bytes);
        else
            mapping->away = false;
    }
    return result;
}

CUresult park_make(struct memory *memory, int *fd)
{
    CUmemAllocationProp prop = memory->asked;
    CUresult result = CUDA_SUCCESS;

    prop.requestedHandleTypes |= HANDLE_POSIX_FD;
    if (memory->driver)
        return CUDA_ERROR_INVALID_VALUE; /* it is there */
    if (!memory->made)
        result = real(cuMemCreate)(&memory->made, memory->bytes, &prop, 0);
    if (!result)
        result = real(cuMemExportToShareableHandle)(fd, memory->made, HANDLE_POSIX_FD, 0);
    if (!result)
        fcntl(*fd, F_SETFD, FD_CLOEXEC);
    return result;
}

CUresult park_map(struct memory *memory, int fd)
{
    if (fd >= 0 && memory->driver) { /* it has not left: what was sent is not needed */
        fds_close(fd);
        fd = -1;
    }
    if (fd >= 0)
        unmake(memory); /* it is to have this instead */
    CUhandle driver = memory->driver ? memory->driver : memory->made;
    if (fd >= 0)
        bulk_guard(true);
    CUresult result = put_back(memory, &driver, fd);
    trouble.device = memory->asked.location.id;
    if (!result)
        trouble.step = 0;
    if (result && !memory->driver) { /* as if nothing had been tried */
        struct mapping *mapping;
        for (size_t i = 0; (mapping = mapping_of(memory, &i)); i++)
            if (!mapping->away) {
                real(cuMemUnmap)(mapping->at, mapping->bytes);
                mapping->away = true;
            }
        if (driver && driver != memory->made)
            real(cuMemRelease)(driver);
        if (fd >= 0)
            fds_close(fd);
        memory_guard();
        return result;
    }
    if (!result && !memory->driver) {
        memory->driver = driver;
        memory->made = 0;
        /* What was imported cannot be exported: this is how it can be given away the next time. */
        memory->kept = fds_away(fd);
    }
    return result;
}
