/* The kernels that are built in, and what modules make of them. */
#ifndef LIMOSA_KERNELS_H
#define LIMOSA_KERNELS_H

#include "driver.h" // IWYU pragma: export

#define MAX_PARAMETERS 4

/* One launch: the parameters, each in its own eight bytes. */
struct launch {
    struct context *context;
    const struct kernel *kernel;
    union {
        uint64_t word;
        uint32_t half;
        float number;
    } parameters[MAX_PARAMETERS];
};

struct kernel {
    const char *name;
    void (*run)(const struct launch *launch);
    uint8_t n_parameters, sizes[MAX_PARAMETERS];
};

/* NULL where none of that name is built in. */
const struct kernel *kernel_find(const char *name);

/* Where a parameter lies in a buffer of all of them. */
size_t kernel_offset(const struct kernel *kernel, int parameter);

/* A loaded module's function. module.c */
struct function {
    struct function *next;
    struct module *module;
    const struct kernel *kernel;
    int dynamic_shared, carveout; /* as set by cuFuncSetAttribute */
};

/* A copy of what a handle (of a function or of a library's kernel) means; false where it is none. *context is the one
 * that it was loaded in, NULL for a library's. Takes driver.mutex. */
bool function_find(CUfunction handle, struct function *found, struct context **context);

#endif
