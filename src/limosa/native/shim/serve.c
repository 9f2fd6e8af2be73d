/* The shim's own thread: answers on the process's control socket, one client at a time, its owner or root.
 *
 * It is exempt from the gate, holds memory_lock only for as long as it looks at the tables, and calls nothing of the
 * application's: see DESIGN.md why nothing here can wait for an application's thread. */
#include "serve.h"
#include "bulk.h"
#include "capture.h"
#include "clock.h"
#include "compiler.h"
#include "contexts.h"
#include "comms.h"
#include "count.h"
#include "cut.h"
#include "driver.h"
#include "fds.h"
#include "forks.h"
#include "gate.h"
#include "hooks.h"
#include "ipc.h"
#include "late.h"
#include "memory.h"
#include "nccl.h"
#include "park.h"
#include "places.h"
#include "protocol.h"
#include "still.h"
#include "tell.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define NAMES_TRIED 64
#define NAME_MS 100
#define WAITING 64 /* also those who open a legacy handle, while somebody works on the process */

static int listening = -1, client = -1;
/* What holds the contents while the memory is away for longer, and what is to take its place once all of it is here: it may
 * be the only copy. The program's threads run on, and may close what is not theirs. */
static struct kept {
    size_t n, wanted;
    struct {
        int fd;
        dev_t device;
        ino_t inode;
    } one[PROTOCOL_KEPT_MOST];
} sets[2], *kept_aside = &sets[0], *coming = &sets[1];
static pthread_mutex_t begin_lock = PTHREAD_MUTEX_INITIALIZER;

/* The socket's name has a number in it that nobody knows before it is taken: names in this space are whoever's comes first,
 * also another user's, and a name that could be told from the pid would be his. The shim's thread is called by that number:
 * it is found there, in /proc, where nobody else can write. */
static struct sockaddr_un name;
static socklen_t name_size;
static uint32_t drawn;
static atomic_bool thread_has_name;

static void draw_name(void)
{
    while (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn)
        ;
    memset(&name, 0, sizeof name);
    name.sun_family = AF_UNIX;
    int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, SERVE_NAME, drawn);
    name_size = (socklen_t)offsetof(struct sockaddr_un, sun_path) + 1 + (socklen_t)n;
}

bool serve_is_alone(void)
{
    struct pollfd gone = {.fd = client, .events = POLLRDHUP}; /* whatever it has said before it went */

    return client >= 0 && poll(&gone, 1, 0) == 1;
}

uint32_t serve_name(void)
{
    return drawn;
}

static void tell_name(void)
{
    char text[16];

    snprintf(text, sizeof text, SERVE_THREAD, drawn);
    prctl(PR_SET_NAME, text);
    atomic_store(&thread_has_name, true);
}

/* Whether that number is still the socket's: a program may close it, and get the number for something else. The name
 * tells, not the inode: that is another one after a restore from an image, where it has none. A child has its parent's. */
static bool is_ours(int fd)
{
    struct sockaddr_un found = {.sun_family = AF_UNSPEC};
    socklen_t size = sizeof found;

    return fd >= 0 && !getsockname(fd, (struct sockaddr *)&found, &size) && size == name_size
        && !memcmp(&found, &name, size);
}

/* One packet: a message, what belongs to it, descriptors. */
bool say(int client, const struct message *message, const void *more, size_t bytes, const int *fds, size_t n)
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

static bool still_kept(const struct kept *set, size_t i)
{
    struct stat found;

    return !fstat(set->one[i].fd, &found) && found.st_dev == set->one[i].device && found.st_ino == set->one[i].inode;
}

static void let_go(struct kept *set)
{
    for (; set->n; set->n--) {
        if (still_kept(set, set->n - 1)) {
            fds_close(set->one[set->n - 1].fd);
        } else { /* somebody else's by now */
            fds_begin();
            fds_forget(set->one[set->n - 1].fd);
            fds_end();
        }
    }
    set->wanted = 0;
}

static bool take(struct kept *set, int fd)
{
    struct stat found;

    if (fstat(fd, &found))
        return false;
    set->one[set->n].device = found.st_dev;
    set->one[set->n].inode = found.st_ino;
    set->one[set->n++].fd = fds_away(fd);
    return true;
}

/* Descriptors are ours from here on. What was kept before is let go of when all of the new ones are here, not earlier. */
static int keep(const int *fds, size_t n, uint64_t from, uint64_t all)
{
    size_t taken = 0;

    if (!from)
        let_go(coming);
    bool next = from == coming->n && (!from || all == coming->wanted) && all <= PROTOCOL_KEPT_MOST;
    bool right = next && n == (all - from < PROTOCOL_MOST ? all - from : PROTOCOL_MOST);
    coming->wanted = all;
    while (right && taken < n && take(coming, fds[taken]))
        taken++;
    if (!right || taken < n) {
        for (; taken < n; taken++)
            fds_close(fds[taken]);
        let_go(coming);
        return all > PROTOCOL_KEPT_MOST ? -ENOSPC : -EPROTO;
    }
    if (coming->n == all) {
        struct kept *before = kept_aside;
        kept_aside = coming;
        coming = before;
        let_go(coming);
    }
    return 0;
}

static bool kept(int client, struct message *answer, uint64_t from)
{
    int fds[PROTOCOL_MOST];
    size_t n = kept_aside->n, n_fds = 0;

    for (size_t i = 0; i < kept_aside->n; i++)
        if (!still_kept(kept_aside, i))
            n = 0; /* what is left of it is of no use */
    for (size_t i = from; i < n && n_fds < PROTOCOL_MOST; i++)
        fds[n_fds++] = kept_aside->one[i].fd;
    answer->a = n;
    return say(client, answer, NULL, 0, fds, n_fds);
}

static bool answer_one(int client)
{
    static uint64_t ids[PROTOCOL_WORDS];
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(PROTOCOL_MOST * sizeof(int))];
    } control;
    struct message asked, answer = {.magic = PROTOCOL_MAGIC, .version = PROTOCOL_VERSION};
    struct iovec parts[2] = {{&asked, sizeof asked}, {ids, sizeof ids}};
    struct msghdr packet = {
        .msg_iov = parts, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control};
    int fds[PROTOCOL_MOST];
    size_t n_fds = 0;
    ssize_t got;

    while (poll(&(struct pollfd){.fd = client, .events = POLLIN}, 1, -1) < 0 && errno == EINTR)
        ;
    if (!recv(client, &got, 1, MSG_PEEK | MSG_DONTWAIT)) /* it has left: nothing is needed for that */
        return false;
    fds_more();
    fds_begin();
    do
        got = recvmsg(client, &packet, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&packet); head; head = CMSG_NXTHDR(&packet, head))
        if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS && !n_fds) {
            n_fds = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(head), n_fds * sizeof(int));
            for (size_t i = 0; i < n_fds; i++)
                fds_note(fds[i]);
        }
    fds_end();
    fds_as_before();
    if (got <= 0)
        return got < 0 && errno == EAGAIN;
    size_t bytes = (size_t)got > sizeof asked ? (size_t)got - sizeof asked : 0, n = bytes / sizeof ids[0];
    bool many = asked.verb == VERB_LIMITS || asked.verb == VERB_SHUT || asked.verb == VERB_JOIN;
    bool wrong = (size_t)got < sizeof asked || (n > PROTOCOL_MOST && !many) || asked.magic != PROTOCOL_MAGIC
        || asked.version != PROTOCOL_VERSION || packet.msg_flags & MSG_TRUNC;
    bool too_few = packet.msg_flags & MSG_CTRUNC; /* as many are open as may be: nothing is done with the rest */
    if (wrong || too_few || (asked.verb != VERB_MAP && asked.verb != VERB_KEEP))
        while (n_fds)
            fds_close(fds[--n_fds]);
    answer.number = wrong ? 0 : asked.number;
    answer.verb = wrong ? 0 : asked.verb;
    if (wrong) {
        answer.result = -EPROTO;
        return say(client, &answer, NULL, 0, NULL, 0);
    }
    if (too_few) {
        answer.result = -EMFILE;
        return say(client, &answer, NULL, 0, NULL, 0);
    }
    if (asked.verb >= VERB_PLACES && asked.verb <= VERB_LET && !nccl_switched_on()) {
        answer.result = -ENOSYS;
        return say(client, &answer, NULL, 0, NULL, 0);
    }
    switch (asked.verb) {
    case VERB_HELLO: tell_hello(&answer); break;
    case VERB_LIST: return tell_list(client, &answer);
    case VERB_EXPORT: return tell_descriptors(client, &answer, ids, n, false);
    case VERB_MAKE:
        if (still_state() == STATE_AWAY)
            return tell_descriptors(client, &answer, ids, n, true);
        answer.result = -EINVAL;
        break;
    case VERB_CLOSE: answer.result = still_close(asked.a); break;
    case VERB_OPEN: answer.result = still_open(); break;
    case VERB_UNMAP: answer.result = still_unmap(); break;
    case VERB_MAP:
        answer.result = still_map(ids, fds, n, n_fds);
        answer.d = (uint64_t)park_trouble().step | (uint64_t)park_trouble().device << 16;
        break;
    case VERB_STACK: answer.result = still_stack(asked.a); break;
    case VERB_BULK: answer.result = bulk_prepare(asked.a); break;
    case VERB_KEEP: answer.result = keep(fds, n_fds, asked.a, asked.b); break;
    case VERB_KEPT: return kept(client, &answer, asked.a);
    case VERB_DEVICES: return tell_devices(client, &answer, asked.a != 0);
    case VERB_COUNTS: return tell_counts(client, &answer);
    case VERB_CALLED: return tell_called(client, &answer);
    case VERB_SHARE: return tell_share(client, &answer, &asked);
    case VERB_SHARERS: return tell_sharers(client, &answer);
    case VERB_PLACES: answer.result = places_told(asked.a, (const struct gpu_place *)ids, bytes); break;
    case VERB_COMMS: return tell_comms(client, &answer, asked.a);
    case VERB_IDS: return tell_unique_ids(client, &answer, ids, n);
    case VERB_CUT: comms_cut(); break;
    case VERB_LIMITS:
        answer.result = cut_limits((const struct limit_record *)(const void *)ids, bytes / sizeof(struct limit_record));
        break;
    case VERB_REST: answer.result = cut_rest(asked.a); break;
    case VERB_SHUT: answer.result = cut_close(ids, n, asked.a); break;
    case VERB_JOIN:
        answer.result = cut_join((const struct join_record *)(const void *)ids, bytes / sizeof(struct join_record),
                                 asked.a);
        break;
    case VERB_LET: answer.result = cut_open(); break;
    default: answer.result = -ENOSYS; break;
    }
    if (asked.verb != VERB_HELLO) {
        answer.a = still_state();
        answer.b = bulk_ready();
        answer.c = bulk_asked();
    }
    return say(client, &answer, NULL, 0, NULL, 0);
}

static bool welcome(int client)
{
    struct ucred who;
    socklen_t size = sizeof who;

    return !getsockopt(client, SOL_SOCKET, SO_PEERCRED, &who, &size) && (who.uid == 0 || who.uid == geteuid());
}

/* What a restore from an image has put there instead of ours, and marked: nobody else's may be closed. */
static bool is_stand_in(int fd)
{
    struct sockaddr_un found = {.sun_family = AF_UNSPEC};
    struct timeval mark = {0, 0};
    socklen_t size = sizeof found, size_of_mark = sizeof mark;

    return fd >= 0 && !getsockname(fd, (struct sockaddr *)&found, &size) && found.sun_family == AF_UNIX
        && size <= offsetof(struct sockaddr_un, sun_path)
        && !getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &mark, &size_of_mark) && mark.tv_sec == PROTOCOL_STAND_IN;
}

/* -1 where there is none to be had. */
static int named_socket(void)
{
    for (int tried = 0; tried < NAMES_TRIED; tried++) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        draw_name();
        if (fd < 0 || (!bind(fd, (struct sockaddr *)&name, name_size) && !listen(fd, WAITING)))
            return fd;
        int why = errno;
        close(fd);
        if (why != EADDRINUSE)
            break;
    }
    return -1;
}

static void *serve(void *nothing)
{
    tell_name();
    gate_exempt();
    capture_leave_alone();
    for (;;) {
        /* A program that closes all descriptors that there are has closed this one, too; a restore from an image has put
         * another one in its place, whose name nobody can have taken meanwhile: it has none. */
        if (!is_ours(listening)) {
            fds_begin();
            if (is_stand_in(listening))
                close(listening);
            fds_forget(listening);
            fds_end();
            listening = fds_away(named_socket());
            tell_name();
        }
        int accepted = listening < 0 ? -1 : accept4(listening, NULL, NULL, SOCK_CLOEXEC);
        if (accepted < 0) {
            if (is_ours(listening) || listening < 0)
                poll(NULL, 0, 50);
            continue;
        }
        client = fds_away(accepted);
        if (welcome(client))
            while (answer_one(client))
                ;
        let_go(coming); /* it did not come to an end */
        shutdown(client, SHUT_RDWR); /* also for a child that was forked meanwhile and has it, too */
        fds_close(client);
        client = -1;
        if (still_state() == STATE_OPEN) /* who has asked for it has no use for it any more, or has been killed */
            bulk_prepare(0);
    }
    return nothing;
}

/* What `limosa run --without` has told it, as words with commas between them. */
static void read_switches(void)
{
    const char *words = secure_getenv("LIMOSA_SHIM_WITHOUT");

    if (words && strstr(words, "bulk"))
        bulk_switch_off();
    still_keep_stack(words && strstr(words, "stack"));
}

static void begin(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;

    read_switches();
    listening = fds_away(named_socket());
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    atomic_store(&thread_has_name, false);
    if (pthread_create(&thread, &attributes, serve, NULL)) {
        fds_close(listening);
        listening = -1;
    }
    /* Who has initialised the driver can be found. */
    for (int waited = 0; listening >= 0 && waited < NAME_MS && !atomic_load(&thread_has_name); waited++)
        poll(NULL, 0, 1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A child that was forked has no thread of ours, and must not hold its parent's memory. It cannot use what the parent
 * made in the driver: no driver lets it. */
static void in_child(void)
{
    /* What the program has closed, and may have the number of for something of its own, is not ours to close. */
    if (!is_ours(listening))
        fds_forget(listening);
    if (!is_ours(client))
        fds_forget(client);
    listening = client = -1;
    for (int set = 0; set < 2; set++) {
        for (size_t i = 0; i < sets[set].n; i++)
            if (!still_kept(&sets[set], i))
                fds_forget(sets[set].one[i].fd);
        sets[set].n = sets[set].wanted = 0;
    }
    fds_in_child();
    bulk_in_child();
    still_in_child();
    capture_in_child();
    late_in_child();
    contexts_in_child();
    memory_in_child();
    left_in_child();
    ipc_in_child();
    comms_in_child();
    clock_in_child();
    cut_in_child();
    pthread_mutex_init(&begin_lock, NULL);
}

EXPORT CUresult cuInit(unsigned flags)
{
    static int pid;

    entry_called(AT_cuInit);
    if (!shim_ready() && !real(cuInit))
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = real(cuInit)(flags);
    gate_leave(reader);
    if (!result && shim_ready()) {
        pthread_mutex_lock(&begin_lock);
        if (pid != (int)getpid()) {
            static bool registered;
            if (!registered)
                around_forks(fds_before_fork, fds_after_fork, in_child);
            registered = true;
            pid = (int)getpid();
            bulk_find_driver((void *)real(cuInit));
            places_begin();
            begin();
        }
        pthread_mutex_unlock(&begin_lock);
    }
    return result;
}
