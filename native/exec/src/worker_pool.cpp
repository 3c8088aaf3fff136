#include "worker_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace freetoken::exec {
namespace {

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Polls `ready` until it holds or `limit` has passed; the clock is read every 32 polls.
template <class Ready>
bool spin_until(std::chrono::nanoseconds limit, Ready ready) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

cpu_set_t single(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpu), &set);
  return set;
}

// The kernel's struct sched_attr: its own header clashes with the <sched.h> of older C libraries.
struct SchedulingAttributes {
  std::uint32_t size = sizeof(SchedulingAttributes);
  std::uint32_t policy = 0;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime_ns = 0;
  std::uint64_t deadline_ns = 0;
  std::uint64_t period_ns = 0;
};

// Asks for the shortest slice (0.1 ms) for the calling thread, if its policy is the normal one. Its
// share of the cpu stays what it was, but when it wakes up within that share it is run at once
// instead of at the next tick: the thread that waited for a held up one then runs together with it.
// Linux before 6.12 ignores the wish. Two workers beside two pinned busy loops, jobs of 8 tiles
// that do not wait for memory, median share of the undisturbed speed in each of several runs:
// 0.46 to 0.50 with a slice of 0.1 ms, 0.40 with the default, 0.35 with 10 ms. One busy loop: 0.49
// to 0.52 and 0.42 to 0.43. Tiles bound by memory: 0.49 with either.
void ask_for_short_slices() {
  constexpr std::uint64_t kSliceNs = 100'000;
  SchedulingAttributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.size = sizeof attributes;
  attributes.flags = 0;
  attributes.runtime_ns = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// Once for each thread that calls: its wish stays, as it changes no share.
void settle_thread() {
  thread_local const bool asked = [] {
    ask_for_short_slices();
    return true;
  }();
  static_cast<void>(asked);
}

std::uint32_t next_of(std::uint64_t claim) { return static_cast<std::uint32_t>(claim); }
std::uint32_t tiles_of(std::uint64_t claim) { return static_cast<std::uint32_t>(claim >> 32); }
bool has_tiles(std::uint64_t claim) { return next_of(claim) < tiles_of(claim); }

}  // namespace

WorkerPool::WorkerPool(std::vector<int> cpus, std::chrono::nanoseconds spin)
    : cpus_(std::move(cpus)), spin_(spin) {
  if (cpus_.empty()) throw std::invalid_argument("an executor needs at least one cpu");
  if (cpus_.size() > 1024) throw std::invalid_argument("an executor takes at most 1024 cpus");
  for (const int cpu : cpus_) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) {
      throw std::invalid_argument("cpu number " + std::to_string(cpu) + " is out of range");
    }
  }
  threads_.reserve(cpus_.size() - 1);
  try {
    for (int worker = 1; worker < workers_count(); ++worker) start(worker);
  } catch (...) {
    stop_threads();
    throw;
  }
}

WorkerPool::~WorkerPool() { stop_threads(); }

void WorkerPool::start(int worker) {
  threads_.emplace_back([this, worker] { worker_main(worker); });
  const cpu_set_t set = single(cpus_[static_cast<std::size_t>(worker)]);
  // A cpu outside the allowed set (a cgroup changed meanwhile) leaves the worker unpinned:
  // slower placement, same results.
  pthread_setaffinity_np(threads_.back().native_handle(), sizeof set, &set);
}

void WorkerPool::stop_threads() {
  stop_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void WorkerPool::run_tiles(std::size_t tiles, Tile tile, const void* context) {
  if (tiles > kMaxTiles) throw std::length_error("too many tiles in one job");
  if (tiles == 1 || threads_.empty()) {
    for (std::uint32_t i = 0; i < tiles; ++i) tile(context, i, 0);
    return;
  }
  if (tiles == 0) return;
  settle_thread();
  settle_caller();
  tile_ = tile;
  context_ = context;
  unfinished_.store(static_cast<std::uint32_t>(tiles), std::memory_order_relaxed);
  claim_.store(static_cast<std::uint64_t>(tiles) << 32);
  if (sleepers_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  work(0);
  wait_for_stragglers();
}

bool WorkerPool::work(int worker) {
  bool any = false;
  std::uint64_t claim = claim_.load(std::memory_order_acquire);
  while (has_tiles(claim)) {
    if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      continue;
    }
    tile_(context_, next_of(claim), worker);
    finish_tile();
    any = true;
    claim = claim_.load(std::memory_order_acquire);
  }
  return any;
}

void WorkerPool::finish_tile() {
  if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) unfinished_.notify_all();
}

void WorkerPool::wait_for_stragglers() {
  const auto done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
  if (spin_until(spin_, done)) return;
  caller_sleeps_.store(true);
  for (auto left = unfinished_.load(); left != 0; left = unfinished_.load()) {
    unfinished_.wait(left);
  }
  caller_sleeps_.store(false);
}

void WorkerPool::worker_main(int worker) {
  settle_thread();
  const auto called = [this] {
    return has_tiles(claim_.load(std::memory_order_acquire)) ||
           stop_.load(std::memory_order_relaxed);
  };
  while (!stop_.load()) {
    if (work(worker) || spin_until(spin_, called)) continue;
    const std::uint32_t seen = wake_.load();
    sleepers_.fetch_add(1);
    // Published work is seen here, or the publisher sees this sleeper: both sides use the single
    // total order of sequentially consistent operations.
    if (!has_tiles(claim_.load()) && !stop_.load()) wake_.wait(seen);
    sleepers_.fetch_sub(1);
  }
}

// A caller that happens to run on a worker's cpu would take turns with it. One forced migration
// to its own cpu costs microseconds; the affinity is restored at once.
void WorkerPool::settle_caller() const {
  const int here = sched_getcpu();
  if (here == cpus_[0] || std::find(cpus_.begin(), cpus_.end(), here) == cpus_.end()) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const cpu_set_t own = single(cpus_[0]);
  if (!CPU_ISSET(static_cast<unsigned>(cpus_[0]), &allowed)) return;
  if (sched_setaffinity(0, sizeof own, &own) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
}

}  // namespace freetoken::exec
