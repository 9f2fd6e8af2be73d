/* The shim's own thread: answers on the process's control socket, one client at a time, its owner or root.
 *
 * It is exempt from the gate, holds memory_lock only for as long as it looks at the tables, and calls nothing of the
 * application's: see DESIGN.md why nothing here can wait for an application's thread. */
#include "bulk.h"
#include "fds.h"
#include "park.h"
#include "protocol.h"
#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define NOT_READY 600
#define TABLES_SECONDS 5
#define LIMIT_STACK 0
#define KEPT_MOST 4096
#define USUAL_STACK 1024 /* what it is where nobody has set it */

#define NAME "limosa/shim/"

static enum state state;
static int listening = -1;
static int kept_aside[KEPT_MOST]; /* what holds the contents while the memory is away for longer */
static size_t n_kept_aside;
static pthread_mutex_t begin_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int waiting; /* a wait for the device that was given up on is still under way */
static size_t stack_before[MAX_DEVICES]; /* 0: it has not been lowered */
static bool keep_stack;

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* The process's own name: its pid, as it sees it. Not the time at which it began: a process that was brought back from an
 * image reads another one (it has a time namespace) than those who look for it. */
static int address_of(struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, NAME "%d", (int)getpid());
    return (int)offsetof(struct sockaddr_un, sun_path) + 1 + n;
}

/* Whether that number is still the socket's: a program may close it, and get the number for something else. The name
 * tells, not the inode: that is another one after a restore from an image. A child has its parent's. */
static bool is_ours(int fd)
{
    struct sockaddr_un found = {.sun_family = AF_UNSPEC};
    socklen_t size = sizeof found;

    return fd >= 0 && !getsockname(fd, (struct sockaddr *)&found, &size) && found.sun_family == AF_UNIX
        && size > offsetof(struct sockaddr_un, sun_path) + sizeof NAME
        && !memcmp(found.sun_path + 1, NAME, sizeof NAME - 1);
}

/* One packet: a message, what belongs to it, descriptors. */
static bool say(int client, const struct message *message, const void *more, size_t bytes, const int *fds, size_t n)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(PROTOCOL_MOST * sizeof(int))];
    } control;
    struct iovec parts[2] = {{(void *)message, sizeof *message}, {(void *)more, bytes}};
    struct msghdr packet = {.msg_iov = parts, .msg_iovlen = bytes ? 2 : 1};

    if (n) {
        packet.msg_control = &control;
        packet.msg_controllen = CMSG_SPACE(n * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&packet);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(head), fds, n * sizeof(int));
    }
    return sendmsg(client, &packet, MSG_NOSIGNAL) >= 0;
}

/* The tables. While the gate is open an application's thread may hold them for as long as one call of the driver takes:
 * that is waited for with a limit, and no longer. While it is closed nobody else has them. */
static bool tables(struct message *answer)
{
    struct timespec end;

    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += TABLES_SECONDS;
    if (!pthread_mutex_timedlock(&memory_lock, &end))
        return true;
    answer->result = -EBUSY;
    return false;
}

static struct record record_of(const struct memory *memory)
{
    struct record record = {.id = memory->id, .bytes = memory->bytes, .share = memory->share, .owner = memory->owner,
                            .device = (uint32_t)memory->asked.location.id};

    record.flags |= memory->shared ? RECORD_SHARED : 0;
    record.flags |= memory->driver ? 0 : RECORD_AWAY;
    record.flags |= memory->kept >= 0 ? RECORD_IMPORTED : 0;
    for (size_t i = 0; memory->mappings && i < n_mappings; i++)
        if (mappings[i]->memory == memory) {
            record.at = mappings[i]->at;
            record.flags |= RECORD_MAPPED | (mappings[i]->plain ? RECORD_PLAIN : 0);
            break;
        }
    return record;
}

/* Records, as many to a packet as there is room for. */
static bool say_all(int client, struct message *answer, const void *all, size_t n, size_t each)
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

static bool list(int client, struct message *answer)
{
    if (!tables(answer))
        return say(client, answer, NULL, 0, NULL, 0);
    size_t n = n_memories;
    struct record *all = calloc(n ? n : 1, sizeof *all);
    if (!all)
        answer->result = -ENOMEM, n = 0;
    for (size_t i = 0; i < n; i++)
        all[i] = record_of(memories[i]);
    pthread_mutex_unlock(&memory_lock);
    bool well = say_all(client, answer, all, n, sizeof *all);
    free(all);
    return well;
}

static struct memory *by_id(uint64_t id)
{
    for (size_t i = 0; i < n_memories; i++)
        if (memories[i]->id == id)
            return memories[i];
    return NULL;
}

/* A descriptor of each: of what is there, or of what is made anew. */
static bool hand_out(int client, struct message *answer, const uint64_t *ids, size_t n, bool anew)
{
    int fds[PROTOCOL_MOST];
    size_t done = 0;

    if (!tables(answer))
        return say(client, answer, NULL, 0, NULL, 0);
    fds_more();
    for (; done < n && !answer->result; done++) {
        struct memory *memory = by_id(ids[done]);
        CUresult result = CUDA_ERROR_INVALID_HANDLE;
        fds[done] = -1;
        if (memory && anew)
            result = park_make(memory, &fds[done]);
        else if (memory)
            fds[done] = park_descriptor(memory, &result);
        if (fds[done] < 0) {
            answer->result = result;
            answer->a = ids[done];
            break;
        }
    }
    fds_as_before();
    pthread_mutex_unlock(&memory_lock);
    size_t given = answer->result ? 0 : done;
    for (size_t i = given; i < done; i++)
        close(fds[i]);
    bool well = say(client, answer, NULL, 0, fds, given);
    for (size_t i = 0; i < given; i++)
        close(fds[i]);
    return well;
}

struct wait {
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool over;
    _Atomic bool left; /* nobody waits for it any longer */
    CUresult result;
    size_t n_made;
    CUcontext made[]; /* the application's own contexts: it may go on, and change its list, before this is over */
};

static void *wait_for_device(void *data)
{
    struct wait *wait = data;

    gate_exempt();
    CUresult result = park_wait(wait->made, wait->n_made, &wait->left);
    pthread_mutex_lock(&wait->lock);
    wait->result = result;
    wait->over = true;
    bool left_alone = wait->left;
    pthread_cond_signal(&wait->done);
    pthread_mutex_unlock(&wait->lock);
    if (left_alone) {
        free(wait);
        atomic_store(&waiting, 0);
    }
    return NULL;
}

/* The device cannot be waited for with a limit: somebody else waits, and is left to it when the time is up. */
static CUresult device_done(uint64_t milliseconds)
{
    struct wait *wait = calloc(1, sizeof *wait + n_contexts * sizeof wait->made[0]);
    struct timespec end;
    pthread_attr_t attributes;
    pthread_condattr_t clock;
    pthread_t thread;
    CUresult result = NOT_READY;

    if (!wait)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (uint64_t begun = now_ms(); atomic_load(&waiting); poll(NULL, 0, 1))
        if (now_ms() - begun >= milliseconds) {
            free(wait);
            return NOT_READY;
        }
    atomic_store(&waiting, 1);
    wait->n_made = n_contexts;
    memcpy(wait->made, contexts, n_contexts * sizeof wait->made[0]);
    pthread_mutex_init(&wait->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&wait->done, &clock);
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += (time_t)(milliseconds / 1000);
    end.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    if (end.tv_nsec >= 1000000000)
        end.tv_sec++, end.tv_nsec -= 1000000000;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, wait_for_device, wait)) {
        free(wait);
        atomic_store(&waiting, 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&wait->lock);
    while (!wait->over && pthread_cond_timedwait(&wait->done, &wait->lock, &end) == 0)
        ;
    bool over = wait->over;
    result = over ? wait->result : NOT_READY;
    wait->left = !over;
    pthread_mutex_unlock(&wait->lock);
    if (over) {
        free(wait);
        atomic_store(&waiting, 0);
    }
    return result;
}

static int32_t close_gate(uint64_t milliseconds)
{
    uint64_t begun = now_ms();

    if (state != STATE_OPEN)
        return -EALREADY;
    if (!gate_close(milliseconds))
        return NOT_READY;
    uint64_t spent = now_ms() - begun;
    CUresult result = device_done(milliseconds > spent ? milliseconds - spent : 1);
    if (result) {
        gate_open();
        return result;
    }
    state = STATE_CLOSED;
    bulk_gate(true);
    return 0;
}

static bool all_there(void)
{
    for (size_t i = 0; i < n_mappings; i++)
        if (mappings[i]->away)
            return false;
    for (size_t i = 0; i < n_memories; i++)
        if (!memories[i]->driver)
            return false;
    return true;
}

static int32_t unmap(void)
{
    size_t coming = PROTOCOL_MOST;

    if (state == STATE_OPEN)
        return -EINVAL;
    for (size_t i = 0; i < n_memories; i++)
        coming += park_can(memories[i]) && memories[i]->kept < 0;
    if (!fds_room(coming))
        return -EMFILE; /* what comes back is held by a descriptor each */
    state = STATE_AWAY; /* or still is: a part may have come back before something failed */
    CUresult result = park_unmap();
    if (all_there())
        state = STATE_CLOSED;
    return result;
}

/* Descriptors are ours from here on. */
static int32_t map(const uint64_t *ids, const int *fds, size_t n, size_t n_fds)
{
    int32_t result = state == STATE_OPEN ? -EINVAL : 0;

    for (size_t i = 0; i < n; i++) {
        struct memory *memory = by_id(ids[i]);
        int fd = i < n_fds ? fds[i] : -1;
        if (result || !memory || (fd < 0 && !memory->driver && !memory->made)) {
            if (fd >= 0)
                close(fd);
            result = result ? result : CUDA_ERROR_INVALID_HANDLE;
        } else {
            result = park_map(memory, fd);
        }
    }
    for (size_t i = n; i < n_fds; i++)
        close(fds[i]);
    if (state == STATE_AWAY && all_there())
        state = STATE_CLOSED;
    return result;
}

/* The local memory of a context is saved with it: less stack, less to save. Each primary context has its own; one whose
 * limit the application has set is left alone. 0: what was lowered is put back. */
static int32_t stack(size_t bytes)
{
    int n = 0;
    CUresult result = real(cuDeviceGetCount)(&n);

    if (state == STATE_OPEN)
        return -EINVAL;
    for (int device = 0; device < n && device < MAX_DEVICES && !result; device++) {
        CUcontext context = NULL;
        unsigned flags;
        int active = 0;
        if (bytes ? keep_stack || stack_before[device] : !stack_before[device])
            continue;
        if (real(cuDevicePrimaryCtxGetState)(device, &flags, &active) || !active
            || real(cuDevicePrimaryCtxRetain)(&context, device))
            continue;
        if (!(result = real(cuCtxSetCurrent)(context))) {
            size_t now = 0;
            if (!bytes) {
                if (!(result = real(cuCtxSetLimit)(LIMIT_STACK, stack_before[device])))
                    stack_before[device] = 0;
            } else if (!(result = real(cuCtxGetLimit)(&now, LIMIT_STACK)) && now == USUAL_STACK && bytes < now) {
                if (!(result = real(cuCtxSetLimit)(LIMIT_STACK, bytes)))
                    stack_before[device] = now;
            }
        }
        real(cuCtxSetCurrent)(NULL);
        real(cuDevicePrimaryCtxRelease_v2)(device);
    }
    return result;
}

/* Whoever comes through finds the stack as it was. */
static int32_t open_gate(void)
{
    if (state == STATE_AWAY)
        return -EBUSY; /* the application would meet addresses with nothing behind them */
    int32_t result = state == STATE_CLOSED ? stack(0) : 0;
    if (result)
        return result;
    park_unmake();
    state = STATE_OPEN;
    bulk_gate(false);
    gate_open();
    bulk_prepare(0); /* behind it: giving back takes a while, too */
    return 0;
}

static void hello(struct message *answer)
{
    if (!tables(answer))
        return;
    answer->a = state;
    answer->b = (uint64_t)getpid();
    answer->c = n_memories;
    for (size_t i = 0; i < n_memories; i++)
        answer->d += park_can(memories[i]) ? memories[i]->bytes : 0;
    pthread_mutex_unlock(&memory_lock);
}

static bool called(int client, struct message *answer)
{
    int all = n_entries();

    for (int i = 0; i < all; i++)
        answer->a += entries[i].called || entries[i].asked_for;
    for (int i = 0; i < all || !i;) {
        char names[16384];
        size_t used = 0;
        answer->b = 0;
        for (; i < all && used + 300 < sizeof names; i++) {
            unsigned char done = (unsigned char)((entries[i].called ? 1 : 0) + (entries[i].asked_for ? 2 : 0));
            size_t length = done ? strnlen(entries[i].symbol, 256) : 0;
            if (!done)
                continue;
            names[used++] = (char)entries[i].role;
            names[used++] = (char)done;
            memcpy(names + used, entries[i].symbol, length);
            used += length;
            names[used++] = 0;
            answer->b++;
        }
        if (!say(client, answer, names, used, NULL, 0))
            return false;
    }
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
static bool share(int client, struct message *answer, const struct message *asked)
{
    struct ucred who;
    socklen_t size = sizeof who;
    int fd = -1;

    if (state != STATE_OPEN)
        answer->result = -EAGAIN;
    else if (!ipc_is_ours(asked->b) || getsockopt(client, SOL_SOCKET, SO_PEERCRED, &who, &size))
        answer->result = -ENOENT;
    else if (tables(answer)) {
        struct memory *memory = by_id(asked->a);
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        if (memory && memory->share == asked->c && remember(memory, who.pid))
            fd = park_descriptor(memory, &result);
        pthread_mutex_unlock(&memory_lock);
        answer->result = fd < 0 ? result : 0;
    }
    bool well = say(client, answer, NULL, 0, &fd, fd >= 0);
    if (fd >= 0)
        close(fd);
    return well;
}

static bool sharers(int client, struct message *answer)
{
    struct pair {
        uint64_t share, pid;
    } *all;
    size_t n = 0, at = 0;

    if (!tables(answer))
        return say(client, answer, NULL, 0, NULL, 0);
    for (size_t i = 0; i < n_memories; i++)
        n += memories[i]->n_sharers;
    all = calloc(n ? n : 1, sizeof *all);
    for (size_t i = 0; all && i < n_memories; i++)
        for (size_t j = 0; j < memories[i]->n_sharers; j++)
            all[at++] = (struct pair){memories[i]->share, (uint64_t)memories[i]->sharers[j]};
    pthread_mutex_unlock(&memory_lock);
    if (!all)
        answer->result = -ENOMEM;
    bool well = say_all(client, answer, all, at, sizeof *all);
    free(all);
    return well;
}

static unsigned char at_first[MAX_DEVICES][16]; /* the GPUs that were there when the driver was initialised */
static int n_at_first;

static void remember_devices(void)
{
    int n = 0;

    n_at_first = 0;
    if (real(cuDeviceGetCount)(&n))
        return;
    for (int device = 0; device < n && device < MAX_DEVICES; device++)
        if (!real(cuDeviceGetUuid_v2)(at_first[n_at_first], device))
            n_at_first++;
}

static bool devices(int client, struct message *answer)
{
    static unsigned char uuids[2 * MAX_DEVICES][16];
    int n = 0;

    answer->result = real(cuDeviceGetCount)(&n);
    n = n > MAX_DEVICES ? MAX_DEVICES : n;
    for (int device = 0; device < n && !answer->result; device++)
        answer->result = real(cuDeviceGetUuid_v2)(uuids[device], device);
    answer->a = (uint64_t)n;
    answer->b = (uint64_t)n_at_first;
    memcpy(uuids[n], at_first, (size_t)n_at_first * 16);
    return say(client, answer, uuids, answer->result ? 0 : (size_t)(n + n_at_first) * 16, NULL, 0);
}

static bool counts(int client, struct message *answer)
{
    struct counts now = {.calls = {0}};

    answer->a = LEFT_KINDS;
    if (tables(answer)) {
        left_counts(&now);
        pthread_mutex_unlock(&memory_lock);
    }
    return say(client, answer, &now, answer->result ? 0 : sizeof now, NULL, 0);
}

/* Descriptors are ours from here on. The first packet of several takes the place of what was kept before. */
static int keep(const int *fds, size_t n, bool more)
{
    if (!more)
        while (n_kept_aside)
            close(kept_aside[--n_kept_aside]);
    bool room = n_kept_aside + n <= KEPT_MOST;
    for (size_t i = 0; i < n; i++)
        if (room)
            kept_aside[n_kept_aside++] = fds_away(fds[i]);
        else
            close(fds[i]);
    return room ? 0 : -ENOSPC;
}

static bool kept(int client, struct message *answer, uint64_t from)
{
    size_t n = from < n_kept_aside ? n_kept_aside - from : 0;

    answer->a = n_kept_aside;
    return say(client, answer, NULL, 0, kept_aside + (n ? from : 0), n < PROTOCOL_MOST ? n : PROTOCOL_MOST);
}

static bool answer_one(int client)
{
    static uint64_t ids[PROTOCOL_MOST];
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(PROTOCOL_MOST * sizeof(int))];
    } control;
    struct message asked, answer = {.magic = PROTOCOL_MAGIC, .version = PROTOCOL_VERSION};
    struct iovec parts[2] = {{&asked, sizeof asked}, {ids, sizeof ids}};
    struct msghdr packet = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &control,
                            .msg_controllen = sizeof control};
    int fds[PROTOCOL_MOST];
    size_t n_fds = 0;
    ssize_t got;

    while (poll(&(struct pollfd){.fd = client, .events = POLLIN}, 1, -1) < 0 && errno == EINTR)
        ;
    fds_more();
    do
        got = recvmsg(client, &packet, MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    fds_as_before();
    if (got <= 0)
        return false;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&packet); head; head = CMSG_NXTHDR(&packet, head))
        if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
            n_fds = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(head), n_fds * sizeof(int));
        }
    size_t n = (size_t)got > sizeof asked ? ((size_t)got - sizeof asked) / sizeof ids[0] : 0;
    bool wrong = (size_t)got < sizeof asked || asked.magic != PROTOCOL_MAGIC || asked.version != PROTOCOL_VERSION
        || packet.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    if (wrong || (asked.verb != VERB_MAP && asked.verb != VERB_KEEP))
        while (n_fds)
            close(fds[--n_fds]);
    answer.number = wrong ? 0 : asked.number;
    answer.verb = wrong ? 0 : asked.verb;
    if (wrong) {
        answer.result = -EPROTO;
        return say(client, &answer, NULL, 0, NULL, 0);
    }
    switch (asked.verb) {
    case VERB_HELLO: hello(&answer); break;
    case VERB_LIST: return list(client, &answer);
    case VERB_EXPORT: return hand_out(client, &answer, ids, n, false);
    case VERB_MAKE:
        if (state == STATE_AWAY)
            return hand_out(client, &answer, ids, n, true);
        answer.result = -EINVAL;
        break;
    case VERB_CLOSE: answer.result = close_gate(asked.a); break;
    case VERB_OPEN: answer.result = open_gate(); break;
    case VERB_UNMAP: answer.result = unmap(); break;
    case VERB_MAP:
        answer.result = map(ids, fds, n, n_fds);
        answer.d = (uint64_t)park_trouble.step | (uint64_t)park_trouble.device << 16;
        break;
    case VERB_STACK: answer.result = stack(asked.a); break;
    case VERB_BULK: answer.result = bulk_prepare(asked.a); break;
    case VERB_KEEP: answer.result = keep(fds, n_fds, asked.a); break;
    case VERB_KEPT: return kept(client, &answer, asked.a);
    case VERB_DEVICES: return devices(client, &answer);
    case VERB_COUNTS: return counts(client, &answer);
    case VERB_CALLED: return called(client, &answer);
    case VERB_SHARE: return share(client, &answer, &asked);
    case VERB_SHARERS: return sharers(client, &answer);
    default: answer.result = -ENOSYS; break;
    }
    if (asked.verb != VERB_HELLO)
        answer.a = state, answer.b = bulk_ready(), answer.c = bulk_asked();
    return say(client, &answer, NULL, 0, NULL, 0);
}

static bool welcome(int client)
{
    struct ucred who;
    socklen_t size = sizeof who;

    return !getsockopt(client, SOL_SOCKET, SO_PEERCRED, &who, &size) && (who.uid == 0 || who.uid == geteuid());
}

/* The socket has the process's name; -1 where there is none to be had. */
static int named_socket(void)
{
    struct sockaddr_un address;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    socklen_t size = (socklen_t)address_of(&address);
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&address, size) || listen(fd, 8))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static void *serve(void *nothing)
{
    gate_exempt();
    prctl(PR_SET_NAME, "limosa-shim");
    for (;;) {
        /* A program that closes all descriptors that there are has closed this one, too. */
        if (!is_ours(listening))
            listening = fds_away(named_socket());
        int client = listening < 0 ? -1 : accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0) {
            poll(NULL, 0, 50);
            continue;
        }
        client = fds_away(client);
        if (welcome(client))
            while (answer_one(client))
                ;
        close(client);
        if (state == STATE_OPEN) /* who has asked for it has no use for it any more, or has been killed */
            bulk_prepare(0);
    }
    return nothing;
}

/* What `limosa run --without` has told it, as words with commas between them. */
static void read_switches(void)
{
    const char *words = getenv("LIMOSA_SHIM_WITHOUT");

    if (words && strstr(words, "bulk"))
        bulk_switch_off();
    keep_stack = words && strstr(words, "stack");
}

static void begin(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    int fd = named_socket();

    if (fd < 0)
        return;
    read_switches();
    listening = fds_away(fd);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    if (pthread_create(&thread, &attributes, serve, NULL)) {
        close(listening);
        listening = -1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A child that was forked has no thread of ours, and must not hold its parent's memory. It cannot use what the parent
 * made in the driver: no driver lets it. */
static void in_child(void)
{
    if (is_ours(listening))
        close(listening);
    listening = -1;
    keep(NULL, 0, false);
    state = STATE_OPEN;
    bulk_in_child();
    memset(stack_before, 0, sizeof stack_before);
    pthread_mutex_init(&memory_lock, NULL);
    for (size_t i = 0; i < n_memories; i++)
        if (memories[i]->kept >= 0) {
            close(memories[i]->kept);
            memories[i]->kept = -1;
        }
    n_memories = n_mappings = n_contexts = 0;
    left_begin_again();
    ipc_begin_again();
    atomic_store(&waiting, 0);
    pthread_mutex_init(&begin_lock, NULL);
}

EXPORT CUresult cuInit(unsigned flags)
{
    static int pid;

    CALLED(cuInit);
    if (!shim_ready() && !real_functions[REAL_cuInit])
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = real(cuInit)(flags);
    gate_leave(reader);
    if (!result && shim_ready()) {
        pthread_mutex_lock(&begin_lock);
        if (pid != (int)getpid()) {
            static bool registered;
            if (!registered)
                in_children(in_child);
            registered = true;
            pid = (int)getpid();
            remember_devices();
            begin();
        }
        pthread_mutex_unlock(&begin_lock);
    }
    return result;
}
