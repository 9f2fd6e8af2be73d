/* What is done around a fork. */
#ifndef LIMOSA_FORKS_H
#define LIMOSA_FORKS_H

#include <stddef.h>

/* pthread_atfork without the part of it that glibc links into whoever calls it: the symbol behind it is missing in other C
 * libraries, whose loaders would end a program for it. Those have no driver either. */
int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));

static inline void around_forks(void (*before)(void), void (*after)(void), void (*in_child)(void))
{
    if (__register_atfork)
        __register_atfork(before, after, in_child, &__dso_handle);
}

static inline void in_children(void (*what)(void))
{
    around_forks(NULL, NULL, what);
}

#endif
