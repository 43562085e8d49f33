/* How much of a board's memory is taken: by whatever process of this machine, and until the last one lets go of it. */
#define _GNU_SOURCE
#include "standin.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define MARK "standin-device-memory"
enum { MOST_OBJECTS = 4096 };

typedef struct {
    ino_t inodes[MOST_OBJECTS];
    size_t count, bytes;
} Found;

/* Processes with the same control file share a machine. */
static unsigned long machine(void) {
    struct stat status;
    const char *path = getenv("STANDIN_CONTROL");
    return path && !stat(path, &status) ? status.st_ino : 0;
}

void object_name(char *name, size_t length, const CUmemAllocationProp *prop) {
    snprintf(name, length, MARK ":%lu:%d:%d:%d", machine(), board_of(prop->location.id), prop->requestedHandleTypes,
             prop->allocFlags.gpuDirectRDMACapable);
}

bool object_named(int folder, const char *link, int *board, int *types, int *rdma) {
    char name[128] = "";
    unsigned long where;
    if (readlinkat(folder, link, name, sizeof name - 1) < 0) return false;
    return sscanf(name, "/memfd:" MARK ":%lu:%d:%d:%d", &where, board, types, rdma) == 4 && where == machine();
}

static void add_open_files(const char *process, int board, Found *found) {
    char path[300];
    snprintf(path, sizeof path, "/proc/%s/fd", process);
    DIR *files = opendir(path); /* NULL: gone, or another user's */
    for (struct dirent *file; files && (file = readdir(files));) {
        int on, types, rdma;
        struct stat status;
        if (!object_named(dirfd(files), file->d_name, &on, &types, &rdma) || on != board) continue;
        if (fstatat(dirfd(files), file->d_name, &status, 0)) continue;
        size_t known = 0;
        while (known < found->count && found->inodes[known] != status.st_ino) known++;
        if (known < found->count) continue;
        if (known == MOST_OBJECTS) forbid(__func__, "more than %d objects", MOST_OBJECTS);
        found->inodes[found->count++] = status.st_ino;
        found->bytes += (size_t)status.st_size;
    }
    if (files) closedir(files);
}

void free_memory(int ordinal, size_t *left, size_t *total) {
    static Found found; /* under the lock */
    found.count = found.bytes = 0;
    DIR *processes = opendir("/proc");
    for (struct dirent *process; processes && (process = readdir(processes));)
        if (process->d_name[0] >= '1' && process->d_name[0] <= '9') add_open_files(process->d_name, board_of(ordinal), &found);
    if (processes) closedir(processes);
    size_t used = found.bytes + settings()->used_memory;
    *total = settings()->total_memory;
    *left = used < *total ? *total - used : 0;
}
