#include "cpu_branch.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>

#include "validate.h"

namespace freetoken::exec {
namespace {

// A step whose end nobody tells, as when a prompt is given up, costs no core for longer than this.
constexpr std::chrono::seconds kSpins{1};
constexpr std::chrono::milliseconds kNap{1};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

CpuBranch::CpuBranch(Executor& executor, const ExpertBank& bank, const CpuBranchBuffers& buffers,
                     const Doorbells& doorbells)
    : executor_(executor), bank_(bank), buffers_(buffers), doorbells_(doorbells) {
  require(bank.records != nullptr && bank.layers_count > 0, "a CPU branch needs a bank");
  require(buffers.x != nullptr && buffers.ids != nullptr && buffers.weights != nullptr &&
              buffers.tokens != nullptr && buffers.y != nullptr,
          "a CPU branch needs the addresses of all its buffers");
  require(buffers.tokens_capacity > 0 && buffers.top_k > 0, "a CPU branch needs rows");
  require((doorbells.ring == nullptr) == (doorbells.done == nullptr),
          "doorbells need words to ring and words to answer");
  for (std::size_t layer = 0; layer < bank.layers_count; ++layer) tasks_.push_back({this, layer});
  if (doorbells.ring == nullptr) return;
  answered_ = doorbells.ring[0];
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
  watcher_ = std::thread([this] { watch(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(watcher_.native_handle(), "ftk-doorbell");
}

CpuBranch::~CpuBranch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    in_step_.store(false);
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
}

void* CpuBranch::task(std::size_t moe_layer_index) {
  require(moe_layer_index < tasks_.size(), "experts: no such MoE layer");
  return &tasks_[moe_layer_index];
}

void CpuBranch::run_task(void* task) noexcept {
  const Task& one = *static_cast<const Task*>(task);
  one.branch->run(one.moe_layer_index);
}

void CpuBranch::run(std::size_t moe_layer_index) noexcept {
  const auto started = std::chrono::steady_clock::now();
  try {
    compute(moe_layer_index);
  } catch (const std::exception& error) {
    keep_fault(moe_layer_index, error.what());
  } catch (...) {
    keep_fault(moe_layer_index, "an unknown failure");
  }
  busy_ns_.fetch_add((std::chrono::steady_clock::now() - started).count());
  calls_count_.fetch_add(1);
}

void CpuBranch::compute(std::size_t moe_layer_index) {
  require(moe_layer_index < tasks_.size(), "experts: no such MoE layer");
  const std::int32_t tokens = *buffers_.tokens;
  require(tokens >= 0 && static_cast<std::size_t>(tokens) <= buffers_.tokens_capacity,
          "more tokens than the CPU branch has room for");
  const std::size_t pairs = static_cast<std::size_t>(tokens) * buffers_.top_k;
  const auto routed =
      std::count_if(buffers_.ids, buffers_.ids + pairs, [](std::int32_t id) { return id >= 0; });
  if (routed == 0) return;
  const std::size_t layer_bytes = bank_.experts_per_layer_count * bank_.record_bytes;
  executor_.experts({.x = buffers_.x,
                     .expert_ids = buffers_.ids,
                     .weights = buffers_.weights,
                     .y = buffers_.y,
                     .tokens = static_cast<std::size_t>(tokens),
                     .top_k = buffers_.top_k,
                     .hidden = bank_.hidden,
                     .intermediate = bank_.intermediate,
                     .bank = bank_.records + moe_layer_index * layer_bytes,
                     .record_bytes = bank_.record_bytes,
                     .experts_count = bank_.experts_per_layer_count,
                     .format = bank_.format,
                     .has_bias = bank_.has_bias,
                     .glu = bank_.glu,
                     .fast = bank_.fast,
                     .keep_absent = true});
  executions_count_.fetch_add(static_cast<std::uint64_t>(routed));
}

void CpuBranch::keep_fault(std::size_t moe_layer_index, const char* what) noexcept {
  try {
    const std::lock_guard lock(fault_mutex_);
    if (fault_.empty()) fault_ = "MoE layer " + std::to_string(moe_layer_index) + ": " + what;
  } catch (...) {  // without memory for a message the step must still be known to be wrong
    fault_ = "failed";
  }
}

std::string CpuBranch::take_fault() {
  const std::lock_guard lock(fault_mutex_);
  std::string fault;
  fault.swap(fault_);
  return fault;
}

double CpuBranch::busy_s() const { return static_cast<double>(busy_ns_.load()) * 1e-9; }

void CpuBranch::begin_step() {
  require(doorbells_.ring != nullptr, "this CPU branch has no doorbell");
  {
    const std::lock_guard lock(mutex_);
    in_step_.store(true);
  }
  changed_.notify_all();
}

void CpuBranch::end_step() { in_step_.store(false); }

void CpuBranch::watch() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || in_step_.load(); });
      if (stop_) return;
    }
    answer();
  }
}

// Until the step ends.
void CpuBranch::answer() {
  using Clock = std::chrono::steady_clock;
  const std::atomic_ref ring(doorbells_.ring[0]);
  const std::atomic_ref done(doorbells_.done[0]);
  auto rung_at = Clock::now();
  while (in_step_.load(std::memory_order_relaxed)) {
    const std::uint32_t number = ring.load(std::memory_order_acquire);
    if (number != answered_) {
      run(doorbells_.ring[1]);
      answered_ = number;
      done.store(number, std::memory_order_release);
      rung_at = Clock::now();
    } else if (Clock::now() - rung_at < kSpins) {
      pause();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

}  // namespace freetoken::exec
