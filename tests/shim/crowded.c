/* A thread calls the driver when there is no memory for what the gate keeps of it: gate.c alone. */
#include <sys/mman.h>

#define mmap(...) MAP_FAILED
#include "gate.c"

void capture_thread_ends(const struct reader *reader)
{
}

int main(void)
{
    gate_leave(gate_enter());
    return 0;
}
