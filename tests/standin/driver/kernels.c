/* Kernels. The stand-in runs no code of a GPU: it knows kvd_copy (kvd/cuda/copy.ptx) and does what that does. */
#define _GNU_SOURCE
#include "standin.h"
#include <string.h>

struct Module {
    bool copies;
};
typedef struct Module *CUmodule;
typedef struct Module *CUfunction;
static struct Module copying = {true};

API CUresult cuModuleLoadData(CUmodule *made, const char *text) {
    ENTER(NEED_CONTEXT);
    if (settings()->no_compiler) return refuse(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, __func__, "libnvidia-ptxjitcompiler is not there");
    if (!strstr(text, ".visible .entry kvd_copy(.param .u64 table)"))
        return refuse(CUDA_ERROR_INVALID_PTX, __func__, "the text is not that of kvd_copy");
    *made = &copying;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
    ENTER(NEED_CONTEXT);
    if (module != &copying || strcmp(name, "kvd_copy")) return refuse(CUDA_ERROR_NOT_FOUND, __func__, "%s is not in the module", name);
    *found = module;
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                            unsigned shared, CUstream handle, void **parameters, void **extra) {
    ENTER(NEED_CONTEXT);
    if (function != &copying) return refuse(CUDA_ERROR_INVALID_HANDLE, __func__, "%p is no function", (void *)function);
    if (!x || !y || y > 65535 || z != 1 || !threads || threads > 1024 || ty != 1 || tz != 1 || shared || !parameters || extra)
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "%u x %u x %u blocks of %u x %u x %u threads", x, y, z, threads, ty, tz);
    CUdeviceptr table;
    memcpy(&table, parameters[0], sizeof table); /* parameters are taken at the call, the table is read when it runs */
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(__func__, handle, &stream);
    if (!result) {
        enqueue(stream, (Item){.kind = LAUNCH, .launch = {table, x}});
        work.launches++;
    }
    pthread_mutex_unlock(&world);
    return result;
}
