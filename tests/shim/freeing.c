/* Frees pieces while a stream is being captured, then has two threads allocate at once: both find what was freed. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static int (*current)(void *), (*alloc)(unsigned long *, size_t), (*release)(unsigned long);
static pthread_barrier_t both;
static void *context;

static void *allocate(void *nothing)
{
    unsigned long piece;

    current(context);
    pthread_barrier_wait(&both);
    return (void *)(long)(alloc(&piece, 2 << 20) || release(piece));
}

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *stream, *graph;
    int (*init)(unsigned) = dlsym(library, "cuInit");
    int (*retain)(void **, int) = dlsym(library, "cuDevicePrimaryCtxRetain");
    int (*create)(void **, unsigned) = dlsym(library, "cuStreamCreate");
    int (*begin)(void *, int) = dlsym(library, "cuStreamBeginCapture_v2");
    int (*end)(void *, void **) = dlsym(library, "cuStreamEndCapture");
    int (*destroy)(void *) = dlsym(library, "cuGraphDestroy");
    int (*info)(size_t *, size_t *) = dlsym(library, "cuMemGetInfo_v2");
    size_t before, after, all;

    current = dlsym(library, "cuCtxSetCurrent");
    alloc = dlsym(library, "cuMemAlloc_v2");
    release = dlsym(library, "cuMemFree_v2");
    if (init(0) || retain(&context, 0) || current(context) || create(&stream, 1) || info(&before, &all))
        return 1;
    for (int round = 0; round < 20; round++) {
        unsigned long pieces[16];
        pthread_t threads[2];
        for (int i = 0; i < 16; i++)
            if (alloc(&pieces[i], 2 << 20))
                return 2;
        if (begin(stream, 2))
            return 3;
        for (int i = 0; i < 16; i++)
            if (release(pieces[i]))
                return 4;
        if (end(stream, &graph) || destroy(graph))
            return 5;
        pthread_barrier_init(&both, NULL, 2);
        for (int i = 0; i < 2; i++)
            pthread_create(&threads[i], NULL, allocate, NULL);
        for (int i = 0; i < 2; i++) {
            void *wrong;
            pthread_join(threads[i], &wrong);
            if (wrong)
                return 6;
        }
    }
    if (info(&after, &all))
        return 7;
    printf("%zd\n", before - after);
    return 0;
}
