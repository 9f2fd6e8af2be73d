#include "driver.h"
#include "compiler.h"
#include "find.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

void *real_functions[REAL_FUNCTIONS];

/* Finds all of them; false where one is missing (a driver that is too old): then nothing is taken over. */
static bool find_all(void)
{
    static const char *const names[REAL_FUNCTIONS] = {
#define F(name, arguments) #name,
        DRIVER_FUNCTIONS(F)
#undef F
    };
    bool all = true;

    for (int i = 0; i < REAL_FUNCTIONS; i++) {
        if (!real_functions[i])
            real_functions[i] = find_in_driver(names[i]);
        all &= real_functions[i] != NULL;
    }
    return all;
}

bool shim_ready(void)
{
    static _Atomic int ready;
    int known = atomic_load_explicit(&ready, memory_order_relaxed);

    if (UNLIKELY(!known)) {
        const char *off = secure_getenv("LIMOSA_SHIM");
        if (!find_driver())
            return false; /* not yet: the program may load one later */
        known = find_all() && !(off && !strcmp(off, "off")) ? 1 : 2;
        atomic_store(&ready, known);
    }
    return known == 1;
}
