/* What can be asked about a pointer. */
#include "memory.h"

#include <stdint.h>
#include <string.h>

struct pointer {
    struct allocation *allocation;
    struct vmm_place place; /* where there is no allocation and the address lies in a reservation */
    bool reserved;
};

static bool pointer_look(CUdeviceptr address, struct pointer *pointer)
{
    memset(pointer, 0, sizeof(*pointer));
    pointer->allocation = allocation_at(address);
    pointer->reserved = !pointer->allocation && vmm_find(address, &pointer->place);
    return pointer->allocation || pointer->reserved;
}

static bool is_host(const struct pointer *pointer)
{
    return pointer->allocation && pointer->allocation->ordinal < 0;
}

static bool is_mapped(const struct pointer *pointer)
{
    return pointer->allocation || pointer->place.start;
}

static CUresult access_of(const struct pointer *pointer, struct context *context, void *data)
{
    CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS flags = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;

    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (pointer->reserved)
        flags = (CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS)pointer->place.access[context->ordinal];
    else if (pointer->allocation->kind == MEMORY_REGISTERED
             && pointer->allocation->flags & CU_MEMHOSTREGISTER_READ_ONLY)
        flags = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READ;
    memcpy(data, &flags, sizeof(flags));
    return CUDA_SUCCESS;
}

/* One attribute of a pointer that is one of ours. A reservation with nothing in it has only the few that say so. */
static int device_of(const struct allocation *allocation)
{
    if (allocation->ordinal >= 0)
        return allocation->ordinal;
    return allocation->context ? allocation->context->ordinal : 0;
}

static CUresult answer(const struct pointer *pointer, CUpointer_attribute attribute, CUdeviceptr address,
                       struct context *current, void *data)
{
    const struct allocation *allocation = pointer->allocation;
    const struct vmm_place *place = &pointer->place;
    bool managed = allocation && allocation->kind == MEMORY_MANAGED;

    if (!is_mapped(pointer) && attribute != CU_POINTER_ATTRIBUTE_MAPPED
        && attribute != CU_POINTER_ATTRIBUTE_RANGE_START_ADDR && attribute != CU_POINTER_ATTRIBUTE_RANGE_SIZE
        && attribute != CU_POINTER_ATTRIBUTE_IS_MANAGED)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        /* Virtual and stream-ordered memory belongs to no context. */
        *(CUcontext *)data = allocation && allocation->kind != MEMORY_ASYNC ? (CUcontext)(void *)allocation->context
                                                                            : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(CUmemorytype *)data = is_host(pointer) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!is_host(pointer) && !managed)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = (void *)(uintptr_t)address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(int *)data = allocation && allocation->sync_memops; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = allocation ? allocation->buffer_id : place->buffer_id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(int *)data = managed; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = allocation ? device_of(allocation) : place->ordinal;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)data = allocation && allocation->kind == MEMORY_PLAIN;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = allocation ? allocation->start : place->reserved;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = allocation ? allocation->bytes : place->reserved_bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = is_mapped(pointer); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(cuuint64_t *)data = allocation ? 0 : place->handle_types;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
        *(int *)data = 0; /* there is neither such a network nor such an engine */
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return access_of(pointer, current, data);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)data = allocation ? pool_of(allocation) : NULL;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        *(size_t *)data = allocation ? allocation->bytes : place->bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)data = allocation ? allocation->start : place->start;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        *(unsigned long long *)data = allocation ? allocation->buffer_id : place->buffer_id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
        return CUDA_ERROR_NOT_SUPPORTED; /* there is no nv-p2p.h that could take them */
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    ENTER(CALL_QUERY);
    struct pointer pointer;
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    if (!data || !ptr)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    if (pointer_look(ptr, &pointer))
        result = answer(&pointer, attribute, ptr, call_.context, data);
    driver_unlock();
    RETURN(result);
}

/* What an attribute of nothing is: 0 in its own size. */
static CUresult answer_none(CUpointer_attribute attribute, void *data)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: memset(data, 0, 8); return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = -2; /* no device, and not the host's (-1) either */
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: memset(data, 0, 4); return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult CUDAAPI cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
                                               CUdeviceptr ptr)
{
    ENTER(CALL_QUERY);
    struct pointer pointer;
    bool there;
    CUresult result = CUDA_SUCCESS;

    if (!numAttributes || !attributes || !data)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    there = ptr && pointer_look(ptr, &pointer);
    for (unsigned i = 0; i < numAttributes && result == CUDA_SUCCESS; i++) {
        if (!data[i] || attributes[i] == CU_POINTER_ATTRIBUTE_P2P_TOKENS) {
            result = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        result = there ? answer(&pointer, attributes[i], ptr, call_.context, data[i]) : CUDA_ERROR_INVALID_VALUE;
        if (result != CUDA_SUCCESS) /* what this pointer does not have is nothing, not an error */
            result = answer_none(attributes[i], data[i]);
    }
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    ENTER(CALL_QUERY);
    struct allocation *found;
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    found = allocation_at(ptr);
    if (found && found->ordinal >= 0) {
        found->sync_memops = *(const unsigned *)value != 0;
        result = CUDA_SUCCESS;
    }
    driver_unlock();
    RETURN(result);
}
