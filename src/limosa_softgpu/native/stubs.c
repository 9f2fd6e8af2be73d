/* Every function of cuda.h that no other file of this library defines.
 *
 * The definitions here are weak, so that a real one of the same name takes their place when the library is linked. What
 * is left answers NOT_SUPPORTED and is named in the node's log: nothing that is not implemented ever seems to succeed.
 *
 * cuda_api.h must not be included: the stubs have no arguments, which only works because callers clean up after
 * themselves on every platform that this is built for.
 */
#include "functions.h"

#define FUNCTION(symbol, base, version, per_thread, role)                                                              \
    __attribute__((weak, visibility("default"))) int symbol(void);                                                     \
    int symbol(void)                                                                                                   \
    {                                                                                                                  \
        static atomic_bool noted;                                                                                      \
        return function_missing(#symbol, &noted);                                                                      \
    }
#include "../../limosa/native/driver/functions.list"
#undef FUNCTION

const struct function functions[] = {
#define FUNCTION(symbol, base, version, per_thread, role) {#base, version, per_thread, (void *)(symbol)},
#include "../../limosa/native/driver/functions.list"
#undef FUNCTION
};
const int n_functions = sizeof(functions) / sizeof(functions[0]);
