/* A stand-in for libnvidia-ml.so.1. Everything it says stands in the file that the environment
 * variable FREETOKEN_FAKE_NVML names; the file is read anew at every call, so that whoever replaces
 * it changes the GPUs of all running processes at once. One statement a line:
 *
 *   driver 580.65.06
 *   gpu GPU-1 NVIDIA GeForce RTX 4090     a GPU, by its UUID and name; those below belong to it
 *   set total 25757220864                 total, used, reserved (bytes), link_generation,
 *                                         link_generation_max, link_width, link_width_max,
 *                                         clock_reasons (bits), lost (0 or 1)
 *   compute 4242 8000000000               a process by its pid, and its bytes
 *   graphics 777 500000000
 *   fail nvmlDeviceGetName 15 -1 7        the call returns 15; so many times (-1: always); a serial
 *                                         number that tells this statement from all others
 *   hang nvmlDeviceGetName 500            the call takes at most so many milliseconds longer: less
 *                                         once the statement is gone
 *
 * Memory adds up as the driver's does: the first version of its answer counts what is reserved as
 * used, the second does not, and in neither is it free. Types are spelled out so that no header of
 * the driver is needed. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_DRIVER_NOT_LOADED = 9,
  NVML_ERROR_GPU_IS_LOST = 15,
  NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};
enum { MOST_GPUS = 8, MOST_PROCESSES = 64, MOST_FAILURES = 64, MEMORY_V2 = 0x02000028 };

typedef int Result;

typedef struct {
  unsigned pid;
  unsigned long long bytes;
} Process;

typedef struct {
  Process of[MOST_PROCESSES];
  unsigned count;
} Processes;

typedef struct {
  char uuid[96], name[96];
  unsigned long long total, used, reserved, clock_reasons;
  unsigned link_generation, link_generation_max, link_width, link_width_max, lost;
  Processes compute, graphics;
} Gpu;

typedef struct {
  char driver[80];
  Gpu gpus[MOST_GPUS];
  unsigned gpus_count;
  Result result; /* what the script wants of the call that is being entered */
  long hang_ms;  /* how much longer it is to take */
} State;

typedef struct {
  unsigned long long total, free, used;
} MemoryV1;

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} MemoryV2;

typedef struct {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
} ProcessInfo;

static int initialised;
static char handles[MOST_GPUS]; /* a device is the address of one of these */
/* How often a counted failure has struck in this process. */
static struct {
  long long serial;
  int times;
} struck[MOST_FAILURES];

static Result fail_now(Result result, int times, long long serial) {
  if (times < 0) return result;
  for (int i = 0; i < MOST_FAILURES; ++i) {
    if (struck[i].serial != 0 && struck[i].serial != serial) continue;
    struck[i].serial = serial;
    if (struck[i].times == times) return NVML_SUCCESS;
    ++struck[i].times;
    return result;
  }
  abort();
}

static void set_number(Gpu* gpu, const char* key, unsigned long long number) {
  if (strcmp(key, "total") == 0) gpu->total = number;
  if (strcmp(key, "used") == 0) gpu->used = number;
  if (strcmp(key, "reserved") == 0) gpu->reserved = number;
  if (strcmp(key, "clock_reasons") == 0) gpu->clock_reasons = number;
  if (strcmp(key, "link_generation") == 0) gpu->link_generation = (unsigned)number;
  if (strcmp(key, "link_generation_max") == 0) gpu->link_generation_max = (unsigned)number;
  if (strcmp(key, "link_width") == 0) gpu->link_width = (unsigned)number;
  if (strcmp(key, "link_width_max") == 0) gpu->link_width_max = (unsigned)number;
  if (strcmp(key, "lost") == 0) gpu->lost = (unsigned)number;
}

static void add_process(Processes* processes, const char* text) {
  if (processes->count == MOST_PROCESSES) abort();
  Process* process = &processes->of[processes->count++];
  if (sscanf(text, "%u %llu", &process->pid, &process->bytes) != 2) abort();
}

static void read_gpu_line(State* state, const char* verb, const char* rest) {
  char key[64];
  unsigned long long number;
  if (strcmp(verb, "gpu") == 0) {
    if (state->gpus_count == MOST_GPUS) abort();
    Gpu* added = &state->gpus[state->gpus_count++];
    if (sscanf(rest, "%95s %95[^\n]", added->uuid, added->name) != 2) abort();
    return;
  }
  if (state->gpus_count == 0) abort();
  Gpu* gpu = &state->gpus[state->gpus_count - 1];
  if (strcmp(verb, "compute") == 0) add_process(&gpu->compute, rest);
  if (strcmp(verb, "graphics") == 0) add_process(&gpu->graphics, rest);
  if (strcmp(verb, "set") == 0 && sscanf(rest, "%63s %llu", key, &number) == 2) {
    set_number(gpu, key, number);
  }
}

/* The file as it is now, for this call. No file: the driver is not loaded. */
static State read_state(const char* call, int count_failures) {
  State state = {.result = NVML_SUCCESS};
  const char* path = getenv("FREETOKEN_FAKE_NVML");
  FILE* file = path == NULL ? NULL : fopen(path, "r");
  if (file == NULL) {
    state.result = NVML_ERROR_DRIVER_NOT_LOADED;
    return state;
  }
  char line[512], verb[64], name[64];
  while (fgets(line, sizeof line, file) != NULL) {
    int offset = 0, result = 0, times = 0;
    long long serial = 0;
    long hang_ms = 0;
    if (sscanf(line, "%63s %n", verb, &offset) != 1) continue;
    const char* rest = line + offset;
    if (strcmp(verb, "driver") == 0) {
      if (sscanf(rest, "%79s", state.driver) != 1) abort();
    } else if (strcmp(verb, "fail") == 0) {
      if (sscanf(rest, "%63s %d %d %lld", name, &result, &times, &serial) != 4) abort();
      if (count_failures && state.result == NVML_SUCCESS && strcmp(name, call) == 0) {
        state.result = fail_now(result, times, serial);
      }
    } else if (strcmp(verb, "hang") == 0) {
      if (sscanf(rest, "%63s %ld", name, &hang_ms) != 2) abort();
      if (strcmp(name, call) == 0) state.hang_ms = hang_ms;
    } else {
      read_gpu_line(&state, verb, rest);
    }
  }
  fclose(file);
  return state;
}

/* What every call begins with: waits as the script wants, then tells how things stand. */
static State enter(const char* call) {
  const struct timespec step = {.tv_nsec = 2 * 1000 * 1000};
  for (long waited_ms = 0; read_state(call, 0).hang_ms > waited_ms; waited_ms += 2) {
    nanosleep(&step, NULL);
  }
  return read_state(call, 1);
}

/* The GPU of a handle; NULL with `state->result` set. */
static Gpu* device(State* state, const void* handle) {
  if (state->result != NVML_SUCCESS) return NULL;
  const ptrdiff_t index = (const char*)handle - handles;
  if (index < 0 || index >= (ptrdiff_t)state->gpus_count) {
    state->result = NVML_ERROR_INVALID_ARGUMENT;
  } else if (state->gpus[index].lost) {
    state->result = NVML_ERROR_GPU_IS_LOST;
  } else {
    return &state->gpus[index];
  }
  return NULL;
}

#define ENTER                                            \
  if (initialised == 0) return NVML_ERROR_UNINITIALIZED; \
  State state = enter(__func__);                         \
  if (state.result != NVML_SUCCESS) return state.result
#define ENTER_DEVICE                       \
  ENTER;                                   \
  const Gpu* gpu = device(&state, handle); \
  if (gpu == NULL) return state.result

static Result give_text(char* out, unsigned size, const char* text) {
  if (strlen(text) >= size) return NVML_ERROR_INSUFFICIENT_SIZE;
  strcpy(out, text);
  return NVML_SUCCESS;
}

static Result give_number(unsigned* out, unsigned number) {
  *out = number;
  return NVML_SUCCESS;
}

static Result give_processes(const Processes* processes, unsigned* count, ProcessInfo* out) {
  const unsigned room = *count;
  *count = processes->count;
  if (room < processes->count) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < processes->count; ++i) {
    const Process* process = &processes->of[i];
    out[i] = (ProcessInfo){process->pid, process->bytes, UINT32_MAX, UINT32_MAX};
  }
  return NVML_SUCCESS;
}

/* ---- the library ------------------------------------------------------------------------- */

EXPORT Result nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  const State state = enter(__func__);
  if (state.result == NVML_SUCCESS) ++initialised;
  return state.result;
}

EXPORT Result nvmlShutdown(void) {
  ENTER;
  --initialised;
  return NVML_SUCCESS;
}

EXPORT const char* nvmlErrorString(Result result) {
  static char text[64];
  snprintf(text, sizeof text, "scripted error %d", result);
  return text;
}

EXPORT Result nvmlSystemGetDriverVersion(char* out, unsigned size) {
  ENTER;
  return give_text(out, size, state.driver);
}

EXPORT Result nvmlDeviceGetCount_v2(unsigned* out) {
  ENTER;
  return give_number(out, state.gpus_count);
}

EXPORT Result nvmlDeviceGetHandleByIndex_v2(unsigned index, void** out) {
  ENTER;
  if (index >= state.gpus_count) return NVML_ERROR_INVALID_ARGUMENT;
  if (state.gpus[index].lost) return NVML_ERROR_GPU_IS_LOST;
  *out = &handles[index];
  return NVML_SUCCESS;
}

EXPORT Result nvmlDeviceGetHandleByUUID(const char* uuid, void** out) {
  ENTER;
  for (unsigned i = 0; i < state.gpus_count; ++i) {
    if (strcmp(state.gpus[i].uuid, uuid) != 0) continue;
    if (state.gpus[i].lost) return NVML_ERROR_GPU_IS_LOST;
    *out = &handles[i];
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

EXPORT Result nvmlDeviceGetName(void* handle, char* out, unsigned size) {
  ENTER_DEVICE;
  return give_text(out, size, gpu->name);
}

EXPORT Result nvmlDeviceGetUUID(void* handle, char* out, unsigned size) {
  ENTER_DEVICE;
  return give_text(out, size, gpu->uuid);
}

EXPORT Result nvmlDeviceGetMemoryInfo(void* handle, MemoryV1* out) {
  ENTER_DEVICE;
  *out = (MemoryV1){
      .total = gpu->total,
      .free = gpu->total - gpu->used - gpu->reserved,
      .used = gpu->used + gpu->reserved,
  };
  return NVML_SUCCESS;
}

EXPORT Result nvmlDeviceGetMemoryInfo_v2(void* handle, MemoryV2* out) {
  ENTER_DEVICE;
  if (out->version != MEMORY_V2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
  out->total = gpu->total;
  out->reserved = gpu->reserved;
  out->free = gpu->total - gpu->used - gpu->reserved;
  out->used = gpu->used;
  return NVML_SUCCESS;
}

EXPORT Result nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count,
                                                      ProcessInfo* out) {
  ENTER_DEVICE;
  return give_processes(&gpu->compute, count, out);
}

EXPORT Result nvmlDeviceGetGraphicsRunningProcesses_v3(void* handle, unsigned* count,
                                                       ProcessInfo* out) {
  ENTER_DEVICE;
  return give_processes(&gpu->graphics, count, out);
}

EXPORT Result nvmlDeviceGetCurrPcieLinkGeneration(void* handle, unsigned* out) {
  ENTER_DEVICE;
  return give_number(out, gpu->link_generation);
}

EXPORT Result nvmlDeviceGetMaxPcieLinkGeneration(void* handle, unsigned* out) {
  ENTER_DEVICE;
  return give_number(out, gpu->link_generation_max);
}

EXPORT Result nvmlDeviceGetCurrPcieLinkWidth(void* handle, unsigned* out) {
  ENTER_DEVICE;
  return give_number(out, gpu->link_width);
}

EXPORT Result nvmlDeviceGetMaxPcieLinkWidth(void* handle, unsigned* out) {
  ENTER_DEVICE;
  return give_number(out, gpu->link_width_max);
}

EXPORT Result nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* out) {
  ENTER_DEVICE;
  *out = gpu->clock_reasons;
  return NVML_SUCCESS;
}
