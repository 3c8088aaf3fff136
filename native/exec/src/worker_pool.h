// Persistent worker threads that share the tiles of one job at a time.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace freetoken::exec {

// The calling thread is worker 0; worker i > 0 is pinned to cpus[i]. Tiles are claimed one by one
// from a shared counter, so a worker that the scheduler does not run holds up nothing but the tile
// it had already begun. Idle workers spin for `spin`, then sleep in the kernel. Workers, and every
// thread that calls run(), ask the scheduler for short time slices, which helps them beside busy
// neighbours and changes nobody's share.
//
// run() may be called by one thread at a time; the owner checks that.
class WorkerPool {
 public:
  using Tile = void (*)(const void* context, std::uint32_t tile, int worker);

  WorkerPool(std::vector<int> cpus, std::chrono::nanoseconds spin);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int workers_count() const { return static_cast<int>(cpus_.size()); }

  // Calls body(tile, worker) for every tile in [0, tiles); returns when all are done. The body
  // must not throw.
  template <class Body>
  void run(std::size_t tiles, const Body& body) {
    static_assert(std::is_nothrow_invocable_v<const Body&, std::uint32_t, int>);
    run_tiles(
        tiles,
        [](const void* context, std::uint32_t tile, int worker) {
          (*static_cast<const Body*>(context))(tile, worker);
        },
        &body);
  }

  static constexpr std::size_t kMaxTiles = (std::size_t{1} << 31) - 1;

 private:
  void run_tiles(std::size_t tiles, Tile tile, const void* context);
  // Claims and runs tiles until none is left. True if at least one was run.
  bool work(int worker);
  void finish_tile();
  void start(int worker);
  void stop_threads();
  void worker_main(int worker);
  void wait_for_stragglers();
  void settle_caller() const;

  std::vector<int> cpus_;
  std::chrono::nanoseconds spin_;

  // Upper half: tiles of the job; lower half: next unclaimed tile. A successful compare-exchange
  // claims a tile of the job that is current at that moment, and keeps that job current.
  alignas(128) std::atomic<std::uint64_t> claim_{0};
  alignas(128) std::atomic<std::uint32_t> unfinished_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(128) std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<std::uint32_t> wake_{0};
  std::atomic<bool> stop_{false};
  // The current job; written before claim_ publishes it, read after a claim.
  alignas(128) Tile tile_ = nullptr;
  const void* context_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace freetoken::exec
