/* A fake CUDA driver that launches nothing: it writes every call to standard output, and fails as FAKE_FAILURE says:
   "cuLaunchKernelEx=1" makes that call return 1; "fault=700" makes every call after a launch that waits return 700;
   "thread" is a thread without a context. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef struct {
  unsigned grid[3], block[3], smem;
  void *stream;
  struct { int id; char pad[4]; unsigned value[16]; } *attrs;
  unsigned count;
} Config;

static int launched, entered;

static CUresult outcome(const char *name, int waits) {
  const char *plan = getenv("FAKE_FAILURE");
  if (!plan) return 0;
  const char *equals = strchr(plan, '=');
  if (!strncmp(plan, name, equals - plan) && strlen(name) == (size_t)(equals - plan)) return atoi(equals + 1);
  return waits && launched && !strncmp(plan, "fault", 5) ? atoi(equals + 1) : 0;
}

#define SAID(name, waits, ...) (printf(name " " __VA_ARGS__), printf("\n"), fflush(stdout), outcome(name, waits))

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuGetErrorName(int code, const char **text) {
  *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
CUresult cuGetErrorString(int code, const char **text) {
  *text = code == 700 ? "an illegal memory access was encountered" : "invalid argument";
  return 0;
}
CUresult cuCtxSynchronize(void) { return SAID("cuCtxSynchronize", 1, ""); }
CUresult cuStreamSynchronize(void *stream) { return SAID("cuStreamSynchronize", 1, "%p", stream); }
CUresult cuModuleLoadData(void **module, const void *image) {
  *module = (void *)0x11;
  return SAID("cuModuleLoadData", 0, "%.4s", (const char *)image + ((const char *)image)[0] % 2);
}
CUresult cuModuleUnload(void *module) { return SAID("cuModuleUnload", 0, "%p", module); }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)0x22;
  return SAID("cuModuleGetFunction", 0, "%p %s", module, name);
}
CUresult cuFuncSetAttribute(void *function, int attribute, int value) {
  return SAID("cuFuncSetAttribute", 0, "%p %d %d", function, attribute, value);
}
CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                                const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                                int swizzle, int promotion, int fill) {
  memset(map, 0x5A, 128);
  return SAID("cuTensorMapEncodeTiled", 0, "aligned=%d type=%d rank=%u dims=%lu,%lu stride=%lu box=%u,%u steps=%u,%u swizzle=%d",
              (uintptr_t)map % 64 == 0, type, rank, dims[0], dims[1], strides[0], box[0], box[1], steps[0], steps[1],
              swizzle);
}
CUresult cuTensorMapReplaceAddress(void *map, void *address) {
  memcpy(map, &address, sizeof address);
  return SAID("cuTensorMapReplaceAddress", 0, "%p", address);
}
CUresult cuCtxGetCurrent(void **context) { *context = (void *)0x33; return 0; }
CUresult cuCtxSetCurrent(void *context) { entered = 1; return SAID("cuCtxSetCurrent", 0, "%p", context); }
CUresult cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
  const char *plan = getenv("FAKE_FAILURE");
  if (plan && !strcmp(plan, "thread") && !entered) return 201;
  launched = 1;
  printf("grid=%u,%u,%u block=%u,%u,%u smem=%u stream=%p attrs=%u", config->grid[0], config->grid[1], config->grid[2],
         config->block[0], config->block[1], config->block[2], config->smem, config->stream, config->count);
  if (config->count)
    printf(" id=%d cluster=%u,%u,%u", config->attrs[0].id, config->attrs[0].value[0], config->attrs[0].value[1],
           config->attrs[0].value[2]);
  printf(" first=%016lx\n", *(uint64_t *)params[0]);
  return SAID("cuLaunchKernelEx", 0, "%p", function);
}
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *found) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (!*function) {
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = self ? dlsym(self, symbol) : NULL;
  }
  if (found) *found = *function ? 0 : 1;
  return *function ? 0 : 500;
}
CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
