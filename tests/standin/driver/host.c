/* Host memory that the device may reach: registered (pinned) by the caller, or allocated so. */
#define _GNU_SOURCE
#include "standin.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct Registration {
    CUdeviceptr start;
    size_t size;
    bool allocated, read_only;
    struct Registration *next;
} Registration;
static Registration *registrations;

static Registration *registration_at(CUdeviceptr address) {
    for (Registration *r = registrations; r; r = r->next)
        if (address >= r->start && address < r->start + r->size) return r;
    return NULL;
}

bool is_registered(CUdeviceptr address, size_t size) {
    Registration *found = registration_at(address);
    return found && address + size <= found->start + found->size;
}

bool is_read_only(CUdeviceptr address) {
    Registration *found = registration_at(address);
    return found && found->read_only;
}

/* Whether all pages of the range are mapped, and may be written if they are to be. */
static bool has_pages(CUdeviceptr start, size_t size, bool write) {
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) forbid(__func__, "/proc/self/maps: %m");
    CUdeviceptr at = start, from, to;
    char line[4096], rights[8];
    while (at < start + size && fgets(line, sizeof line, maps)) /* sorted by address */
        if (sscanf(line, "%llx-%llx %7s", &from, &to, rights) == 3 && from <= at && at < to && (rights[1] == 'w' || !write)) at = to;
    fclose(maps);
    return at >= start + size;
}

static CUresult add(const char *call, void *start, size_t size, bool allocated, bool read_only) {
    for (Registration *r = registrations; r; r = r->next)
        if ((uintptr_t)start < r->start + r->size && r->start < (uintptr_t)start + size)
            return refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, call, "a part of %p + %zu is registered", start, size);
    Registration *made = calloc(1, sizeof *made);
    *made = (Registration){.start = (uintptr_t)start, .size = size, .allocated = allocated, .read_only = read_only, .next = registrations};
    registrations = made;
    live.registrations++;
    return CUDA_SUCCESS;
}

static CUresult take(const char *call, void *start, bool allocated) {
    for (Registration **at = &registrations; *at; at = &(*at)->next) {
        Registration *found = *at;
        if (found->start != (uintptr_t)start || found->allocated != allocated) continue;
        forbid_pending(call, found->start, found->size);
        *at = found->next;
        if (allocated) munmap(start, found->size);
        free(found);
        live.registrations--;
        return CUDA_SUCCESS;
    }
    if (allocated) return refuse(CUDA_ERROR_INVALID_VALUE, call, "%p was not allocated here", start);
    return refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, call, "%p is not where registered memory begins", start);
}

API CUresult cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    ENTER(NEED_CONTEXT);
    if (!start || !size || flags & ~(unsigned)CU_MEMHOSTREGISTER_ALL)
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "%p + %zu, flags 0x%x", start, size, flags);
    if (!has_pages((uintptr_t)start, size, !(flags & CU_MEMHOSTREGISTER_READ_ONLY)))
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "%p + %zu is not mapped, or may not be written", start, size);
    pthread_mutex_lock(&world);
    CUresult result = add(__func__, start, size, false, flags & CU_MEMHOSTREGISTER_READ_ONLY);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemHostUnregister(void *start) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    CUresult result = take(__func__, start, false);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemHostAlloc(void **start, size_t size, unsigned flags) {
    ENTER(NEED_CONTEXT);
    (void)flags;
    void *made = size ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (made == MAP_FAILED) return size ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&world);
    CUresult result = add(__func__, made, size, true, false);
    pthread_mutex_unlock(&world);
    *start = made;
    return result;
}

API CUresult cuMemFreeHost(void *start) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    CUresult result = take(__func__, start, true);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *start, unsigned flags) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    bool known = !flags && registration_at((uintptr_t)start);
    pthread_mutex_unlock(&world);
    if (!known) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "%p is not registered, or flags 0x%x are not 0", start, flags);
    *address = (uintptr_t)start;
    return CUDA_SUCCESS;
}
