/* How callers find the functions, and those that UCX links to but that nothing here provides. */
#define _GNU_SOURCE
#include "standin.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

API CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    Dl_info self;
    char newer[128];
    *found = NULL;
    void *library = dladdr(&world, &self) ? dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : NULL;
    if (!strcmp(name, "cuMemcpyBatchAsync") && settings()->driver_version < 13000) library = NULL;
    if (library) {
        snprintf(newer, sizeof newer, "%s_v2", name);
        *found = dlsym(library, newer);
        if (!*found) *found = dlsym(library, name);
        dlclose(library);
    }
    if (status) *status = *found ? 0 : 1;
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

#define NOT_PROVIDED(name) \
    API CUresult name(void) { return refuse(CUDA_ERROR_NOT_SUPPORTED, __func__, "the stand-in has no memory pools"); }
NOT_PROVIDED(cuMemPoolDestroy)
NOT_PROVIDED(cuMemPoolExportPointer)
NOT_PROVIDED(cuMemPoolExportToShareableHandle)
NOT_PROVIDED(cuMemPoolImportFromShareableHandle)
NOT_PROVIDED(cuMemPoolImportPointer)
NOT_PROVIDED(cuMemPoolSetAccess)
