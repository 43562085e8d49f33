/* How callers find the functions, and those that UCX links to but that nothing here provides. */
#define _GNU_SOURCE
#include "standin.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* For a caller who knows CUDA up to `version`. */
static void *look_up(void *library, const char *name, int version) {
    char newer[128];
    bool batch = !strcmp(name, "cuMemcpyBatchAsync"); /* the one function here whose older form is here, too */
    if (batch && version < 13000) return version < 12080 ? NULL : dlsym(library, name);
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *found = dlsym(library, newer);
    return found || batch ? found : dlsym(library, name);
}

/* A name that is not there is no error: `found` is NULL. */
API CUresult cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)flags;
    *found = NULL;
    if (version > (int)settings()->driver_version) return CUDA_ERROR_INVALID_VALUE;
    Dl_info self;
    void *library = dladdr(&world, &self) ? dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_LAZY) : NULL;
    if (!library) forbid(__func__, "the library does not find itself: %s", dlerror());
    *found = look_up(library, name, version);
    dlclose(library);
    if (status) *status = *found ? 0 : 1;
    return CUDA_SUCCESS;
}

#define NOT_PROVIDED(name) \
    API CUresult name(void) { return refuse(CUDA_ERROR_NOT_SUPPORTED, __func__, "the stand-in has no memory pools"); }
NOT_PROVIDED(cuMemPoolDestroy)
NOT_PROVIDED(cuMemPoolExportPointer)
NOT_PROVIDED(cuMemPoolExportToShareableHandle)
NOT_PROVIDED(cuMemPoolImportFromShareableHandle)
NOT_PROVIDED(cuMemPoolImportPointer)
NOT_PROVIDED(cuMemPoolSetAccess)
