/* Modules and libraries: images that name kernels, and the functions that are made of those names. */
#define _GNU_SOURCE
#include "kernels.h"

#include <ctype.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ELF_MAGIC "\177ELF"
#define FATBIN_MAGIC 0xba55ed50u
#define WRAPPER_MAGIC 0x466243b1u
#define IMAGE_LIMIT (1l << 30) /* no image is longer */
#define MAX_SHARED 232448     /* that a block can ask for */
#define DEFAULT_SHARED 49152  /* without asking */
#define REGISTERS 32          /* something that a small kernel takes */

struct module {
    struct module *next;
    struct context *context; /* NULL: a library, usable in any */
    char *image;
    size_t bytes;
    struct function *functions;
};

/* All guarded by driver.mutex. */
static struct module *modules;

struct fatbin_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

struct fatbin_wrapper {
    uint32_t magic, version;
    const void *data, *filename;
};

/* ------------------------------------------------------------------------------------------------------ loading --- */

/* PTX is text. Only its beginning is looked at: what is no text may have no end. */
static bool is_text(const char *image)
{
    for (int i = 0; i < 64 && image[i]; i++)
        if ((unsigned char)image[i] >= 0x80 || (!isprint((unsigned char)image[i]) && !isspace((unsigned char)image[i])))
            return false;
    return image[0] != 0;
}

/* As much of a compiler as this needs: what a PTX image begins with, and that it has not been cut off. */
static bool is_ptx(const char *image)
{
    int depth = 0;
    for (const char *at = image; *at; at++)
        depth += (*at == '{') - (*at == '}');
    return depth == 0 && strstr(image, ".target");
}

/* What there is to read: PTX as it is, or the contents of a container of images. Its compiled code is of no use. A container
 * says itself how long it is; it is at most `room`, IMAGE_LIMIT where the caller's memory does not say. */
static CUresult read_image(const void *image, size_t room, const char **from, size_t *bytes)
{
    if (!image)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_text(image)) {
        *from = image;
        *bytes = strlen(image);
        if (!strstr(image, ".version"))
            return CUDA_ERROR_INVALID_IMAGE;
        return is_ptx(image) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
    }
    const char *start = image;
    if (start[0] == 0)
        return CUDA_ERROR_INVALID_IMAGE;
    if (memcmp(start, ELF_MAGIC, 4) == 0) {
        node_log("an image of compiled code has no PTX");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct fatbin_wrapper wrapper;
    memcpy(&wrapper.magic, start, sizeof wrapper.magic);
    if (wrapper.magic == WRAPPER_MAGIC) {
        if (room != IMAGE_LIMIT) /* a file has no address in it that means anything */
            return CUDA_ERROR_INVALID_IMAGE;
        memcpy(&wrapper, start, sizeof wrapper);
        start = wrapper.data;
        if (!start)
            return CUDA_ERROR_INVALID_IMAGE;
    }
    struct fatbin_header header;
    memcpy(&header.magic, start, sizeof header.magic);
    if (header.magic != FATBIN_MAGIC)
        return CUDA_ERROR_INVALID_IMAGE;
    memcpy(&header, start, sizeof header);
    if (header.header_bytes < sizeof header || header.header_bytes > room || header.bytes > room - header.header_bytes)
        return CUDA_ERROR_INVALID_IMAGE;
    *from = start;
    *bytes = header.header_bytes + header.bytes;
    if (!memmem(*from, *bytes, ".entry", 6)) {
        node_log("a container of images has no PTX that can be read");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

static CUresult load(struct module **made, struct context *context, const void *image, size_t room)
{
    const char *from;
    size_t bytes;
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = read_image(image, room, &from, &bytes);
    if (result != CUDA_SUCCESS)
        return result;
    struct module *module = calloc(1, sizeof *module);
    char *copy = malloc(bytes + 1);
    if (!module || !copy) {
        free(module);
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memcpy(copy, from, bytes);
    copy[bytes] = 0;
    *module = (struct module){.context = context, .image = copy, .bytes = bytes};
    driver_lock();
    module->next = modules;
    modules = module;
    driver_unlock();
    *made = module;
    return CUDA_SUCCESS;
}

static void forget(struct module **at)
{
    struct module *module = *at;
    *at = module->next;
    while (module->functions) {
        struct function *function = module->functions;
        module->functions = function->next;
        free(function);
    }
    free(module->image);
    free(module);
}

void modules_context_gone(struct context *context)
{
    driver_lock();
    for (struct module **at = &modules; *at;) {
        if ((*at)->context == context)
            forget(at);
        else
            at = &(*at)->next;
    }
    driver_unlock();
}

static CUresult unload(const void *handle, bool library)
{
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    driver_lock();
    for (struct module **at = &modules; *at; at = &(*at)->next)
        if (*at == handle && !(*at)->context == library) {
            forget(at);
            result = CUDA_SUCCESS;
            break;
        }
    driver_unlock();
    return result;
}

/* ------------------------------------------------------------------------------------------------------ finding --- */

/* Whether the image declares `name` after one of the words, as in ".visible .entry fill(": a whole word. */
static bool declares(const struct module *module, const char *word, const char *name)
{
    const char *at = module->image, *end = module->image + module->bytes;
    size_t length = strlen(name);
    while ((at = memmem(at, (size_t)(end - at), word, strlen(word)))) {
        at += strlen(word);
        while (at < end && isspace((unsigned char)*at))
            at++;
        if ((size_t)(end - at) >= length && memcmp(at, name, length) == 0 && !isalnum((unsigned char)at[length])
            && at[length] != '_' && at[length] != '$')
            return true;
    }
    return false;
}

/* driver.mutex held. */
static struct module *module_of(const void *handle)
{
    for (struct module *module = modules; module; module = module->next)
        if (module == handle)
            return module;
    return NULL;
}

static struct function *function_of(const void *handle)
{
    for (struct module *module = modules; module; module = module->next)
        for (struct function *function = module->functions; function; function = function->next)
            if (function == handle)
                return function;
    return NULL;
}

bool function_find(CUfunction handle, struct function *found, struct context **context)
{
    driver_lock();
    const struct function *function = function_of(handle);
    if (function) {
        *found = *function;
        *context = function->module->context;
    }
    driver_unlock();
    return function;
}

static CUresult get_function(void **handle, const void *of, const char *name)
{
    if (!handle || !name || !*name)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    driver_lock();
    struct module *module = module_of(of);
    const struct kernel *kernel = kernel_find(name);
    struct function *function = module ? module->functions : NULL;
    while (function && function->kernel != kernel)
        function = function->next;
    if (!module) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else if (!declares(module, ".entry", name)) {
        result = CUDA_ERROR_NOT_FOUND;
    } else if (!kernel) {
        node_log("kernel %.100s is not built in", name);
        result = CUDA_ERROR_NOT_SUPPORTED;
    } else if (!function) {
        function = calloc(1, sizeof *function);
        if (function) {
            *function = (struct function){module->functions, module, kernel, DEFAULT_SHARED, -1};
            module->functions = function;
        } else {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (result == CUDA_SUCCESS)
        *handle = function;
    driver_unlock();
    return result;
}

/* ------------------------------------------------------------------------------------------------- entry points --- */

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    ENTER(CALL_WORK);
    RETURN(load((struct module **)module, call_.context, image, IMAGE_LIMIT));
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n_options, CUjit_option *options,
                                   void **values)
{
    ENTER(CALL_WORK);
    if (n_options && (!options || !values))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(load((struct module **)module, call_.context, image,
                IMAGE_LIMIT)); /* options are for a compiler that is not there */
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    ENTER(CALL_WORK);
    RETURN(load((struct module **)module, call_.context, image, IMAGE_LIMIT));
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    ENTER(CALL_WORK);
    if (!module || !path)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat its;
    if (fd < 0)
        RETURN(CUDA_ERROR_FILE_NOT_FOUND);
    CUresult result = CUDA_ERROR_INVALID_IMAGE;
    if (fstat(fd, &its) == 0 && its.st_size > 16
        && its.st_size < IMAGE_LIMIT) { /* 16: looked at before it is known what it is */
        size_t bytes = (size_t)its.st_size;
        char *image = calloc(1, bytes + 1); /* with a NUL after all of it */
        if (!image)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else if (read(fd, image, bytes) == (ssize_t)bytes)
            result = load((struct module **)module, call_.context, image, bytes);
        free(image);
    }
    close(fd);
    RETURN(result);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    ENTER(CALL_WORK);
    RETURN(unload(module, false));
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    ENTER(CALL_QUERY);
    const char *wanted = getenv("CUDA_MODULE_LOADING");
    if (!mode)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *mode = wanted && strcmp(wanted, "EAGER") == 0 ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    ENTER(CALL_WORK);
    RETURN(get_function((void **)function, module, name));
}

EXPORT CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule handle)
{
    ENTER(CALL_WORK);
    if (!count)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    const struct module *module = module_of(handle);
    const char *at = module ? module->image : NULL, *end = module ? at + module->bytes : NULL;
    unsigned int found = 0;
    while (at && (at = memmem(at, (size_t)(end - at), ".entry", 6))) {
        at += 6;
        found += isspace((unsigned char)*at) != 0;
    }
    driver_unlock();
    if (!module)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    *count = found;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
    ENTER(CALL_WORK);
    if (!name || (!address && !bytes))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    const struct module *known = module_of(module);
    CUresult result = known ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
    if (known && memmem(known->image, known->bytes, name, strlen(name)))
        result = CUDA_ERROR_NOT_SUPPORTED;
    driver_unlock();
    if (result == CUDA_ERROR_NOT_SUPPORTED)
        node_log("variable %.100s: modules have no memory of their own", name);
    RETURN(result);
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit, void **jit_values,
                                  unsigned int n_jit, CUlibraryOption *options, void **values, unsigned int n_options)
{
    ENTER(CALL_MANAGE);
    if ((n_jit && (!jit || !jit_values)) || (n_options && (!options || !values)))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(load((struct module **)library, NULL, image, IMAGE_LIMIT));
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    ENTER(CALL_MANAGE);
    RETURN(unload(library, true));
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    ENTER(CALL_MANAGE);
    RETURN(get_function((void **)kernel, library, name));
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    ENTER(CALL_WORK);
    driver_lock();
    struct module *known = module_of(library);
    driver_unlock();
    if (!module)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!known)
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    *module = (CUmodule)known;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    ENTER(CALL_WORK);
    struct function found;
    struct context *context;
    if (!function)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!function_find((CUfunction)kernel, &found, &context))
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    *function = (CUfunction)kernel;
    RETURN(CUDA_SUCCESS);
}

static CUresult get_name(const char **name, CUfunction handle)
{
    struct function found;
    struct context *context;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!function_find(handle, &found, &context))
        return CUDA_ERROR_INVALID_HANDLE;
    *name = found.kernel->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
    ENTER(CALL_QUERY);
    RETURN(get_name(name, (CUfunction)kernel));
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
    ENTER(CALL_QUERY);
    RETURN(get_name(name, function));
}

EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    ENTER(CALL_QUERY);
    struct function found;
    struct context *context;
    if (!module)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!function_find(function, &found, &context))
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    *module = (CUmodule)found.module;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *bytes)
{
    ENTER(CALL_QUERY);
    struct function found;
    struct context *context;
    if (!offset)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!function_find(function, &found, &context))
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    if (index >= found.kernel->n_parameters)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *offset = kernel_offset(found.kernel, (int)index);
    if (bytes)
        *bytes = found.kernel->sizes[index];
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    ENTER(CALL_QUERY | CALL_CONTEXT);
    struct function found;
    struct context *context;
    if (!value)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!function_find(function, &found, &context))
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    const struct node_gpu *gpu = &driver.known[call_.context->ordinal];
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA: *value = 0; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = REGISTERS; break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = gpu->cc_major * 10 + gpu->cc_minor; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = found.dynamic_shared; break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *value = found.carveout; break;
    default: RETURN(CUDA_ERROR_INVALID_VALUE);
    }
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    ENTER(CALL_WORK);
    CUresult result = CUDA_SUCCESS;
    driver_lock();
    struct function *function = function_of(handle);
    if (!function)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value >= 0 && value <= MAX_SHARED)
        function->dynamic_shared = value;
    else if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT && value >= -1 && value <= 100)
        function->carveout = value;
    else
        result = CUDA_ERROR_INVALID_VALUE;
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    ENTER(CALL_WORK);
    struct function found;
    struct context *context;
    if ((unsigned)config > CU_FUNC_CACHE_PREFER_EQUAL)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(function_find(function, &found, &context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE); /* a preference */
}

static CUresult occupancy(int *blocks, CUfunction function, int block, size_t shared)
{
    struct function found;
    struct context *context;
    if (!blocks || block <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!function_find(function, &found, &context))
        return CUDA_ERROR_INVALID_HANDLE;
    int warps = (block + 31) / 32, by_threads = 64 / warps;
    int by_shared = shared ? (int)(MAX_SHARED / shared) : 32;
    int fit = by_threads < by_shared ? by_threads : by_shared;
    if (fit > 32)
        fit = 32;
    *blocks = block > 1024 ? 0 : fit;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block, size_t shared)
{
    ENTER(CALL_WORK);
    RETURN(occupancy(blocks, function, block, shared));
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int block,
                                                                     size_t shared, unsigned int flags)
{
    ENTER(CALL_WORK);
    RETURN(flags > 1 ? CUDA_ERROR_INVALID_VALUE : occupancy(blocks, function, block, shared));
}
