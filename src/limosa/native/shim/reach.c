/* Copies by address between two GPUs. The driver's own memory can be copied from every GPU of the process to every
 * other without peer access; virtual memory only by a device that was given access to both ends, INVALID_VALUE else
 * (measured). So where such a call fails, the pieces of ours that it names are shown to the devices that take part, and
 * it is made once more. Most programs never come here: libraries enable peer access, or call the functions that name
 * contexts. */
#include "memory.h"
#include "reach.h"

#include <string.h>

#define DEVICE_ORDINAL 9 /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */
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
    else { /* to, from */
        each(words[0], what);
        each(words[1], what);
    }
}

struct taking_part {
    unsigned char device[MAX_DEVICES];
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
    unsigned char before[MAX_DEVICES];
    bool more = false;

    if (!mapping)
        return;
    memcpy(before, mapping->access, sizeof before);
    for (int device = 0; device < MAX_DEVICES; device++)
        if (part->device[device] && !mapping->access[device]) {
            mapping->access[device] = ACCESS_READWRITE;
            more = true;
        }
    if (more && memory_show(mapping)) /* GPUs that cannot reach one another */
        memcpy(mapping->access, before, sizeof before);
    else
        part->shown |= more;
}

bool reach(const char *base, const uint64_t *words)
{
    struct taking_part part = {{0}, false};
    int device;

    if (!shim_ready())
        return false;
    if (!real(cuCtxGetDevice)(&device) && device >= 0 && device < MAX_DEVICES)
        part.device[device] = 1;
    pthread_mutex_lock(&memory_lock);
    addresses(base, words, note_device, &part);
    addresses(base, words, show, &part);
    pthread_mutex_unlock(&memory_lock);
    return part.shown;
}
