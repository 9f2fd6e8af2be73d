/* Every function of nvml.h that nvml.c does not define: weak definitions that answer NOT_SUPPORTED and name themselves
 * in the node's log the first time. They have no arguments, so nvml_api.h must not be included (see stubs.c). */
#include "fault.h"
#include "node.h"

#include <stdatomic.h>

#define NVML_ERROR_NOT_SUPPORTED 3

static int missing(const char *name, atomic_bool *noted)
{
    struct fault fault = fault_ask(name, 0);
    if (fault.actions & FAULT_RESULT)
        return fault.result;
    if (!atomic_exchange(noted, true))
        node_log("%s is not implemented", name);
    return NVML_ERROR_NOT_SUPPORTED;
}

#define FUNCTION(symbol)                                                                                               \
    __attribute__((weak, visibility("default"))) int symbol(void);                                                     \
    int symbol(void)                                                                                                   \
    {                                                                                                                  \
        static atomic_bool noted;                                                                                      \
        return missing(#symbol, &noted);                                                                               \
    }
#include "nvml_functions.list"
