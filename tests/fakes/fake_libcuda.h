/* A stand-in for libcuda.so.1 that keeps the driver's rules and can be told to break: what the
 * two source files share. Types are spelled out so that no CUDA header is needed. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
};

#define EXPORT __attribute__((visibility("default")))
#define GRANULARITY ((size_t)2 << 20)

/* Writes the call into the log; the result that the script wants of it, or CUDA_SUCCESS. */
CUresult enter(const char* call, const char* format, ...) __attribute__((format(printf, 2, 3)));
/* Writes the refusal behind the last line of the log and returns it. */
CUresult refuse(CUresult result);
/* Whether every byte of the range is device memory that has access. */
int accessible(CUdeviceptr address, size_t size);
/* Forgets streams, events and graphs. */
void reset_streams(void);
/* Whether any stream is capturing: calls that wait for the device are then errors. */
int capture_running(void);
void invalidate_captures(void);

#define ENTER(...)                                          \
  do {                                                      \
    const CUresult scripted = enter(__func__, __VA_ARGS__); \
    if (scripted != CUDA_SUCCESS) return refuse(scripted);  \
  } while (0)
