/* What cuGetProcAddress can find: functions.list as a table. */
#ifndef LIMOSA_FUNCTIONS_H
#define LIMOSA_FUNCTIONS_H

#include <stdatomic.h>
#include <stdbool.h>

struct function {
    const char *base; /* without version and stream suffix */
    int version;      /* of CUDA, that brought it: 11020 */
    bool per_thread;  /* takes stream 0 for the calling thread's own stream */
    void *address;
};
extern const struct function functions[];
extern const int n_functions;

/* A function that is not implemented was called: noted in the node's log the first time; what it answers. */
int function_missing(const char *symbol, atomic_bool *noted);

#endif
