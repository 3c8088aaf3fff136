/* Device, virtual memory, copies and host registration. Device memory is ordinary shared memory at
 * the reserved addresses, so that copies move real bytes and a touch of released memory faults.
 *
 * The script comes through the fakeCuda functions, from the process that loaded the library. */
#define _GNU_SOURCE
#include "fake_libcuda.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MOST = 4096, LOG_BYTES = 1 << 20 };

typedef struct {
  char* memory; /* NULL: no such allocation */
  size_t size;
  int references, mappings;
} Allocation;

typedef struct {
  CUdeviceptr address;
  size_t size;
  int allocation; /* of mappings */
  int access;     /* of mappings */
} Range;

typedef struct {
  char call[64];
  int countdown, times;
  CUresult result;
} Failure;

static Allocation allocations[MOST];
static Range reserved[MOST], mapped[MOST], registered[MOST];
static int reserved_count, mapped_count, registered_count;
static Failure failures[16];
static int failures_count;
static size_t total_bytes, foreign_bytes, register_limit_bytes;
static CUresult poison;
static int initialised, context_retained;
static _Thread_local int context_current;
static char log_text[LOG_BYTES];
static size_t log_used;

static void write_log(const char* format, va_list arguments) {
  const size_t left = LOG_BYTES - log_used;
  const int written = vsnprintf(log_text + log_used, left, format, arguments);
  if (written > 0) log_used += (size_t)written < left ? (size_t)written : left - 1;
}

static void write_words(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_log(format, arguments);
  va_end(arguments);
}

CUresult enter(const char* call, const char* format, ...) {
  write_words("%s%s ", log_used ? "\n" : "", call);
  va_list arguments;
  va_start(arguments, format);
  write_log(format, arguments);
  va_end(arguments);
  if (poison != CUDA_SUCCESS) return poison;
  for (int i = 0; i < failures_count; ++i) {
    Failure* failure = &failures[i];
    if (strcmp(failure->call, call) != 0 || failure->times == 0) continue;
    if (--failure->countdown > 0) continue;
    --failure->times;
    return failure->result;
  }
  return CUDA_SUCCESS;
}

CUresult refuse(CUresult result) {
  write_words(" -> %d", result);
  return result;
}

/* ---- the script -------------------------------------------------------------------------- */

EXPORT void fakeCudaReset(size_t memory_bytes) {
  for (int i = 0; i < MOST; ++i) {
    if (allocations[i].memory != NULL) munmap(allocations[i].memory, allocations[i].size);
  }
  for (int i = 0; i < reserved_count; ++i) munmap((void*)reserved[i].address, reserved[i].size);
  memset(allocations, 0, sizeof allocations);
  reserved_count = mapped_count = registered_count = failures_count = 0;
  total_bytes = memory_bytes;
  foreign_bytes = 0;
  register_limit_bytes = SIZE_MAX;
  poison = CUDA_SUCCESS;
  log_used = 0;
  log_text[0] = 0;
  reset_streams();
}

/* The `nth` call of this name from now on, and the `times` - 1 after it, return `result`. */
EXPORT void fakeCudaFail(const char* call, int nth, int times, CUresult result) {
  if (failures_count == (int)(sizeof failures / sizeof *failures)) abort();
  Failure* failure = &failures[failures_count++];
  snprintf(failure->call, sizeof failure->call, "%s", call);
  failure->countdown = nth;
  failure->times = times;
  failure->result = result;
}

EXPORT void fakeCudaForgetFailures(void) { failures_count = 0; }
/* From now on everything returns `result`, as after a fault of a kernel. */
EXPORT void fakeCudaPoison(CUresult result) { poison = result; }
/* What other programs hold of the device. */
EXPORT void fakeCudaSetForeignBytes(size_t bytes) { foreign_bytes = bytes; }
/* The most host memory that can be registered. */
EXPORT void fakeCudaSetRegisterLimit(size_t bytes) { register_limit_bytes = bytes; }
EXPORT const char* fakeCudaLog(void) { return log_text; }
EXPORT void fakeCudaClearLog(void) {
  log_used = 0;
  log_text[0] = 0;
}

EXPORT size_t fakeCudaUsedBytes(void) {
  size_t used = 0;
  for (int i = 0; i < MOST; ++i) used += allocations[i].memory != NULL ? allocations[i].size : 0;
  return used;
}

EXPORT size_t fakeCudaRegisteredBytes(void) {
  size_t bytes = 0;
  for (int i = 0; i < registered_count; ++i) bytes += registered[i].size;
  return bytes;
}

/* ---- library and device ------------------------------------------------------------------ */

EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                    uint64_t flags, int* status) {
  (void)version, (void)flags;
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", symbol);
  *function = dlsym(RTLD_DEFAULT, newer);
  if (*function == NULL) *function = dlsym(RTLD_DEFAULT, symbol);
  if (status != NULL) *status = *function == NULL ? 1 : 0;
  return *function == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_A_FAKE";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the fake driver";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags) {
  ENTER("%u", flags);
  initialised = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(int* device, int ordinal) {
  ENTER("%d", ordinal);
  if (!initialised) return refuse(CUDA_ERROR_NOT_INITIALIZED);
  if (ordinal != 0) return refuse(CUDA_ERROR_INVALID_DEVICE);
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER("%d %d", attribute, device);
  *value = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void** context, int device) {
  ENTER("%d", device);
  *context = &context_retained;
  ++context_retained;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER("%d", device);
  if (context_retained == 0) return refuse(CUDA_ERROR_INVALID_CONTEXT);
  --context_retained;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(void* context) {
  ENTER("%d", context != NULL);
  context_current = context != NULL;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* all_bytes) {
  ENTER(".");
  if (!context_current) return refuse(CUDA_ERROR_INVALID_CONTEXT);
  const size_t used = fakeCudaUsedBytes() + foreign_bytes;
  *free_bytes = used < total_bytes ? total_bytes - used : 0;
  *all_bytes = total_bytes;
  return CUDA_SUCCESS;
}

/* ---- virtual memory ----------------------------------------------------------------------- */

typedef struct {
  int type, handle_types, location_type, device;
} AllocationProperties; /* the first fields of CUmemAllocationProp */

typedef struct {
  int location_type, device, flags;
} AccessDescription; /* CUmemAccessDesc */

static int whole(uint64_t value) { return value % GRANULARITY == 0; }

static int on_device(const AllocationProperties* properties) {
  return properties->type == 1 && properties->location_type == 1 && properties->device == 0;
}

static Range* find(Range* ranges, int count, CUdeviceptr address) {
  for (int i = 0; i < count; ++i) {
    if (address >= ranges[i].address && address < ranges[i].address + ranges[i].size) {
      return &ranges[i];
    }
  }
  return NULL;
}

static int overlaps(Range* ranges, int count, CUdeviceptr address, size_t size) {
  for (int i = 0; i < count; ++i) {
    if (address < ranges[i].address + ranges[i].size && ranges[i].address < address + size) {
      return 1;
    }
  }
  return 0;
}

static Allocation* allocation_of(uint64_t handle) {
  if (handle == 0 || handle > MOST) return NULL;
  Allocation* found = &allocations[handle - 1];
  return found->memory != NULL && found->references > 0 ? found : NULL;
}

static void free_unused(Allocation* allocation) {
  if (allocation->references > 0 || allocation->mappings > 0) return;
  munmap(allocation->memory, allocation->size);
  allocation->memory = NULL;
}

static void make_untouchable(CUdeviceptr address, size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap((void*)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED) abort();
}

int accessible(CUdeviceptr address, size_t size) {
  for (size_t at = 0; at < size;) {
    const Range* range = find(mapped, mapped_count, address + at);
    if (range == NULL || !range->access) return 0;
    at = range->address + range->size - address;
  }
  return 1;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const AllocationProperties* properties,
                                              int option) {
  ENTER("%d", option);
  if (!on_device(properties)) return refuse(CUDA_ERROR_INVALID_VALUE);
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment,
                                    CUdeviceptr wanted, uint64_t flags) {
  ENTER("%zu", size);
  if (size == 0 || !whole(size) || !whole(alignment) || wanted != 0 || flags != 0 ||
      reserved_count == MOST) {
    return refuse(CUDA_ERROR_INVALID_VALUE);
  }
  const size_t step = alignment == 0 ? GRANULARITY : alignment;
  char* memory =
      mmap(NULL, size + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  const size_t before = (step - (uintptr_t)memory % step) % step;
  if (before > 0) munmap(memory, before);
  if (step > before) munmap(memory + before + size, step - before);
  *address = (CUdeviceptr)(memory + before);
  reserved[reserved_count++] = (Range){.address = *address, .size = size};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  ENTER("%zu", size);
  Range* range = find(reserved, reserved_count, address);
  if (range == NULL || range->address != address || range->size != size ||
      overlaps(mapped, mapped_count, address, size)) {
    return refuse(CUDA_ERROR_INVALID_VALUE);
  }
  munmap((void*)address, size);
  *range = reserved[--reserved_count];
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(uint64_t* handle, size_t size, const AllocationProperties* properties,
                            uint64_t flags) {
  ENTER("%zu", size);
  if (size == 0 || !whole(size) || !on_device(properties) || flags != 0) {
    return refuse(CUDA_ERROR_INVALID_VALUE);
  }
  if (fakeCudaUsedBytes() + foreign_bytes + size > total_bytes) {
    return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  }
  int index = 0;
  while (index < MOST && allocations[index].memory != NULL) ++index;
  if (index == MOST) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  char* memory =
      mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  allocations[index] = (Allocation){.memory = memory, .size = size, .references = 1};
  *handle = (uint64_t)index + 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(uint64_t handle) {
  ENTER("%llu", (unsigned long long)handle);
  Allocation* allocation = allocation_of(handle);
  if (allocation == NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  --allocation->references;
  free_unused(allocation);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle,
                         uint64_t flags) {
  ENTER("%zu", size);
  Allocation* allocation = allocation_of(handle);
  const Range* space = find(reserved, reserved_count, address);
  if (allocation == NULL || space == NULL || flags != 0 || offset != 0 || !whole(address) ||
      size != allocation->size || address + size > space->address + space->size ||
      overlaps(mapped, mapped_count, address, size) || mapped_count == MOST) {
    return refuse(CUDA_ERROR_INVALID_VALUE);
  }
  /* An old size of 0 makes a second mapping of shared memory. */
  if (mremap(allocation->memory, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, (void*)address) ==
          MAP_FAILED ||
      mprotect((void*)address, size, PROT_NONE) != 0) {
    return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  }
  ++allocation->mappings;
  mapped[mapped_count++] = (Range){.address = address, .size = size, .allocation = (int)handle - 1};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const AccessDescription* access,
                               size_t count) {
  ENTER("%zu", size);
  if (count != 1 || access->location_type != 1 || access->device != 0 || access->flags != 3) {
    return refuse(CUDA_ERROR_INVALID_VALUE);
  }
  for (size_t at = 0; at < size;) { /* whole mappings, without a gap */
    const Range* range = find(mapped, mapped_count, address + at);
    if (range == NULL || range->address != address + at || at + range->size > size) {
      return refuse(CUDA_ERROR_INVALID_VALUE);
    }
    at += range->size;
  }
  for (size_t at = 0; at < size;) {
    Range* range = find(mapped, mapped_count, address + at);
    range->access = 1;
    at += range->size;
  }
  return mprotect((void*)address, size, PROT_READ | PROT_WRITE) == 0
             ? CUDA_SUCCESS
             : refuse(CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  ENTER("%zu", size);
  Range* range = find(mapped, mapped_count, address);
  if (range == NULL || range->address != address || range->size != size) {
    return refuse(CUDA_ERROR_INVALID_VALUE);
  }
  make_untouchable(address, size);
  Allocation* allocation = &allocations[range->allocation];
  *range = mapped[--mapped_count];
  --allocation->mappings;
  free_unused(allocation);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRetainAllocationHandle(uint64_t* handle, void* address) {
  ENTER(".");
  const Range* range = find(mapped, mapped_count, (CUdeviceptr)address);
  if (range == NULL) return refuse(CUDA_ERROR_INVALID_VALUE);
  ++allocations[range->allocation].references;
  *handle = (uint64_t)range->allocation + 1;
  return CUDA_SUCCESS;
}

/* ---- copies that wait, and host memory ---------------------------------------------------- */

EXPORT CUresult cuMemcpyDtoH_v2(void* host, CUdeviceptr device, size_t size) {
  ENTER("%zu", size);
  if (capture_running()) {
    invalidate_captures();
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  if (!context_current) return refuse(CUDA_ERROR_INVALID_CONTEXT);
  if (!accessible(device, size)) return refuse(CUDA_ERROR_INVALID_VALUE);
  memcpy(host, (const void*)device, size);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) {
  ENTER("%zu %u", size, flags);
  if (size == 0) return refuse(CUDA_ERROR_INVALID_VALUE);
  if (overlaps(registered, registered_count, (CUdeviceptr)memory, size)) {
    return refuse(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  }
  if (registered_count == MOST || size > register_limit_bytes ||
      fakeCudaRegisteredBytes() > register_limit_bytes - size) {
    return refuse(CUDA_ERROR_OUT_OF_MEMORY);
  }
  registered[registered_count++] = (Range){.address = (CUdeviceptr)memory, .size = size};
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void* memory) {
  ENTER(".");
  Range* range = find(registered, registered_count, (CUdeviceptr)memory);
  if (range == NULL || range->address != (CUdeviceptr)memory) {
    return refuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  }
  *range = registered[--registered_count];
  return CUDA_SUCCESS;
}
