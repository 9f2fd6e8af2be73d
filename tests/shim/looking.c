/* Looks a function up that no list knows, in some threads all the time, and in children that are forked meanwhile. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILDREN 400

static void *library;
static volatile int over;

static void *look(void *nothing)
{
    while (!over)
        dlsym(library, "cuMemAllocOfTheYearAfter");
    return nothing;
}

int main(void)
{
    pthread_t threads[3];
    int well = 0, status;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, look, NULL);
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        if (!child) {
            alarm(2);
            _exit(!dlsym(library, "cuFetchOfTheYearAfter"));
        }
        waitpid(child, &status, 0);
        well += status == 0;
        if (status)
            break;
    }
    over = 1;
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    printf("%d of %d\n", well, CHILDREN);
    return 0;
}
