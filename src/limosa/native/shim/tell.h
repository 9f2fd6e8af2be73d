/* What is told about the process. Each answers all by itself, but for the first. */
#ifndef LIMOSA_TELL_H
#define LIMOSA_TELL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

/* Packets of records: a is how many there are in all, b how many in each. */
bool say_all(int client, struct message *answer, const void *all, size_t n, size_t each);
void tell_hello(struct message *answer);
bool tell_list(int client, struct message *answer);
bool tell_called(int client, struct message *answer);
bool tell_share(int client, struct message *answer, const struct message *asked);
bool tell_sharers(int client, struct message *answer);
bool tell_devices(int client, struct message *answer, bool first);
bool tell_counts(int client, struct message *answer);
bool tell_descriptors(int client, struct message *answer, const uint64_t *ids, size_t n, bool anew);

#endif
