// The part of a captured step that the CPU computes: experts of one MoE layer, at addresses that
// never change. A GPU starts it from within a stream, in one of two ways that a graph can hold:
//
//   host function   the driver calls `CpuTask::host_function` and the stream waits for its return
//   doorbell        the stream writes a layer and then the next number into `ring`, and waits for
//                   that number in `done`; a thread here watches while a step is under way
//
// Neither allocates, throws or calls the driver. What went wrong is kept and told after the step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "program.h"

namespace freetoken::exec {

// Pinned memory that the GPU reads and writes; one set serves all layers, which follow each other.
struct CpuBranchBuffers {
  const Bf16* x;               // [tokens_capacity][hidden]
  const std::int32_t* ids;     // [tokens_capacity][top_k], -1 where the GPU computes
  const float* weights;        // [tokens_capacity][top_k]
  const std::int32_t* tokens;  // [1] how many rows count
  float* y;                    // [tokens_capacity][top_k][hidden]; rows of -1 are left as they are
  std::size_t tokens_capacity, top_k;
};

// Words that GPU and CPU watch, in a cache line each. The stream writes ring[1], a MoE layer,
// before ring[0], a number other than the one before; it is answered in done[0] when the layer's y
// is there. The numbers are counted by the GPU, so that the same graph can ring again and again.
struct Doorbells {
  std::uint32_t* ring;  // [2], written by the stream alone
  std::uint32_t* done;  // [1], written here alone
};

class CpuBranch {
 public:
  // `executor` must outlive this, as must the buffers and the bank. `doorbells.ring` null: host
  // functions only.
  CpuBranch(Executor& executor, const ExpertBank& bank, const CpuBranchBuffers& buffers,
            const Doorbells& doorbells);
  ~CpuBranch();
  CpuBranch(const CpuBranch&) = delete;
  CpuBranch& operator=(const CpuBranch&) = delete;

  using HostFunction = void (*)(void*);
  // What the driver is to call, and with what, for a layer. Both hold as long as this lives.
  [[nodiscard]] static HostFunction host_function() { return &run_task; }
  [[nodiscard]] void* task(std::size_t moe_layer_index);

  // Watch the doorbell from now on, and no more; either as often as wanted. What rings in between
  // is answered after the next `begin_step`.
  void begin_step();
  void end_step();

  // The first failure since the last call, empty if there was none; its layer's y is not valid.
  [[nodiscard]] std::string take_fault();
  // (token, expert) pairs so far.
  [[nodiscard]] std::uint64_t executions_count() const { return executions_count_.load(); }
  // Time spent computing, from a steady clock, and calls.
  [[nodiscard]] double busy_s() const;
  [[nodiscard]] std::uint64_t calls_count() const { return calls_count_.load(); }

 private:
  struct Task {
    CpuBranch* branch;
    std::size_t moe_layer_index;
  };

  static void run_task(void* task) noexcept;
  void run(std::size_t moe_layer_index) noexcept;
  void compute(std::size_t moe_layer_index);
  void keep_fault(std::size_t moe_layer_index, const char* what) noexcept;
  void watch();
  void answer();

  Executor& executor_;
  const ExpertBank bank_;
  const CpuBranchBuffers buffers_;
  const Doorbells doorbells_;
  std::vector<Task> tasks_;
  std::atomic<std::uint64_t> executions_count_{0};
  std::atomic<std::uint64_t> calls_count_{0};
  std::atomic<std::int64_t> busy_ns_{0};
  std::mutex fault_mutex_;
  std::string fault_;
  // The watching thread sleeps between steps and spins during one.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> in_step_{false};
  std::uint32_t answered_ = 0;  // the watching thread's
  bool stop_ = false;
  std::thread watcher_;
};

}  // namespace freetoken::exec
