/* Devices: what they are called, what they can do. Nothing here needs the node: all of it is known since cuInit. (A real
 * driver asks the GPU for its name, and cannot while the process is checkpointed.) */
#define _GNU_SOURCE
#include "driver.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const struct node_gpu *known(CUdevice device)
{
    return device >= 0 && device < driver.n_devices ? &driver.known[device] : NULL;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    ENTER(CALL_QUERY);
    if (!count)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *count = driver.n_devices;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(CALL_QUERY);
    if (!device)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(ordinal))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(CALL_QUERY | CALL_ASKS);
    if (!name || length <= 0)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", known(device)->name);
    RETURN(CUDA_SUCCESS);
}

static CUresult get_uuid(CUuuid *uuid, CUdevice device)
{
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    const struct node_gpu *gpu = known(device);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    driver_lock(); /* a restore changes it */
    memcpy(uuid->bytes, gpu->uuid, sizeof uuid->bytes);
    driver_unlock();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    ENTER(CALL_QUERY);
    RETURN(get_uuid(uuid, device));
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER(CALL_QUERY);
    RETURN(get_uuid(uuid, device));
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    ENTER(CALL_QUERY);
    if (!bytes)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *bytes = known(device)->memory > UINT32_MAX ? UINT32_MAX : (unsigned)known(device)->memory;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER(CALL_QUERY);
    if (!bytes)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *bytes = known(device)->memory;
    RETURN(CUDA_SUCCESS);
}

/* -------------------------------------------------------------------------------------------------- PCI bus ids --- */

static bool parse_pci(const char *text, unsigned *domain, unsigned *bus, unsigned *slot, unsigned *function)
{
    int end = -1;
    *domain = *function = 0;
    if (sscanf(text, "%8x:%2x:%2x.%1x%n", domain, bus, slot, function, &end) == 4 && end >= 0 && !text[end])
        return true;
    *function = 0;
    end = -1;
    if (sscanf(text, "%8x:%2x:%2x%n", domain, bus, slot, &end) == 3 && end >= 0 && !text[end])
        return true;
    *domain = 0;
    end = -1;
    return sscanf(text, "%2x:%2x.%1x%n", bus, slot, function, &end) == 3 && end >= 0 && !text[end];
}

struct pci {
    unsigned domain, bus, slot, function;
};

static struct pci pci_of(const struct node_gpu *gpu)
{
    struct pci pci = {0};
    parse_pci(gpu->pci, &pci.domain, &pci.bus, &pci.slot, &pci.function);
    return pci;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    ENTER(CALL_QUERY);
    char text[32];
    if (!id || length <= 0)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    struct pci pci = pci_of(known(device));
    int needed = snprintf(text, sizeof text, "%04X:%02X:%02X.%x", pci.domain, pci.bus, pci.slot, pci.function);
    if (needed >= length)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    memcpy(id, text, (size_t)needed + 1);
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    ENTER(CALL_QUERY);
    struct pci wanted;
    if (!device || !id || !parse_pci(id, &wanted.domain, &wanted.bus, &wanted.slot, &wanted.function))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < driver.n_devices; i++) {
        struct pci pci = pci_of(&driver.known[i]);
        if (pci.domain == wanted.domain && pci.bus == wanted.bus && pci.slot == wanted.slot
            && pci.function == wanted.function) {
            *device = i;
            RETURN(CUDA_SUCCESS);
        }
    }
    RETURN(CUDA_ERROR_INVALID_DEVICE);
}

/* --------------------------------------------------------------------------------------------------- attributes --- */

/* An H200's, other than those that depend on the GPU. What this driver does not implement (multicast, stream memory
 * operations, fabric handles, graphics) is said not to be there. */
static const int attributes[] = {
    [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z] = 64,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X] = 2147483647,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y] = 65535,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z] = 65535,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK] = 49152,
    [CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY] = 65536,
    [CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32,
    [CU_DEVICE_ATTRIBUTE_MAX_PITCH] = 2147483647,
    [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK] = 65536,
    [CU_DEVICE_ATTRIBUTE_CLOCK_RATE] = 1980000,
    [CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT] = 512,
    [CU_DEVICE_ATTRIBUTE_GPU_OVERLAP] = 1,
    [CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] = 1,
    [CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH] = 131072,
    [CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH] = 131072,
    [CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT] = 65536,
    [CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH] = 16384,
    [CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT] = 16384,
    [CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH] = 16384,
    [CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT] = 512,
    [CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS] = 1,
    [CU_DEVICE_ATTRIBUTE_ECC_ENABLED] = 1,
    [CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE] = 3201000,
    [CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH] = 6144,
    [CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 62914560,
    [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR] = 2048,
    [CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT] = 3,
    [CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1,
    [CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT] = 32,
    [CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR] = 233472,
    [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR] = 65536,
    [CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1,
    [CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO] = 2,
    [CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS] = 1,
    [CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM] = 1,
    [CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH] = 1,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] = 232448,
    [CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR] = 32,
    [CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE] = 39321600,
    [CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE] = 134213632,
    [CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK] = 1024,
    [CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH] = 1,
    [CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT] = 4,
    [CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS] = 1,
    [CU_DEVICE_ATTRIBUTE_NUMA_ID] = -1,
    [CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED] = 1,
    [CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID] = 0,
    [CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID] = 0x233510de,
    [CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED] = 0,
};
#define N_ATTRIBUTES ((int)(sizeof attributes / sizeof attributes[0]))

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    ENTER(CALL_QUERY);
    const struct node_gpu *gpu = known(device);
    if (!value || (int)attribute <= 0 || (int)attribute >= N_ATTRIBUTES)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!gpu)
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = gpu->multiprocessors; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = gpu->cc_major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = gpu->cc_minor; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: *value = (int)gpu->compute_mode; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = (int)pci_of(gpu).bus; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = (int)pci_of(gpu).slot; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = (int)pci_of(gpu).domain; break;
    case CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID: *value = device; break;
    default: *value = attributes[attribute];
    }
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    ENTER(CALL_QUERY);
    if (!major || !minor)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *major = known(device)->cc_major;
    *minor = known(device)->cc_minor;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device)
{
    ENTER(CALL_QUERY);
    if (!properties)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *properties = (CUdevprop){
        .maxThreadsPerBlock = attributes[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK],
        .maxThreadsDim = {attributes[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X],
                          attributes[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y],
                          attributes[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z]},
        .maxGridSize = {attributes[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X], attributes[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y],
                        attributes[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z]},
        .sharedMemPerBlock = attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK],
        .totalConstantMemory = attributes[CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY],
        .SIMDWidth = attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE],
        .memPitch = attributes[CU_DEVICE_ATTRIBUTE_MAX_PITCH],
        .regsPerBlock = attributes[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK],
        .clockRate = attributes[CU_DEVICE_ATTRIBUTE_CLOCK_RATE],
        .textureAlign = attributes[CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT],
    };
    RETURN(CUDA_SUCCESS);
}

/* -------------------------------------------------------------------------------------------------------- peers --- */

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    ENTER(CALL_QUERY);
    if (!can)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(device) || !known(peer))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    *can = device != peer;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to)
{
    ENTER(CALL_QUERY);
    if (!value)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known(from) || !known(to) || from == to)
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    switch ((int)attribute) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
    case CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: *value = 0; break;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED: *value = 1; break;
    default: RETURN(CUDA_ERROR_INVALID_VALUE);
    }
    RETURN(CUDA_SUCCESS);
}
