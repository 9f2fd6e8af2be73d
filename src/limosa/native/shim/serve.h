/* The shim's own thread and its socket. */
#ifndef LIMOSA_SERVE_H
#define LIMOSA_SERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

/* What the socket is called, and the thread that serves it: limosa/parking/names.py. */
#define SERVE_NAME "limosa/shim/%08x"
#define SERVE_THREAD "limosa-%08x"

/* One packet: a message, what belongs to it, descriptors. */
bool say(int client, const struct message *message, const void *more, size_t bytes, const int *fds, size_t n);
bool serve_is_alone(void); /* whether the client that is being served has hung up */
uint32_t serve_name(void); /* the number in it now; 0 where it has none yet */

#endif
