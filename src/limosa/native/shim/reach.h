/* Memory of ours that a copy is to find on another GPU. */
#ifndef LIMOSA_REACH_H
#define LIMOSA_REACH_H

#include <stdbool.h>
#include <stdint.h>

#define REACH_WORDS 6 /* arguments that may say where */

/* For a call that has answered INVALID_VALUE, inside the gate: whether memory that it names is now shown to a device that
 * could not reach it before, so that it may be made once more. base is the function's name without a version. */
bool reach(const char *base, const uint64_t *words);

#endif
