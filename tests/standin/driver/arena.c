/* Where handles point. Nothing is ever reused, so that one that was destroyed is known as such, and any number as none. */
#define _GNU_SOURCE
#include "standin.h"
#include <sys/mman.h>

enum { MOST = 1 << 20 };

void *arena_add(Arena *arena) {
    if (!arena->start) {
        arena->start = mmap(NULL, arena->size * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (arena->start == MAP_FAILED) forbid(__func__, "no addresses: %m");
    }
    if (arena->used == MOST) forbid(__func__, "more than %d of a kind were created", MOST);
    return arena->start + arena->used++ * arena->size;
}

bool arena_has(const Arena *arena, const void *handle) {
    size_t offset = (uintptr_t)handle - (uintptr_t)arena->start;
    return arena->start && offset < arena->used * arena->size && offset % arena->size == 0;
}
