// The worker pool: every tile exactly once, refusals, contention, and what it asks the kernel for.
#include "worker_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

namespace freetoken::exec {
namespace {

using namespace std::chrono_literals;

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<unsigned>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// `count` cpus out of the allowed ones, which may be fewer.
std::vector<int> some_cpus(std::size_t count) {
  const std::vector<int> allowed = allowed_cpus();
  std::vector<int> cpus;
  for (std::size_t i = 0; i < count; ++i) cpus.push_back(allowed[i % allowed.size()]);
  return cpus;
}

class WorkerPoolSpin : public testing::TestWithParam<std::chrono::nanoseconds> {};

TEST_P(WorkerPoolSpin, RunsEveryTileExactlyOnce) {
  WorkerPool pool(some_cpus(4), GetParam());
  std::vector<int> runs(257);
  std::atomic<bool> known_workers{true};
  for (std::size_t job = 0; job < 400; ++job) {
    const std::size_t tiles = job * 37 % runs.size();
    std::fill(runs.begin(), runs.end(), 0);
    pool.run(tiles, [&](std::uint32_t tile, int worker) noexcept {
      if (worker < 0 || worker >= pool.workers_count()) known_workers = false;
      ++runs[tile];
    });
    for (std::size_t i = 0; i < runs.size(); ++i) ASSERT_EQ(runs[i], i < tiles ? 1 : 0) << job;
    // Long enough for the workers to fall asleep, so that some jobs have to wake them.
    if (job % 50 == 0) std::this_thread::sleep_for(GetParam() + 200us);
  }
  EXPECT_TRUE(known_workers);
}

INSTANTIATE_TEST_SUITE_P(Spin, WorkerPoolSpin, testing::Values(0ns, 50us));

TEST(WorkerPool, ResultsOfOneJobAreSeenByTheNext) {
  WorkerPool pool(some_cpus(3), 50us);
  std::vector<std::uint64_t> values(64, 1);
  for (int job = 0; job < 500; ++job) {
    pool.run(values.size() / 2,
             [&](std::uint32_t tile, int) noexcept { values[2 * tile] += values[2 * tile + 1]; });
    pool.run(values.size() / 2, [&](std::uint32_t tile, int) noexcept {
      values[2 * tile + 1] = values[(2 * tile + 2) % values.size()];
    });
  }
  // All elements start equal and are treated alike, so they stay equal: an old value would show.
  for (const std::uint64_t value : values) EXPECT_EQ(value, values[1]);
}

// A tile that its worker cannot go on with delays the job, but the other tiles are done meanwhile.
TEST(WorkerPool, OtherWorkersTakeTheTilesOfAHeldUpOne) {
  WorkerPool pool(some_cpus(2), 50us);
  std::atomic<int> others{0};
  constexpr int kTiles = 32;
  pool.run(kTiles, [&](std::uint32_t tile, int) noexcept {
    if (tile != 0) {
      others.fetch_add(1);
      return;
    }
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (others.load() < kTiles - 1 && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    EXPECT_EQ(others.load(), kTiles - 1);
  });
  EXPECT_EQ(others.load(), kTiles - 1);
}

TEST(WorkerPool, FinishesBesideBusyLoopsOnEveryCpu) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> hogs;
  for (std::size_t i = 0; i < allowed_cpus().size(); ++i) {
    hogs.emplace_back([&stop] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  WorkerPool pool(some_cpus(4), 50us);
  std::atomic<std::uint64_t> sum{0};
  for (int job = 0; job < 50; ++job) {
    pool.run(16, [&](std::uint32_t tile, int) noexcept { sum += tile; });
  }
  stop = true;
  for (std::thread& hog : hogs) hog.join();
  EXPECT_EQ(sum.load(), 50U * 120U);
}

// Index 3 of the kernel's answer, in 8 bytes: sched_runtime, the slice under the normal policy.
std::uint64_t slice_ns() {
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t runtime_ns, deadline_ns, period_ns;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return 0;
  return attributes.runtime_ns;
}

TEST(WorkerPool, ThreadsHaveShortSlicesWhereTheKernelKnowsThem) {
  std::vector<std::uint64_t> slices(2, 0);
  std::uint64_t usual_ns = 0, after_ns = 0;
  std::thread caller([&] {  // a thread of its own: the wish stays with the caller
    usual_ns = slice_ns();
    WorkerPool pool(some_cpus(2), 50us);
    std::atomic<int> arrived{0};
    pool.run(2, [&](std::uint32_t, int worker) noexcept {
      slices[static_cast<std::size_t>(worker)] = slice_ns();
      arrived.fetch_add(1);
      while (arrived.load() < 2) std::this_thread::yield();  // one tile for each worker
    });
    after_ns = slice_ns();
  });
  caller.join();
  const std::uint64_t expected_ns = usual_ns == 0 ? 0 : 100'000;
  EXPECT_EQ(slices[0], expected_ns);
  EXPECT_EQ(slices[1], expected_ns);
  EXPECT_EQ(after_ns, expected_ns);
}

TEST(WorkerPool, LeavesTheCallersAffinityAlone) {
  cpu_set_t before, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  WorkerPool pool(some_cpus(2), 50us);
  for (int job = 0; job < 200; ++job) {
    pool.run(4, [](std::uint32_t, int) noexcept {});
  }
  ASSERT_EQ(sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(WorkerPool, RefusesImpossibleCpusAndJobs) {
  EXPECT_THROW(WorkerPool({}, 1us), std::invalid_argument);
  EXPECT_THROW(WorkerPool({0, -1}, 1us), std::invalid_argument);
  EXPECT_THROW(WorkerPool({0, 1 << 20}, 1us), std::invalid_argument);
  EXPECT_THROW(WorkerPool(std::vector<int>(2000, 0), 1us), std::invalid_argument);
  WorkerPool pool(some_cpus(2), 1us);
  EXPECT_THROW(pool.run(WorkerPool::kMaxTiles + 1, [](std::uint32_t, int) noexcept {}),
               std::length_error);
}

}  // namespace
}  // namespace freetoken::exec
