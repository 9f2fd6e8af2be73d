/* Where the process's GPUs are, as far as the driver does not say it itself. */
#ifndef LIMOSA_PLACES_H
#define LIMOSA_PLACES_H

#include <stddef.h>
#include <stdint.h>

struct gpu_place;

void places_begin(void); /* the driver was initialised: what it says now is true */
int places_first(unsigned char (*uuids)[16]); /* the GPUs that the process saw then; their number, MAX_DEVICES at most */
int places_told(uint64_t operation, const struct gpu_place *places, size_t bytes); /* 0, or minus an errno */

#endif
