#include "fill_link.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <string>

namespace freetoken::exec {
namespace {

// A sleep with the least timer slack ends 5 to 60 us late here; the rest is spun away where a
// decode step waits for the record. Elsewhere the next record makes up for it and the core is the
// executor's: at 2,000 records a second spinning takes 12 % of it.
constexpr std::chrono::microseconds kSpin{60};
// A throttled sleep ends early enough for the destructor and for a change of rate.
constexpr std::chrono::milliseconds kLongestSleep{20};
// Below this a deadline could lie beyond the clock.
constexpr double kLeastRateBytesPerS = 1000.0;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

double checked_rate(double rate_bytes_per_s) {
  const bool limited = std::isfinite(rate_bytes_per_s) && rate_bytes_per_s >= kLeastRateBytesPerS;
  if (!limited && rate_bytes_per_s != 0.0) {
    throw std::invalid_argument(
        "the rate of a link is 0 (no limit) or at least 1000 bytes a second");
  }
  return rate_bytes_per_s;
}

void check(const Fill& fill, std::size_t experts_count, std::size_t slots_count) {
  const auto below = [](std::int32_t value, std::size_t limit) {
    return value >= 0 && static_cast<std::size_t>(value) < limit;
  };
  if (below(fill.expert_id, experts_count) && below(fill.slot, slots_count)) return;
  throw std::out_of_range("a fill of expert " + std::to_string(fill.expert_id) + " into slot " +
                          std::to_string(fill.slot) + " lies outside the " +
                          std::to_string(experts_count) + " experts or the " +
                          std::to_string(slots_count) + " slots");
}

}  // namespace

FillLink::FillLink(const Layout& layout, double rate_bytes_per_s)
    : layout_(layout),
      rate_bytes_per_s_(checked_rate(rate_bytes_per_s)),
      due_(Clock::now()),
      free_at_(due_) {
  if (layout.bank == nullptr || layout.slots == nullptr || layout.record_bytes == 0) {
    throw std::invalid_argument("fills need a bank, slots and a record size");
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the main thread's
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "ftk-fill");
}

FillLink::~FillLink() { stop(); }

void FillLink::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  queued_.notify_all();
  done_.notify_all();
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

std::uint64_t FillLink::submit(const Fill* fills, std::size_t fills_count, std::size_t slots_count,
                               FillLane lane) {
  Job job{.ticket = 0,
          .fills = {fills, fills + fills_count},
          .copied_count = 0,
          .submitted = Clock::now()};
  const std::size_t usable = std::min(slots_count, layout_.slots_capacity);
  for (const Fill& fill : job.fills) check(fill, layout_.experts_count, usable);
  std::uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stop_.load()) throw std::logic_error("the link that fills slots is stopped");
    ticket = ++submitted_count_;
    if (fills_count == 0) return ticket;
    job.ticket = ticket;
    open_.insert(ticket);
    (lane == FillLane::kUrgent ? urgent_ : bulk_).push_back(std::move(job));
  }
  queued_.notify_one();
  return ticket;
}

void FillLink::wait(std::uint64_t ticket) {
  std::unique_lock lock(mutex_);
  if (ticket > submitted_count_) throw std::out_of_range("no fills were submitted as this ticket");
  await(lock, ticket);
}

bool FillLink::is_done(std::uint64_t ticket) const {
  const std::lock_guard lock(mutex_);
  return ticket <= submitted_count_ && !open_.contains(ticket);
}

void FillLink::drain() {
  std::unique_lock lock(mutex_);
  while (!open_.empty()) await(lock, *open_.begin());
}

void FillLink::await(std::unique_lock<std::mutex>& lock, std::uint64_t ticket) {
  done_.wait(lock, [&] { return !open_.contains(ticket) || stop_.load(); });
  if (open_.contains(ticket)) {
    throw std::logic_error("the link that fills slots was stopped before it had copied all");
  }
}

FillTotals FillLink::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

std::chrono::steady_clock::time_point FillLink::urgent_ended_at() const {
  const std::lock_guard lock(mutex_);
  return urgent_ended_at_;
}

void FillLink::set_rate_bytes_per_s(double rate_bytes_per_s) {
  rate_bytes_per_s_.store(checked_rate(rate_bytes_per_s));
}

std::deque<FillLink::Job>* FillLink::next_lane() {
  if (!urgent_.empty()) return &urgent_;
  return bulk_.empty() ? nullptr : &bulk_;
}

void FillLink::run() {
  ::prctl(PR_SET_TIMERSLACK, 1UL);  // of this thread alone; the default adds 50 us to each sleep
  while (true) {
    std::deque<Job>* lane = nullptr;
    Fill fill{};
    Clock::time_point submitted;
    bool awaited = false;
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stop_.load() || (lane = next_lane()) != nullptr; });
      if (stop_.load()) return;
      const Job& job = lane->front();
      fill = job.fills[job.copied_count];
      submitted = job.submitted;
      awaited = lane == &urgent_ && job.copied_count + 1 == job.fills.size();
    }
    if (!copy(fill, submitted, awaited)) return;
    finish_record(*lane);
  }
}

bool FillLink::copy(const Fill& fill, Clock::time_point submitted, bool awaited) {
  due_ = std::max(submitted, due_);
  std::memcpy(layout_.slots + static_cast<std::size_t>(fill.slot) * layout_.record_bytes,
              layout_.bank + static_cast<std::size_t>(fill.expert_id) * layout_.record_bytes,
              layout_.record_bytes);
  if (const double rate = rate_bytes_per_s_.load(); rate > 0.0) {
    const std::chrono::duration<double> record(static_cast<double>(layout_.record_bytes) / rate);
    due_ += std::chrono::duration_cast<Clock::duration>(record);
  }
  const Clock::duration spin = awaited ? Clock::duration{kSpin} : Clock::duration::zero();
  for (auto left = due_ - Clock::now(); left.count() > 0; left = due_ - Clock::now()) {
    if (stop_.load()) return false;
    if (left > spin) {
      std::this_thread::sleep_for(std::min<Clock::duration>(left - spin, kLongestSleep));
    } else {
      pause();
    }
  }
  return !stop_.load();
}

// Counts the first record of a lane as copied; only this thread takes jobs away.
void FillLink::finish_record(std::deque<Job>& lane) {
  const Clock::time_point now = Clock::now();
  bool job_done = false;
  {
    const std::lock_guard lock(mutex_);
    Job& job = lane.front();
    const Clock::time_point started = std::max(job.submitted, free_at_);
    free_at_ = now;
    ++totals_.fills_count;
    totals_.bytes += layout_.record_bytes;
    totals_.busy_s += std::chrono::duration<double>(now - started).count();
    job_done = ++job.copied_count == job.fills.size();
    if (job_done) {
      if (&lane == &urgent_) urgent_ended_at_ = now;
      open_.erase(job.ticket);
      lane.pop_front();
      // A link that was slower than its rate within a list may catch up there, not in the next.
      due_ = std::max(due_, now);
    }
  }
  if (job_done) done_.notify_all();
}

}  // namespace freetoken::exec
