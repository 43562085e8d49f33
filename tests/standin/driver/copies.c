/* Copies and memsets. The addresses are checked at the call; the bytes are read and written when the stream gets there. */
#define _GNU_SOURCE
#include "standin.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A GPU that touches what it must not loses its context: every later call returns CUDA_ERROR_ILLEGAL_ADDRESS. */
static bool lose(Context *context, CUdeviceptr address, size_t size, bool write, enum Reach reached) {
    if (reached == REACHED) return false;
    context->error = refuse(CUDA_ERROR_ILLEGAL_ADDRESS, "stream", "device %d may not %s 0x%llx + %zu: %s", context->device,
                            write ? "write" : "read", address, size,
                            reached == UNMAPPED ? "it is not mapped" : "cuMemSetAccess or cuMemHostRegister did not allow it");
    return true;
}

static void run_copy(Context *context, const Copy *copy) {
    void *to, *from;
    enum Reach target = reach(copy->to, copy->size, context->device, true, &to);
    if (lose(context, copy->to, copy->size, true, target)) return;
    enum Reach source = reach(copy->from, copy->size, context->device, false, &from);
    if (lose(context, copy->from, copy->size, false, source)) return;
    pthread_mutex_unlock(&world); /* nobody unmaps meanwhile: forbid_pending() */
    memmove(to, from, copy->size);
    if (settings()->copy_us) usleep((useconds_t)settings()->copy_us);
    pthread_mutex_lock(&world);
    work.bytes += copy->size;
    work.copies++;
}

static void run_fill(Context *context, const Item *item) {
    void *to;
    enum Reach target = reach(item->fill.to, item->fill.size, context->device, true, &to);
    if (lose(context, item->fill.to, item->fill.size, true, target)) return;
    pthread_mutex_unlock(&world);
    for (size_t at = 0; at < item->fill.size; at += item->fill.width)
        memcpy((char *)to + at, &item->fill.value, item->fill.width);
    pthread_mutex_lock(&world);
}

const Row *rows_of(const Item *launch) {
    void *rows;
    CUdeviceptr table = launch->launch.table;
    size_t size = launch->launch.count * sizeof(Row);
    if (reservation_at(table)) return reach(table, size, 0, false, &rows) == REACHED ? rows : NULL;
    return is_registered(table, size) ? (const Row *)(uintptr_t)table : NULL;
}

/* A kernel reaches what is mapped for its device, and host memory that is registered. */
static bool reaches(Context *context, CUdeviceptr address, size_t size) {
    if (reservation_at(address) || is_registered(address, size)) return true;
    return !lose(context, address, size, false, UNMAPPED);
}

static void run_launch(Context *context, const Item *item) {
    const Row *rows = rows_of(item);
    if (!rows) {
        lose(context, item->launch.table, item->launch.count * sizeof *rows, false, UNMAPPED);
        return;
    }
    for (size_t i = 0; i < item->launch.count && !context->error; i++) {
        Row row = rows[i];
        if ((row.to | row.from | row.size) % 16)
            context->error = refuse(CUDA_ERROR_MISALIGNED_ADDRESS, "stream", "0x%llx, 0x%llx, %llu: 16 bytes are copied at once",
                                    row.to, row.from, row.size);
        else if (reaches(context, row.to, row.size) && reaches(context, row.from, row.size))
            run_copy(context, &(Copy){row.to, row.from, row.size});
    }
}

void run_copies(Context *context, const Item *item) {
    if (item->kind == FILL && !context->error) run_fill(context, item);
    if (item->kind == LAUNCH && !context->error) run_launch(context, item);
    for (size_t i = 0; item->kind == COPY && i < item->count && !context->error; i++) run_copy(context, &item->copies[i]);
}

enum Side { DEVICE, HOST, EITHER };

static CUresult check(const char *call, enum Side side, CUdeviceptr address, size_t size) {
    if (!size) return CUDA_SUCCESS;
    void *found;
    bool reserved = reservation_at(address);
    if (side == HOST && reserved) return refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx is the device's, not the host's", address);
    if (side == DEVICE && !reserved && !is_registered(address, size))
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx + %zu is not the device's", address, size);
    if (!address) return refuse(CUDA_ERROR_INVALID_VALUE, call, "an address is 0");
    if (reach(address, size, current()->device, false, &found) == UNMAPPED)
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx + %zu is not wholly mapped", address, size);
    return CUDA_SUCCESS;
}

static bool syncs_memops(CUdeviceptr address) {
    Mapping *mapping = mapping_at(address);
    return current()->flags & CU_CTX_SYNC_MEMOPS || (mapping && mapping->sync_memops);
}

/* Takes `copies` over. */
static CUresult copy_later(const char *call, CUstream handle, Copy *copies, size_t count, enum Side to, enum Side from, bool sync) {
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(call, handle, &stream);
    for (size_t i = 0; i < count && !result; i++) {
        result = check(call, to, copies[i].to, copies[i].size);
        if (!result) result = check(call, from, copies[i].from, copies[i].size);
    }
    if (result) {
        free(copies);
    } else {
        uint64_t number = enqueue(stream, (Item){.kind = COPY, .copies = copies, .count = count});
        if (sync) result = await(stream, number);
    }
    pthread_mutex_unlock(&world);
    return result;
}

static CUresult copy_one(const char *call, CUstream handle, CUdeviceptr to, CUdeviceptr from, size_t size, enum Side to_side,
                         enum Side from_side, bool sync) {
    Copy *copy = malloc(sizeof *copy);
    *copy = (Copy){to, from, size};
    return copy_later(call, handle, copy, 1, to_side, from_side, sync);
}

#define ADDRESS(pointer) ((CUdeviceptr)(uintptr_t)(pointer))

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(NEED_CONTEXT);
    return copy_one(__func__, stream, to, from, size, EITHER, EITHER, false);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(NEED_CONTEXT);
    return copy_one(__func__, stream, to, from, size, DEVICE, DEVICE, false);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    ENTER(NEED_CONTEXT);
    return copy_one(__func__, stream, to, ADDRESS(from), size, DEVICE, HOST, false);
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER(NEED_CONTEXT);
    return copy_one(__func__, stream, ADDRESS(to), from, size, HOST, DEVICE, false);
}

/* The synchronous calls wait only where the host takes part; between device addresses they return at once. */
API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    bool sync = !reservation_at(to) || !reservation_at(from) || syncs_memops(to) || syncs_memops(from);
    pthread_mutex_unlock(&world);
    return copy_one(__func__, NULL, to, from, size, EITHER, EITHER, sync);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    bool sync = syncs_memops(to) || syncs_memops(from);
    pthread_mutex_unlock(&world);
    return copy_one(__func__, NULL, to, from, size, DEVICE, DEVICE, sync);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER(NEED_CONTEXT);
    return copy_one(__func__, NULL, to, ADDRESS(from), size, DEVICE, HOST, true);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER(NEED_CONTEXT);
    return copy_one(__func__, NULL, ADDRESS(to), from, size, HOST, DEVICE, true);
}

static CUresult check_batch(const char *call, size_t count, const CUmemcpyAttributes *attributes, const size_t *first,
                            size_t groups, CUstream stream) {
    if (!count || !groups || groups > count || !attributes || !first || first[0])
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "%zu copies with %zu attributes, of which the first begins at copy 0", count,
                      groups);
    for (size_t i = 0; i < groups; i++)
        if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3 || first[i] >= count ||
            (i && first[i] <= first[i - 1]))
            return refuse(CUDA_ERROR_INVALID_VALUE, call, "attributes %zu: srcAccessOrder %d, from copy %zu on", i,
                          attributes[i].srcAccessOrder, first[i]);
    if ((uintptr_t)stream <= 1) return refuse(CUDA_ERROR_INVALID_HANDLE, call, "the legacy null stream takes no batches");
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyBatchAsync_v2(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t count,
                                   const CUmemcpyAttributes *attributes, const size_t *first, size_t groups, CUstream stream) {
    ENTER(NEED_CONTEXT);
    CUresult wrong = check_batch(__func__, count, attributes, first, groups, stream);
    if (wrong) return wrong;
    Copy *copies = malloc(count * sizeof *copies);
    for (size_t i = 0; i < count; i++) {
        copies[i] = (Copy){to[i], from[i], sizes[i]};
        if (sizes[i]) continue;
        free(copies);
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "copy %zu has no bytes", i);
    }
    wrong = copy_later(__func__, stream, copies, count, EITHER, EITHER, false);
    if (!wrong) __atomic_fetch_add(&work.batches, 1, __ATOMIC_RELAXED);
    return wrong;
}

/* The form of CUDA 12.8, for those who ask for it. */
API CUresult cuMemcpyBatchAsync(const CUdeviceptr *to, const CUdeviceptr *from, const size_t *sizes, size_t count,
                                const CUmemcpyAttributes *attributes, const size_t *first, size_t groups, size_t *failed,
                                CUstream stream) {
    if (is_stream(failed)) forbid(__func__, "called in the form of CUDA 13.0: in that of 12.8 the eighth argument is no stream");
    CUresult result = cuMemcpyBatchAsync_v2(to, from, sizes, count, attributes, first, groups, stream);
    if (failed) *failed = SIZE_MAX; /* no copy in particular */
    return result;
}

/* A memset returns before it is done, on whatever stream. */
static CUresult fill(const char *call, CUstream handle, CUdeviceptr to, uint32_t value, unsigned width, size_t count, bool sync) {
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(call, handle, &stream);
    if (!result && to % width) result = refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx is no multiple of %u", to, width);
    if (!result) result = check(call, DEVICE, to, count * width);
    if (!result && count) {
        uint64_t number = enqueue(stream, (Item){.kind = FILL, .fill = {to, count * width, value, width}});
        if (sync && syncs_memops(to)) result = await(stream, number);
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    ENTER(NEED_CONTEXT);
    return fill(__func__, NULL, to, value, 1, count, true);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    ENTER(NEED_CONTEXT);
    return fill(__func__, stream, to, value, 1, count, false);
}

API CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count) {
    ENTER(NEED_CONTEXT);
    return fill(__func__, NULL, to, value, 4, count, true);
}

API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    ENTER(NEED_CONTEXT);
    return fill(__func__, stream, to, value, 4, count, false);
}

API CUresult cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER(NEED_CONTEXT);
    if (target != 0 || (scope != 100 && scope != 200))
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "target %d, scope %d", target, scope);
    return CUDA_SUCCESS;
}
