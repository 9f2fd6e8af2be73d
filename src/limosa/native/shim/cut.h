/* What Limosa asks of the communicators: to stop at the same call in all ranks, to close, to be made again. */
#ifndef LIMOSA_CUT_H
#define LIMOSA_CUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

bool tell_comms(int client, struct message *answer, uint64_t what);
int32_t cut_limits(const struct limit_record *records, size_t n);
/* The cut is made: nobody passes any more, and the device comes to rest. */
int32_t cut_rest(uint64_t milliseconds);
/* Closes these, once all ranks are at rest: one may still read what another one's memory has. */
int32_t cut_close(const uint64_t *numbers, size_t n, uint64_t milliseconds);
bool tell_unique_ids(int client, struct message *answer, const uint64_t *numbers, size_t n);
int32_t cut_join(const struct join_record *records, size_t n, uint64_t milliseconds);
int32_t cut_open(void);
void cut_in_child(void);

#endif
