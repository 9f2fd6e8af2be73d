/* The way past ourselves, to the program's own driver. */
#ifndef LIMOSA_FIND_H
#define LIMOSA_FIND_H

#include <stdbool.h>
#include <stdint.h>

struct span {
    uintptr_t begin, end;
};

void *find_in(void *library, const char *symbol); /* the library's own */
void *find_in_driver(const char *symbol);
void *find_driver(void); /* the program's own libcuda; NULL before it has loaded one */
bool find_is_driver(const void *address); /* whether it lies in libcuda */
/* Each name that the program, or a library of it, is linked with, until it answers false. False: no library was loaded since the
 * last time, and nobody was asked. The loader's lock is held meanwhile. */
bool find_linked(bool (*each)(const char *symbol, void *data), void *data);

/* What follows where a text begins so, or NULL: without the C library. */
const char *find_past(const char *text, const char *with);

bool find_span(const void *address, struct span *span); /* where the library, or program, lies that it is in */

#endif
