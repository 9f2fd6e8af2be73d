/* Legacy handles of memory that is looked after. */
#ifndef LIMOSA_IPC_H
#define LIMOSA_IPC_H

#include <stdbool.h>
#include <stdint.h>

bool ipc_is_ours(uint64_t token); /* whether a handle with it was made by this process */
void ipc_in_child(void); /* after fork */

#endif
