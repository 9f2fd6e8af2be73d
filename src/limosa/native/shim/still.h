/* Holds the process still, takes its memory away and gives it back. Each answers a CUresult, or minus an errno. */
#ifndef LIMOSA_STILL_H
#define LIMOSA_STILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

enum state still_state(void);
void still_keep_stack(bool keep); /* the limit of the stack is left as it is */
int32_t still_close(uint64_t milliseconds);
int32_t still_open(void);
int32_t still_unmap(void);
int32_t still_map(const uint64_t *ids, const int *fds, size_t n, size_t n_fds);
int32_t still_stack(size_t bytes);
void still_in_child(void); /* after fork */

#endif
