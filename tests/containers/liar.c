/* A library that a hostile container preloads beside the shim. It takes the shim's thread its name, and gives the name
 * of a socket of its own to a thread: whoever looks for the shim finds a liar.
 *
 *     LIAR=squat     another process listens there
 *     LIAR=garbage   it answers with bytes that mean nothing
 *     LIAR=silent    it takes what comes, and says nothing
 *     LIAR=gift      it answers with descriptors of its own, each time
 *
 * What it is given it writes down: "BYTES DESCRIPTORS" a line, in /liar. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define NUMBER "0badcafe"
#define ADDRESS "\0limosa/shim/" NUMBER

static const char *mode;
static int listener;

/* The shim's own thread is called otherwise. */
static void hide_the_shim(void)
{
    char path[300], name[32];
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *entry; threads && (entry = readdir(threads));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", entry->d_name);
        int fd = open(path, O_RDWR);
        ssize_t n = fd < 0 ? 0 : read(fd, name, sizeof name - 1);
        if (n > 0) {
            name[n] = 0;
            if (!strncmp(name, "limosa-", 7) && strncmp(name + 7, NUMBER, 8))
                if (write(fd, "other", 5) != 5)
                    abort();
        }
        if (fd >= 0)
            close(fd);
    }
    if (threads)
        closedir(threads);
}

static void note(ssize_t bytes, struct msghdr *message)
{
    int fds = 0, fd = open("/liar", O_WRONLY | O_CREAT | O_APPEND, 0666);
    for (struct cmsghdr *one = CMSG_FIRSTHDR(message); one; one = CMSG_NXTHDR(message, one))
        if (one->cmsg_type == SCM_RIGHTS)
            fds += (int)((one->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    dprintf(fd, "%zd %d\n", bytes, fds);
    close(fd);
}

static void *serve(void *unused)
{
    static char bytes[1 << 16], control[1 << 12];
    (void)unused;
    for (;;) {
        int client = accept(listener, NULL, NULL);
        struct iovec piece = {bytes, sizeof bytes};
        struct msghdr message = {
            .msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        for (ssize_t n; client >= 0 && (n = recvmsg(client, &message, 0)) > 0;) {
            note(n, &message);
            for (int i = 0; i < 4096; i++)
                bytes[i] = (char)random();
            message.msg_controllen = 0;
            if (!strcmp(mode, "garbage"))
                send(client, bytes, (size_t)(random() % 4096), MSG_NOSIGNAL);
            if (!strcmp(mode, "gift")) {
                int gifts[64];
                for (int i = 0; i < 64; i++)
                    gifts[i] = 0;
                message.msg_controllen = CMSG_SPACE(sizeof gifts);
                struct cmsghdr *one = CMSG_FIRSTHDR(&message);
                *one = (struct cmsghdr){
                    .cmsg_len = CMSG_LEN(sizeof gifts), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
                memcpy(CMSG_DATA(one), gifts, sizeof gifts);
                piece.iov_len = 64;
                sendmsg(client, &message, MSG_NOSIGNAL);
                piece.iov_len = sizeof bytes;
            }
            message.msg_controllen = sizeof control;
        }
        if (client >= 0 && strcmp(mode, "silent"))
            close(client);
    }
}

static void begin_to_listen(void)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    memcpy(name.sun_path, ADDRESS, sizeof ADDRESS);
    listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (bind(listener, (struct sockaddr *)&name, offsetof(struct sockaddr_un, sun_path) + sizeof ADDRESS - 1))
        abort();
    listen(listener, 64);
}

static void *pretend(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "limosa-" NUMBER);
    for (;;) {
        hide_the_shim();
        usleep(2000);
    }
}

__attribute__((constructor)) static void begin(void)
{
    pthread_t thread;
    mode = getenv("LIAR");
    if (!mode || getpid() != 1)
        return;
    if (strcmp(mode, "squat")) {
        begin_to_listen();
        pthread_create(&thread, NULL, serve, NULL);
    } else if (!fork()) { /* the kernel says of a connection who has called listen() */
        begin_to_listen();
        serve(NULL);
    }
    pthread_create(&thread, NULL, pretend, NULL);
}
