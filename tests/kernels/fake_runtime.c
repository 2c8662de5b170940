/* A GPU runtime in host memory: says what it was asked and copies at once.

   VERSION and DRIVER are what it says of itself (0: HIP). With CUDA_HEADER or HIP_HEADER
   the runtime's own header declares the functions, so that definitions with other
   arguments do not compile. BATCH 0: it has no batch; STATUS: what a batch answers. */

#include <stddef.h>
#include <string.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(PREFIX, name)

#define HEADER_HINTS(a) \
  (a->srcLocHint.type | a->srcLocHint.id | a->dstLocHint.type | a->dstLocHint.id)

#if defined CUDA_HEADER
#include <cuda_runtime_api.h>
typedef cudaError_t status_t;
typedef enum cudaMemcpyKind kind_t;
typedef cudaStream_t stream_t;
typedef struct cudaMemcpyAttributes attributes_t;
#define ORDER srcAccessOrder
#define HINTS HEADER_HINTS
#elif defined HIP_HEADER
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
typedef hipError_t status_t;
typedef hipMemcpyKind kind_t;
typedef hipStream_t stream_t;
typedef hipMemcpyAttributes attributes_t;
#define ORDER srcAccessOrder
#define HINTS HEADER_HINTS
#else
typedef int status_t;
typedef int kind_t;
typedef void *stream_t;
typedef struct {
  int ORDER;
  struct {
    int type, id;
  } src, dst;
  unsigned flags;
} attributes_t;
#define HINTS(a) (a->src.type | a->src.id | a->dst.type | a->dst.id)
#endif

#if FAIL_INDEX
typedef void **targets_t, **sources_t;
typedef size_t *sizes_t;
#else
typedef void *const *targets_t;
typedef const void *const *sources_t;
typedef const size_t *sizes_t;
#endif

typedef struct {
  size_t kind, count, stream, attributes, first, order, hints, flags;
} call_t;

call_t calls[64];
size_t made, forgotten;
/* Copies that go well before one fails, if any does. */
size_t good = (size_t)-1;

static status_t copy(void *target, const void *source, size_t nbytes) {
  if (good == 0) return 700;
  --good;
  memcpy(target, source, nbytes);
  return 0;
}

static call_t *log_call(size_t kind, size_t count, stream_t stream) {
  call_t *call = &calls[made++ % 64];
  memset(call, 0, sizeof *call);
  call->kind = kind, call->count = count, call->stream = (size_t)stream;
  return call;
}

status_t NAME(MemcpyAsync)(
    void *target, const void *source, size_t nbytes, kind_t kind, stream_t stream) {
  log_call((size_t)kind, 1, stream);
  return copy(target, source, nbytes);
}

#if BATCH
status_t NAME(MemcpyBatchAsync)(
    targets_t targets, sources_t sources, sizes_t sizes, size_t count,
    attributes_t *attributes, size_t *firsts, size_t attribute_count,
#if FAIL_INDEX
    size_t *failed,
#endif
    stream_t stream) {
  call_t *call = log_call(99, count, stream);
  call->attributes = attribute_count, call->first = firsts[0];
  if (attributes) {
    call->order = attributes->ORDER, call->flags = attributes->flags;
    call->hints = HINTS(attributes);
  }
  if (STATUS) return STATUS;
  for (size_t i = 0; i < count; ++i) {
    status_t status = copy(targets[i], sources[i], sizes[i]);
    if (status) {
#if FAIL_INDEX
      *failed = i;
#endif
      return status;
    }
  }
  return 0;
}
#endif

const char *NAME(GetErrorString)(status_t status) {
  return status == 700 ? "an illegal memory access was encountered" : NULL;
}

status_t NAME(GetLastError)(void) {
  ++forgotten;
  return 0;
}

status_t NAME(RuntimeGetVersion)(int *version) {
  *version = VERSION;
  return 0;
}

status_t NAME(DriverGetVersion)(int *version) {
  *version = DRIVER;
  return 0;
}
