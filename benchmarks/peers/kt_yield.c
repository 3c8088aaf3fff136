// Preloaded into kt-kernel's process, so that it can have as many workers as there are cores.
//
// Its idle workers spin on a clock for 50 ms, and its caller spins on an atomic: N workers need
// N + 1 cores, and on N cores every call costs scheduler ticks of 4 ms. With this library a worker
// that has been idle for 25 us sleeps 20 us at each look at the clock, so that the caller (made
// SCHED_IDLE) runs between calls. Work itself never looks at the clock. Costs at most 50 us a call.
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { kUnknown, kWorker, kOther };

static const int64_t kGapNs = 5000;    // a longer gap between looks: it has worked
static const int64_t kIdleNs = 25000;  // then it sleeps
static const int64_t kSleepNs = 20000;

static __thread int kind;
static __thread int64_t last_ns, idle_since_ns;

static int64_t realtime_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int kind_of_thread(void) {
  char name[16] = {0};
  prctl(PR_GET_NAME, name);
  if (strncmp(name, "numa_", 5) != 0) return kOther;
  prctl(PR_SET_TIMERSLACK, 1);
  return kWorker;
}

// std::chrono::system_clock::now()
int64_t _ZNSt6chrono3_V212system_clock3nowEv(void) {
  if (kind == kUnknown) kind = kind_of_thread();
  const int64_t now_ns = realtime_ns();
  if (kind != kWorker) return now_ns;
  if (now_ns - last_ns > kGapNs) idle_since_ns = now_ns;
  if (now_ns - idle_since_ns > kIdleNs) {
    const struct timespec pause = {0, kSleepNs};
    syscall(SYS_nanosleep, &pause, 0);
    last_ns = realtime_ns();
    return last_ns;
  }
  last_ns = now_ns;
  return now_ns;
}
