/* Says whether the shim is mapped into this program. */
#include <stdio.h>
#include <string.h>

int main(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[4096];
    int found = 0;

    while (maps && fgets(line, sizeof line, maps))
        found |= strstr(line, "liblimosa_shim") != NULL;
    puts(found ? "mapped" : "not mapped");
    return 0;
}
