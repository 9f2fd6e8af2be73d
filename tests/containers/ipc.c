/* What System V keeps for processes: shared memory, a semaphore, a message queue. It says again and again what is in
 * each, as "step N hash 0xMSQ".
 *
 *     ipc [new]      without the word: of what another one has made
 *     ipc posix      has a message queue of POSIX's open
 */
#include <fcntl.h>
#include <mqueue.h>
#include <stdio.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <unistd.h>

#define KEY 0x11305a

int main(int argc, char **argv)
{
    int flags = argc > 1 ? IPC_CREAT | IPC_EXCL | 0600 : 0;
    struct {
        long type;
        char text[8];
    } message = {1, "kept"};
    struct msqid_ds about;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1 && !strcmp(argv[1], "posix") && mq_open("/queue", O_RDWR | O_CREAT, 0600, NULL) < 0)
        return 1;
    int memory = shmget(KEY, 4096, flags), semaphore = semget(KEY, 1, flags), queue = msgget(KEY, flags);
    if (memory < 0 || semaphore < 0 || queue < 0)
        return 1;
    int *at = shmat(memory, NULL, 0);
    if (flags) {
        *at = 4;
        semctl(semaphore, 0, SETVAL, 3);
        msgsnd(queue, &message, sizeof message.text, 0);
    }
    for (int step = 0;; step++) {
        msgctl(queue, IPC_STAT, &about);
        printf("step %d hash 0x%d%d%d\n", step, *at, semctl(semaphore, 0, GETVAL), (int)about.msg_qnum);
        usleep(20000);
    }
}
