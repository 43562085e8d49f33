/* Addresses: reserved, mapped to objects, opened for devices. Copies reach the memory through a shadow of the reservation,
 * as the CPU may not touch a device's addresses (a test that plays a kernel sets `cpu_visible`). */
#define _GNU_SOURCE
#include "standin.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static Reservation *reservations;
static unsigned long long next_id = 1;

static char *reserve_aligned(size_t size) {
    char *wide = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) return NULL;
    size_t before = (GRANULARITY - (uintptr_t)wide % GRANULARITY) % GRANULARITY;
    if (before) munmap(wide, before);
    munmap(wide + before + size, GRANULARITY - before);
    return wide + before;
}

static void close_pages(void *start, size_t size) {
    mmap(start, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

CUresult reserve(const char *call, size_t size, Reservation **made) {
    char *start = reserve_aligned(size), *shadow = reserve_aligned(size);
    if (!start || !shadow) return refuse(CUDA_ERROR_OUT_OF_MEMORY, call, "%zu bytes of addresses: %m", size);
    Reservation *reservation = calloc(1, sizeof *reservation);
    *reservation = (Reservation){.start = (uintptr_t)start, .size = size, .shadow = shadow, .next = reservations};
    *made = reservations = reservation;
    return CUDA_SUCCESS;
}

void unreserve(Reservation *reservation) {
    munmap((void *)(uintptr_t)reservation->start, reservation->size);
    munmap(reservation->shadow, reservation->size);
    for (Reservation **at = &reservations; *at; at = &(*at)->next)
        if (*at == reservation) {
            *at = reservation->next;
            break;
        }
    free(reservation);
}

Reservation *reservation_at(CUdeviceptr address) {
    for (Reservation *r = reservations; r; r = r->next)
        if (address >= r->start && address < r->start + r->size) return r;
    return NULL;
}

static Mapping *mapping_in(const Reservation *reservation, CUdeviceptr address) {
    for (Mapping *m = reservation->mappings; m; m = m->next)
        if (address >= m->start && address < m->start + m->size) return m;
    return NULL;
}

Mapping *mapping_at(CUdeviceptr address) {
    Reservation *reservation = reservation_at(address);
    return reservation ? mapping_in(reservation, address) : NULL;
}

CUresult map_object(const char *call, Reservation *in, CUdeviceptr start, size_t size, Object *object, Mapping **made) {
    Mapping **at = &in->mappings;
    while (*at && (*at)->start + (*at)->size <= start) at = &(*at)->next;
    if (*at && (*at)->start < start + size)
        return refuse(CUDA_ERROR_ALREADY_MAPPED, call, "a part of 0x%llx + %zu is mapped already", start, size);
    char *shadow = in->shadow + (start - in->start);
    if (mmap(shadow, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, object->fd, 0) == MAP_FAILED ||
        mmap((void *)(uintptr_t)start, size, PROT_NONE, MAP_SHARED | MAP_FIXED, object->fd, 0) == MAP_FAILED)
        return refuse(CUDA_ERROR_OUT_OF_MEMORY, call, "%m");
    Mapping *mapping = calloc(1, sizeof *mapping);
    *mapping = (Mapping){.start = start, .size = size, .object = object, .id = next_id++, .next = *at};
    object->maps++;
    live.mappings++;
    *made = *at = mapping;
    return CUDA_SUCCESS;
}

/* All mappings that lie in the range. */
void unmap(const char *call, Reservation *in, CUdeviceptr start, size_t size) {
    forbid_pending(call, start, size);
    close_pages((void *)(uintptr_t)start, size);
    close_pages(in->shadow + (start - in->start), size);
    Mapping **at = &in->mappings;
    while (*at) {
        Mapping *mapping = *at;
        if (mapping->start < start || mapping->start >= start + size) {
            at = &mapping->next;
            continue;
        }
        *at = mapping->next;
        mapping->object->maps--;
        live.mappings--;
        object_drop(mapping->object);
        free(mapping);
    }
}

void set_access(Mapping *mapping, int ordinal, int flags) {
    mapping->access[ordinal] = flags;
    if (!settings()->cpu_visible) return;
    int protection = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : flags ? PROT_READ : PROT_NONE;
    mprotect((void *)(uintptr_t)mapping->start, mapping->size, protection);
}

enum Reach reach(CUdeviceptr address, size_t size, int ordinal, bool write, void **found) {
    Reservation *reservation = reservation_at(address);
    *found = (void *)(uintptr_t)address;
    if (!reservation) return write && is_read_only(address) ? DENIED : REACHED;
    *found = reservation->shadow + (address - reservation->start);
    enum Reach result = REACHED;
    for (CUdeviceptr at = address; at < address + size;) {
        Mapping *mapping = mapping_in(reservation, at);
        if (!mapping) return UNMAPPED;
        int needed = write ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
        if ((mapping->access[ordinal] & needed) != needed) result = DENIED;
        at = mapping->start + mapping->size;
    }
    return result;
}

API CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    ENTER(NEED_INIT);
    (void)wish; /* the driver may reserve elsewhere, and the stand-in does */
    if (!settings()->vmm) return CUDA_ERROR_NOT_SUPPORTED;
    if (!size || size % GRANULARITY || alignment & (alignment - 1) || alignment > GRANULARITY || flags)
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__,
                      "size %zu is no multiple of %d, alignment %zu no power of two up to that, or flags 0x%llx are not 0", size,
                      GRANULARITY, alignment, flags);
    pthread_mutex_lock(&world);
    Reservation *made;
    CUresult result = reserve(__func__, size, &made);
    if (!result) {
        live.reservations++;
        *start = made->start;
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Reservation *reservation = reservation_at(start);
    CUresult result = CUDA_SUCCESS;
    if (!reservation || reservation->start != start || reservation->size != size) {
        result = refuse(CUDA_ERROR_INVALID_VALUE, __func__, "0x%llx + %zu is not what was reserved", start, size);
    } else if (reservation->mappings) {
        result = refuse(CUDA_ERROR_INVALID_VALUE, __func__, "0x%llx is still mapped", reservation->mappings->start);
    } else {
        unreserve(reservation);
        live.reservations--;
    }
    pthread_mutex_unlock(&world);
    return result;
}

static CUresult check_map(const char *call, CUdeviceptr start, size_t size, size_t offset, const Object *object,
                          unsigned long long flags) {
    Reservation *in = reservation_at(start);
    if (!in || start + size > in->start + in->size)
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx + %zu is not reserved", start, size);
    if (!size || size % GRANULARITY || start % GRANULARITY || offset || flags)
        return refuse(CUDA_ERROR_INVALID_VALUE, call,
                      "address 0x%llx or size %zu is no multiple of %d, or offset %zu or flags 0x%llx are not 0", start, size,
                      GRANULARITY, offset, flags);
    if (size != object->size) /* as an H200 says with driver 580, of fewer and of more */
        return refuse(CUDA_ERROR_NOT_SUPPORTED, call, "%zu bytes are not the %zu of the object", size, object->size);
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Object *object = object_of(__func__, handle);
    CUresult result = object ? check_map(__func__, start, size, offset, object, flags) : CUDA_ERROR_INVALID_VALUE;
    Mapping *made;
    if (!result) result = map_object(__func__, reservation_at(start), start, size, object, &made);
    pthread_mutex_unlock(&world);
    return result;
}

/* NULL after saying why, unless mappings cover the range and end where it ends. */
static Reservation *whole_mappings(const char *call, CUdeviceptr start, size_t size) {
    Reservation *in = reservation_at(start);
    CUdeviceptr at = start;
    for (Mapping *m = in ? mapping_in(in, start) : NULL; m && m->start == at && at < start + size; m = m->next) at += m->size;
    if (size && at == start + size) return in;
    refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx + %zu are not whole mappings", start, size);
    return NULL;
}

API CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Reservation *in = whole_mappings(__func__, start, size);
    if (in) unmap(__func__, in, start, size);
    pthread_mutex_unlock(&world);
    return in ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult check_access(const char *call, const CUmemAccessDesc *wanted) {
    if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return refuse(CUDA_ERROR_NOT_SUPPORTED, call, "location type %d is not DEVICE", wanted->location.type);
    if (wanted->location.id < 0 || wanted->location.id >= visible_devices())
        return refuse(CUDA_ERROR_INVALID_DEVICE, call, "there is no device %d", wanted->location.id);
    if (wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        wanted->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "access flags %d", wanted->flags);
    return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *wanted, size_t count) {
    ENTER(NEED_INIT);
    for (size_t i = 0; i < count; i++) {
        CUresult wrong = check_access(__func__, &wanted[i]);
        if (wrong) return wrong;
    }
    pthread_mutex_lock(&world);
    Reservation *in = whole_mappings(__func__, start, size);
    for (Mapping *m = in ? mapping_in(in, start) : NULL; m && m->start < start + size; m = m->next)
        for (size_t i = 0; i < count; i++) set_access(m, wanted[i].location.id, wanted[i].flags);
    pthread_mutex_unlock(&world);
    return in ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
    ENTER(NEED_INIT);
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || location->id < 0 || location->id >= visible_devices())
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at(address);
    if (mapping) *flags = (unsigned long long)mapping->access[location->id];
    pthread_mutex_unlock(&world);
    return mapping ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, __func__, "0x%llx is not mapped", address);
}
