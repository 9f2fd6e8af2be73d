/* What the shim tells, and the descriptors that it hands out. */
#include "tell.h"
#include "bulk.h"
#include "count.h"
#include "driver.h"
#include "fds.h"
#include "hooks.h"
#include "ipc.h"
#include "memory.h"
#include "park.h"
#include "places.h"
#include "protocol.h"
#include "serve.h"
#include "still.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TABLES_SECONDS 5
#define TOLD_MOST 4096 /* functions; there are a quarter as many */

/* The tables. While the gate is open an application's thread may hold them for as long as one call of the driver takes:
 * that is waited for with a limit, and no longer. While it is closed nobody else has them. */
static bool tables(struct message *answer)
{
    struct timespec end;

    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += TABLES_SECONDS;
    if (memory_lock_until(&end))
        return true;
    answer->result = -EBUSY;
    return false;
}

static struct record record_of(const struct memory *memory)
{
    struct record record = {.id = memory->id,
                            .bytes = memory->bytes,
                            .share = memory->share,
                            .owner = memory->owner,
                            .device = (uint32_t)memory->asked.location.id};

    record.flags |= memory->shared ? RECORD_SHARED : 0;
    record.flags |= memory->driver ? 0 : RECORD_AWAY;
    record.flags |= memory->kept >= 0 ? RECORD_IMPORTED : 0;
    size_t place = 0;
    const struct mapping *mapping = memory->mappings ? mapping_of(memory, &place) : NULL;
    if (mapping) {
        record.at = mapping->at;
        record.flags |= RECORD_MAPPED | (mapping->plain ? RECORD_PLAIN : 0);
    }
    return record;
}

/* Records, as many to a packet as there is room for. */
bool say_all(int client, struct message *answer, const void *all, size_t n, size_t each)
{
    size_t done = 0;
    bool well;

    do {
        size_t some = n - done < PROTOCOL_MOST ? n - done : PROTOCOL_MOST;
        answer->a = n;
        answer->b = some;
        well = say(client, answer, (const char *)all + done * each, some * each, NULL, 0);
        done += some;
    } while (well && done < n);
    return well;
}

bool tell_list(int client, struct message *answer)
{
    if (!tables(answer))
        return say(client, answer, NULL, 0, NULL, 0);
    size_t n = memory_count();
    struct record *all = calloc(n ? n : 1, sizeof *all);
    if (!all) {
        answer->result = -ENOMEM;
        n = 0;
    }
    for (size_t i = 0; i < n; i++)
        all[i] = record_of(memory_nth(i));
    memory_unlock();
    bool well = say_all(client, answer, all, n, sizeof *all);
    free(all);
    return well;
}

/* A descriptor of each: of what is there, or of what is made anew. */
bool tell_descriptors(int client, struct message *answer, const uint64_t *ids, size_t n, bool anew)
{
    int fds[PROTOCOL_MOST];
    size_t done = 0;

    if (!tables(answer))
        return say(client, answer, NULL, 0, NULL, 0);
    fds_more();
    for (; done < n && !answer->result; done++) {
        struct memory *memory = memory_by_id(ids[done]);
        CUresult result = CUDA_ERROR_INVALID_HANDLE;
        fds[done] = -1;
        fds_begin();
        if (memory && anew)
            result = park_make(memory, &fds[done]);
        else if (memory)
            fds[done] = park_descriptor(memory, &result);
        fds_note(fds[done]);
        fds_end();
        if (fds[done] < 0) {
            answer->result = result;
            answer->a = ids[done];
            break;
        }
    }
    fds_as_before();
    memory_unlock();
    size_t given = answer->result ? 0 : done;
    for (size_t i = given; i < done; i++)
        fds_close(fds[i]);
    bool well = say(client, answer, NULL, 0, fds, given);
    for (size_t i = 0; i < given; i++)
        fds_close(fds[i]);
    return well;
}

void tell_hello(struct message *answer)
{
    const struct memory *memory;

    if (!tables(answer))
        return;
    answer->a = still_state();
    answer->b = (uint64_t)getpid();
    answer->c = memory_count();
    for (size_t i = 0; (memory = memory_nth(i)); i++)
        answer->d += park_can(memory) ? memory->bytes : 0;
    memory_unlock();
}

/* Functions may be called meanwhile: what is told is how it was at first. */
bool tell_called(int client, struct message *answer)
{
    static unsigned char done[TOLD_MOST];
    int all = entry_count(), i = 0;
    uint64_t told = 0;

    all = all < TOLD_MOST ? all : TOLD_MOST;
    for (int entry = 0; entry < all; entry++) {
        struct told_of told_of = entry_told(entry);
        done[entry] = (unsigned char)((told_of.called ? 1 : 0) + (told_of.asked_for ? 2 : 0));
        answer->a += done[entry] != 0;
    }
    do {
        char names[16384];
        size_t used = 0;
        answer->b = 0;
        for (; i < all && used + 300 < sizeof names; i++) {
            if (!done[i])
                continue;
            struct told_of entry = entry_told(i);
            size_t length = strnlen(entry.symbol, 255);
            names[used++] = (char)entry.role;
            names[used++] = (char)done[i];
            memcpy(names + used, entry.symbol, length);
            used += length;
            names[used++] = 0;
            answer->b++;
        }
        told += answer->b;
        if (!say(client, answer, names, used, NULL, 0))
            return false;
    } while (told < answer->a);
    return true;
}

static bool remember(struct memory *memory, int pid)
{
    for (size_t i = 0; i < memory->n_sharers; i++)
        if (memory->sharers[i] == pid)
            return true;
    int *more = realloc(memory->sharers, (memory->n_sharers + 1) * sizeof *more);
    if (!more)
        return false;
    memory->sharers = more;
    more[memory->n_sharers++] = pid;
    return true;
}

/* Another process's shim opens a legacy handle of ours. */
bool tell_share(int client, struct message *answer, const struct message *asked)
{
    struct ucred who;
    socklen_t size = sizeof who;
    int fd = -1;

    if (still_state() != STATE_OPEN)
        answer->result = -EAGAIN;
    else if (!ipc_is_ours(asked->b) || getsockopt(client, SOL_SOCKET, SO_PEERCRED, &who, &size))
        answer->result = -ENOENT;
    else if (tables(answer)) {
        struct memory *memory = memory_by_id(asked->a);
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        if (memory && memory->share == asked->c && remember(memory, who.pid)) {
            fds_begin();
            fd = fds_note(park_descriptor(memory, &result));
            fds_end();
        }
        memory_unlock();
        answer->result = fd < 0 ? result : 0;
    }
    bool well = say(client, answer, NULL, 0, &fd, fd >= 0);
    if (fd >= 0)
        fds_close(fd);
    return well;
}

bool tell_sharers(int client, struct message *answer)
{
    struct pair {
        uint64_t share, pid;
    } *all;
    const struct memory *memory;
    size_t n = 0, at = 0;

    if (!tables(answer))
        return say(client, answer, NULL, 0, NULL, 0);
    for (size_t i = 0; (memory = memory_nth(i)); i++)
        n += memory->n_sharers;
    all = calloc(n ? n : 1, sizeof *all);
    for (size_t i = 0; all && (memory = memory_nth(i)); i++)
        for (size_t j = 0; j < memory->n_sharers && at < n; j++)
            all[at++] = (struct pair){memory->share, (uint64_t)memory->sharers[j]};
    memory_unlock();
    if (!all)
        answer->result = -ENOMEM;
    bool well = say_all(client, answer, all, at, sizeof *all);
    free(all);
    return well;
}

bool tell_devices(int client, struct message *answer, bool first)
{
    static unsigned char uuids[2 * MAX_DEVICES][16];
    int n = 0, n_at_first = 0;

    if (!first)
        answer->result = real(cuDeviceGetCount)(&n);
    n = n > MAX_DEVICES ? MAX_DEVICES : n;
    for (int device = 0; device < n && !answer->result; device++)
        answer->result = real(cuDeviceGetUuid_v2)(uuids[device], device);
    answer->a = (uint64_t)n;
    n_at_first = places_first(uuids + n);
    answer->b = (uint64_t)n_at_first;
    return say(client, answer, uuids, answer->result ? 0 : (size_t)(n + n_at_first) * 16, NULL, 0);
}

bool tell_counts(int client, struct message *answer)
{
    struct counts now = {.calls = {0}};

    answer->a = LEFT_KINDS;
    answer->b = bulk_refused();
    if (tables(answer)) {
        left_counts(&now);
        memory_unlock();
    }
    return say(client, answer, &now, answer->result ? 0 : sizeof now, NULL, 0);
}
