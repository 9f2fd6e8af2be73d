/* Copies by address between two GPUs. The driver's own memory can be copied from every GPU of the process to every
 * other without peer access; virtual memory only by a device that was given access to both ends, INVALID_VALUE else
 * (measured). So where such a call fails, the pieces of ours that it names are shown to the devices that take part, and
 * it is made once more. Most programs never come here: libraries enable peer access, or call the functions that name
 * contexts. */
#include "reach.h"
#include "capture.h"
#include "driver.h"
#include "memory.h"

#include <stdint.h>
#include <string.h>

#define DEVICE_ORDINAL 9 /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
#define MEMCPY_NODE 1 /* CU_GRAPH_NODE_TYPE_MEMCPY */
#define MOST 4096 /* copies of a batch that are looked at */

typedef void with_address(CUdeviceptr address, void *what);

static uint64_t word_at(const void *structure, size_t n)
{
    return ((const uint64_t *)structure)[n];
}

/* Where the addresses are in a structure, in words. */
static void two(const void *structure, size_t from, size_t to, with_address *each, void *what)
{
    if (structure) {
        each(word_at(structure, from), what);
        each(word_at(structure, to), what);
    }
}

static void of_2d(uint64_t copy, with_address *each, void *what) /* CUDA_MEMCPY2D */
{
    two((const void *)(uintptr_t)copy, 4, 11, each, what);
}

static void of_3d(uint64_t copy, with_address *each, void *what) /* CUDA_MEMCPY3D */
{
    two((const void *)(uintptr_t)copy, 6, 17, each, what);
}

static void of_batch(const uint64_t *words, with_address *each, void *what) /* to, from, sizes, how many */
{
    for (size_t i = 0; words[0] && words[1] && i < words[3] && i < MOST; i++) {
        each(word_at((const void *)(uintptr_t)words[0], i), what);
        each(word_at((const void *)(uintptr_t)words[1], i), what);
    }
}

static void of_batch_3d(const uint64_t *words, with_address *each, void *what) /* how many, CUDA_MEMCPY3D_BATCH_OP */
{
    for (size_t i = 0; words[1] && i < words[0] && i < MOST; i++)
        two((const void *)(uintptr_t)(words[1] + i * 14 * sizeof(uint64_t)), 1, 6, each, what);
}

/* CUgraphNodeParams: what it is; behind three spare integers CUDA_MEMCPY_NODE_PARAMS: flags, a context, CUDA_MEMCPY3D. */
static const uint64_t *node_of(const char *base, const uint64_t *words)
{
    size_t n = 1; /* cuGraphNodeSetParams */
    if (!strcmp(base, "cuGraphAddNode"))
        n = 4;
    else if (!strcmp(base, "cuGraphExecNodeSetParams"))
        n = 2;
    const uint64_t *node = (const uint64_t *)(uintptr_t)words[n];

    return node && *(const int *)node == MEMCPY_NODE ? node : NULL;
}

static void of_node(const uint64_t *node, with_address *each, void *what)
{
    if (node)
        of_3d((uint64_t)(uintptr_t)(node + 4), each, what);
}

/* The context that a node of a graph is to copy in; NULL where the current one does. */
static CUcontext context_named(const char *base, const uint64_t *words)
{
    if (!strcmp(base, "cuGraphAddMemcpyNode"))
        return (CUcontext)(uintptr_t)words[5];
    if (!strcmp(base, "cuGraphExecMemcpyNodeSetParams"))
        return (CUcontext)(uintptr_t)words[3];
    if (strcmp(base, "cuGraphAddNode") && strcmp(base, "cuGraphNodeSetParams")
        && strcmp(base, "cuGraphExecNodeSetParams"))
        return NULL;
    const uint64_t *node = node_of(base, words);
    return node ? (CUcontext)(uintptr_t)node[3] : NULL;
}

/* Every address that a call names. */
static void addresses(const char *base, const uint64_t *words, with_address *each, void *what)
{
    if (!strcmp(base, "cuMemcpyBatchAsync"))
        of_batch(words, each, what);
    else if (!strcmp(base, "cuMemcpy3DBatchAsync"))
        of_batch_3d(words, each, what);
    else if (!strncmp(base, "cuMemcpy2D", 10))
        of_2d(words[0], each, what);
    else if (!strncmp(base, "cuMemcpy3D", 10))
        of_3d(words[0], each, what);
    else if (!strcmp(base, "cuGraphAddMemcpyNode"))
        of_3d(words[4], each, what);
    else if (!strcmp(base, "cuGraphMemcpyNodeSetParams"))
        of_3d(words[1], each, what);
    else if (!strcmp(base, "cuGraphExecMemcpyNodeSetParams"))
        of_3d(words[2], each, what);
    else if (!strncmp(base, "cuGraph", 7))
        of_node(node_of(base, words), each, what);
    else if (!strcmp(base, "cuMemcpyAtoD")) /* where the array is is not known */
        each(words[0], what);
    else if (!strcmp(base, "cuMemcpyDtoA"))
        each(words[2], what);
    else { /* to, from */
        each(words[0], what);
        each(words[1], what);
    }
}

struct taking_part {
    unsigned char device[MAX_DEVICES];
    bool stays; /* a graph has it: no later call asks for it */
    bool shown;
};

static struct mapping *ours(CUdeviceptr address)
{
    struct mapping *mapping = mapping_at(address);

    return mapping && (mapping->plain || mapping->opened) && !mapping->away ? mapping : NULL;
}

static void note_device(CUdeviceptr address, void *what)
{
    struct taking_part *part = what;
    struct mapping *mapping = ours(address);
    int device = -1;

    if (mapping)
        device = mapping->memory->asked.location.id;
    else if (real(cuPointerGetAttribute)(&device, DEVICE_ORDINAL, address))
        device = -1; /* host memory that the driver does not know */
    if (device >= 0 && device < MAX_DEVICES)
        part->device[device] = 1;
}

static void show(CUdeviceptr address, void *what)
{
    struct taking_part *part = what;
    struct mapping *mapping = ours(address);

    for (int device = 0; mapping && device < MAX_DEVICES; device++)
        if (part->device[device] && !mapping->access[device] && (part->stays || !mapping->shown[device])
            && memory_show_to(mapping, device)) {
            part->shown = true;
            if (part->stays)
                mapping->access[device] = ACCESS_READWRITE;
        }
}

/* The context that a node of a graph copies in. */
static void note_context(CUcontext context, struct taking_part *part)
{
    CUcontext mine = NULL;
    int device;

    if (!context || real(cuCtxGetCurrent)(&mine) || real(cuCtxSetCurrent)(context))
        return;
    if (!real(cuCtxGetDevice)(&device) && device >= 0 && device < MAX_DEVICES)
        part->device[device] = 1;
    real(cuCtxSetCurrent)(mine);
}

bool reach(const char *base, const uint64_t *words)
{
    struct taking_part part = {.stays = !strncmp(base, "cuGraph", 7) || capture_any()};
    int device;

    if (!shim_ready())
        return false;
    if (!real(cuCtxGetDevice)(&device) && device >= 0 && device < MAX_DEVICES)
        part.device[device] = 1;
    note_context(context_named(base, words), &part);
    memory_lock();
    addresses(base, words, note_device, &part);
    addresses(base, words, show, &part);
    memory_unlock();
    return part.shown;
}
