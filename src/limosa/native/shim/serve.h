/* What the shim's own thread answers with: serve.c reads what is asked, tell.c tells, still.c holds the process still. */
#ifndef LIMOSA_SERVE_H
#define LIMOSA_SERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory.h"
#include "protocol.h"

#define NOT_READY 600
/* What the socket is called, and the thread that serves it: limosa/parking/names.py. */
#define SERVE_NAME "limosa/shim/%08x"
#define SERVE_THREAD "limosa-%08x"

extern enum state state;

/* serve.c. One packet: a message, what belongs to it, descriptors. */
bool say(int client, const struct message *message, const void *more, size_t bytes, const int *fds, size_t n);

uint32_t serve_name(void); /* the number in it now; 0 where it has none yet */

/* tell.c: each answers all by itself, but for the first. */
void tell_hello(struct message *answer);
bool tell_list(int client, struct message *answer);
bool tell_called(int client, struct message *answer);
bool tell_share(int client, struct message *answer, const struct message *asked);
bool tell_sharers(int client, struct message *answer);
bool tell_devices(int client, struct message *answer, bool first);
bool tell_counts(int client, struct message *answer);
bool tell_descriptors(int client, struct message *answer, const uint64_t *ids, size_t n, bool anew);
void tell_begin(void); /* what the process sees now is what it saw at first */
struct memory *memory_by_id(uint64_t id);

/* still.c: a CUresult, or minus an errno. */
extern bool still_keeps_stack; /* it is left as it is */
int32_t still_close(uint64_t milliseconds);
int32_t still_open(void);
int32_t still_unmap(void);
int32_t still_map(const uint64_t *ids, const int *fds, size_t n, size_t n_fds);
int32_t still_stack(size_t bytes);
void still_in_child(void);

#endif
