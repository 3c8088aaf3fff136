#include "loader.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "depth_control.hpp"
#include "native_thread.hpp"

namespace freetoken::host {
namespace {

using Clock = std::chrono::steady_clock;

// Every file system accepts direct reads at this alignment, and records start at it.
constexpr std::uint64_t kAlignmentBytes = 4096;
// More than the CPUs, because a submission also allocates and clears the pool's pages while other
// reads have ended: on 2 busy CPUs 8 workers filled new pools at 1.8-1.9 GB/s, 2 workers at 1.6.
constexpr std::uint32_t kWorkersCount = 8;
// Clearing took one thread 0.13 s per GiB, and up to 2 s in a virtual machine whose host had to
// find the memory first. In a pool without huge pages of its own two of these threads loaded at
// 0.92 of raw reads, one at 0.79.
constexpr std::uint32_t kHugePagesThreadsCount = 2;
// A sample must span enough reads to mean something, and be short beside a load of seconds.
constexpr auto kSampleInterval = std::chrono::milliseconds(40);

double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() { reset(-1); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return fd_; }
  void reset(int fd) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

}  // namespace

struct Loader::OpenFile {
  LoadFile file;
  std::uint64_t first_piece = 0;
  Descriptor buffered;  // always open: tails, and all of the file where direct reads are refused
  Descriptor direct;
  std::atomic<bool> use_direct{false};
};

// A part of one file: `aligned_bytes` go through the queue, `tail_bytes` (less than a page, only
// at the end of a file) through the page cache.
struct Loader::Piece {
  std::size_t file_index = 0;
  std::uint64_t offset_bytes = 0;
  std::uint32_t aligned_bytes = 0;
  std::uint32_t tail_bytes = 0;
  bool direct = false;
};

// The pieces one thread has in flight.
class Loader::Worker {
 public:
  Worker(Loader& loader, std::uint32_t index, std::unique_ptr<ReadQueue> queue)
      : loader_(loader), index_(index), queue_(std::move(queue)), pieces_(queue_->capacity()) {
    for (std::uint32_t slot = 0; slot < queue_->capacity(); ++slot) free_.push_back(slot);
  }

  void run() {
    while (await_share()) {
      while (!loader_.stopping() && !free_.empty() && in_flight() < loader_.share(index_)) {
        Piece piece;
        if (!loader_.next_piece(&piece)) break;
        begin(piece);
      }
      if (in_flight() == 0) continue;
      const std::size_t count = queue_->wait(done_);
      for (std::size_t i = 0; i < count; ++i) complete(done_[i]);
    }
  }

 private:
  [[nodiscard]] std::uint32_t in_flight() const {
    return static_cast<std::uint32_t>(pieces_.size() - free_.size());
  }

  // False when there is nothing left to do.
  bool await_share() {
    if (in_flight() > 0) return true;
    const auto idle_over = [this] {
      return loader_.stopping() || loader_.next_piece_.load() >= loader_.pieces_count_ ||
             loader_.share(index_) > 0;
    };
    if (!idle_over()) {
      std::unique_lock lock(loader_.mutex_);
      loader_.changed_.wait(lock, idle_over);
    }
    return !loader_.stopping() && loader_.next_piece_.load() < loader_.pieces_count_;
  }

  void begin(Piece piece) {
    if (piece.aligned_bytes == 0) {
      finish(piece);
      return;
    }
    // Memory that a read already writes to cannot become a huge page any more.
    if (loader_.huge_pages_) loader_.huge_pages_->await(place(piece), piece.aligned_bytes);
    const std::uint32_t slot = free_.back();
    free_.pop_back();
    pieces_[slot] = piece;
    submit(slot);
  }

  void submit(std::uint32_t slot) {
    Piece& piece = pieces_[slot];
    OpenFile& file = *loader_.files_[piece.file_index];
    piece.direct = file.use_direct.load(std::memory_order_relaxed);
    queue_->submit({.fd = piece.direct ? file.direct.get() : file.buffered.get(),
                    .destination = destination(piece),
                    .offset_bytes = piece.offset_bytes,
                    .length_bytes = piece.aligned_bytes,
                    .token = slot});
  }

  // Offset in the mapping.
  [[nodiscard]] std::uint64_t place(const Piece& piece) const {
    return loader_.files_[piece.file_index]->file.destination_bytes + piece.offset_bytes;
  }

  [[nodiscard]] std::byte* destination(const Piece& piece) const {
    return loader_.mapping_->data() + place(piece);
  }

  void complete(const ReadCompletion& completion) {
    const auto slot = static_cast<std::uint32_t>(completion.token);
    Piece& piece = pieces_[slot];
    OpenFile& file = *loader_.files_[piece.file_index];
    const auto error_number = static_cast<int>(-std::min<std::int64_t>(completion.result, 0));
    if (!loader_.stopping()) {
      if (error_number == EAGAIN || error_number == EINTR) {
        submit(slot);
        return;
      }
      if (error_number == EINVAL && piece.direct) {
        // Some file systems accept O_DIRECT at open and refuse it at the first read.
        file.use_direct.store(false, std::memory_order_relaxed);
        submit(slot);
        return;
      }
      if (error_number != 0) {
        const bool memory = error_number == EFAULT || error_number == ENOMEM;
        loader_.fail(memory ? LoadFailure::kMemory : LoadFailure::kRead, piece.file_index,
                     piece.offset_bytes, error_number);
      } else {
        const auto count = static_cast<std::uint32_t>(completion.result);
        Piece rest = piece;
        rest.offset_bytes += count;
        // A short read (a signal, an end that moved) is completed by plain reads.
        rest.tail_bytes += rest.aligned_bytes - count;
        rest.aligned_bytes = 0;
        loader_.done_bytes_.fetch_add(count, std::memory_order_relaxed);
        if (!piece.direct) drop_cache(file, piece.offset_bytes, count);
        finish(rest);
      }
    }
    free_.push_back(slot);
  }

  // Reads what the queue did not: through the page cache, which is then asked to forget it.
  void finish(Piece piece) {
    OpenFile& file = *loader_.files_[piece.file_index];
    while (piece.tail_bytes > 0) {
      const ssize_t count = ::pread(file.buffered.get(), destination(piece), piece.tail_bytes,
                                    static_cast<off_t>(piece.offset_bytes));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) {
        const int error_number = errno;
        const bool memory = error_number == EFAULT || error_number == ENOMEM;
        loader_.fail(memory ? LoadFailure::kMemory : LoadFailure::kRead, piece.file_index,
                     piece.offset_bytes, error_number);
        return;
      }
      if (count == 0) {
        loader_.fail(LoadFailure::kLength, piece.file_index, piece.offset_bytes, 0,
                     piece.offset_bytes);
        return;
      }
      drop_cache(file, piece.offset_bytes, static_cast<std::uint64_t>(count));
      loader_.done_bytes_.fetch_add(static_cast<std::uint64_t>(count), std::memory_order_relaxed);
      piece.offset_bytes += static_cast<std::uint64_t>(count);
      piece.tail_bytes -= static_cast<std::uint32_t>(count);
    }
  }

  // Pool and page cache together would need the model's size twice.
  static void drop_cache(const OpenFile& file, std::uint64_t offset_bytes,
                         std::uint64_t length_bytes) {
    ::posix_fadvise(file.buffered.get(), static_cast<off_t>(offset_bytes),
                    static_cast<off_t>(length_bytes), POSIX_FADV_DONTNEED);
  }

  Loader& loader_;
  std::uint32_t index_;
  std::unique_ptr<ReadQueue> queue_;
  std::vector<Piece> pieces_;
  std::vector<std::uint32_t> free_;
  std::array<ReadCompletion, 64> done_{};
};

Loader::Loader(std::shared_ptr<Mapping> mapping, std::vector<LoadFile> files, LoadOptions options)
    : mapping_(std::move(mapping)),
      use_(std::make_unique<MappingUse>(mapping_)),
      options_(std::move(options)) {
  if (options_.chunk_bytes == 0 || options_.chunk_bytes % kAlignmentBytes != 0 ||
      options_.max_depth_count == 0) {
    throw std::invalid_argument("chunk_bytes must be a multiple of 4096 and the depth at least 1");
  }
  for (LoadFile& file : files) {
    if (file.destination_bytes > mapping_->length_bytes() ||
        file.length_bytes > mapping_->length_bytes() - file.destination_bytes) {
      throw std::out_of_range("a file does not fit into the pool mapping: " + file.path);
    }
    auto open_file = std::make_unique<OpenFile>();
    open_file->first_piece = pieces_count_;
    pieces_count_ += file.length_bytes / options_.chunk_bytes +
                     (file.length_bytes % options_.chunk_bytes != 0 ? 1 : 0);
    open_file->file = std::move(file);
    files_.push_back(std::move(open_file));
  }
}

Loader::~Loader() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

void Loader::start() {
  if (thread_.joinable()) throw std::logic_error("a loader starts once");
  thread_ = start_thread("ftk-load", [this] { run(); });
}

bool Loader::wait_for(double timeout_s) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                           [this] { return finished_; });
}

void Loader::cancel() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  if (outcome_.failure == LoadFailure::kNone) outcome_.failure = LoadFailure::kCancelled;
  stop_.store(true);
  changed_.notify_all();
}

void Loader::fail(LoadFailure failure, std::size_t file_index, std::uint64_t offset_bytes,
                  int error_number, std::uint64_t actual_bytes) {
  const std::lock_guard lock(mutex_);
  stop_.store(true);
  changed_.notify_all();
  if (outcome_.failure != LoadFailure::kNone) return;  // the first cause is the one to tell
  outcome_.failure = failure;
  outcome_.path = files_[file_index]->file.path;
  outcome_.offset_bytes = offset_bytes;
  outcome_.error_number = error_number;
  outcome_.actual_bytes = actual_bytes;
}

bool Loader::open_files() {
  for (std::size_t i = 0; i < files_.size(); ++i) {
    OpenFile& file = *files_[i];
    const char* path = file.file.path.c_str();
    // O_NONBLOCK: a FIFO in the place of a shard must not block the load for ever.
    file.buffered.reset(::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status {};
    if (file.buffered.get() < 0 || ::fstat(file.buffered.get(), &status) != 0) {
      fail(LoadFailure::kOpen, i, 0, errno);
      return false;
    }
    if (!S_ISREG(status.st_mode)) {
      fail(LoadFailure::kOpen, i, 0, 0);
      return false;
    }
    const auto actual_bytes = static_cast<std::uint64_t>(status.st_size);
    if (actual_bytes != file.file.length_bytes) {
      fail(LoadFailure::kLength, i, std::min(actual_bytes, file.file.length_bytes), 0,
           actual_bytes);
      return false;
    }
    ::posix_fadvise(file.buffered.get(), 0, 0, POSIX_FADV_RANDOM);  // no read-ahead for tails
    if (!options_.use_direct || file.file.destination_bytes % kAlignmentBytes != 0) continue;
    file.direct.reset(::open(path, O_RDONLY | O_CLOEXEC | O_DIRECT));
    if (file.direct.get() < 0 && errno != EINVAL && errno != EOPNOTSUPP) {
      fail(LoadFailure::kOpen, i, 0, errno);
      return false;
    }
    file.use_direct.store(file.direct.get() >= 0);
  }
  return true;
}

std::unique_ptr<ReadQueue> Loader::make_queue(std::uint32_t workers_count) const {
  if (options_.make_queue) return options_.make_queue();
  if (!uring_) return make_pread_queue();
  try {
    return make_uring_queue((options_.max_depth_count + workers_count - 1) / workers_count);
  } catch (const std::system_error&) {
    return make_pread_queue();  // the probe succeeded, but this ring finds no memory
  }
}

bool Loader::next_piece(Piece* piece) {
  const std::uint64_t number = next_piece_.fetch_add(1);
  if (number >= pieces_count_) return false;
  const auto after = std::upper_bound(
      files_.begin(), files_.end(), number,
      [](std::uint64_t value, const auto& file) { return value < file->first_piece; });
  piece->file_index = static_cast<std::size_t>(after - files_.begin()) - 1;
  const OpenFile& file = *files_[piece->file_index];
  piece->offset_bytes = (number - file.first_piece) * options_.chunk_bytes;
  const auto length_bytes = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(options_.chunk_bytes, file.file.length_bytes - piece->offset_bytes));
  piece->tail_bytes = length_bytes % kAlignmentBytes;
  piece->aligned_bytes = length_bytes - piece->tail_bytes;
  return true;
}

std::uint32_t Loader::share(std::uint32_t worker_index) const {
  const std::uint32_t depth = depth_count_.load(std::memory_order_relaxed);
  return depth / workers_count_ + (worker_index < depth % workers_count_ ? 1 : 0);
}

void Loader::work(std::uint32_t worker_index) {
  try {
    Worker(*this, worker_index, make_queue(workers_count_)).run();
  } catch (const std::system_error& error) {
    fail(LoadFailure::kQueue, 0, 0, error.code().value());
  }
  const std::lock_guard lock(mutex_);
  --running_count_;
  changed_.notify_all();
}

void Loader::adapt_depth() {
  DepthControl control(options_.start_depth_count, options_.max_depth_count);
  auto sampled = Clock::now();
  std::uint64_t sampled_bytes = 0;
  const auto all_ended = [this] { return running_count_ == 0; };
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kSampleInterval, all_ended)) {
    const auto now = Clock::now();
    const std::uint64_t now_bytes = done_bytes();
    // On a slow disk an interval holds too few reads: lengthen the sample.
    const std::uint64_t enough_bytes = std::uint64_t{control.depth()} * options_.chunk_bytes;
    if (now - sampled < kSampleInterval || now_bytes - sampled_bytes < enough_bytes) continue;
    depth_count_.store(
        control.sample(static_cast<double>(now_bytes - sampled_bytes) / seconds(now - sampled)));
    sampled = now;
    sampled_bytes = now_bytes;
    changed_.notify_all();
  }
}

void Loader::run() {
  const auto start = Clock::now();
  std::string refusal = options_.use_uring ? uring_refusal() : "not asked for";
  uring_ = refusal.empty() && !options_.make_queue;
  std::uint32_t workers_count = options_.workers_count;
  if (workers_count == 0) workers_count = kWorkersCount;
  // A thread that reads by itself has one read in flight; it sleeps until the depth needs it.
  if (!uring_) workers_count = options_.max_depth_count;
  const auto useful_count = std::max<std::uint64_t>(pieces_count_, 1);
  workers_count_ = static_cast<std::uint32_t>(
      std::min<std::uint64_t>({workers_count, options_.max_depth_count, useful_count}));
  depth_count_.store(std::min(options_.start_depth_count, options_.max_depth_count));
  if (!stopping() && open_files()) {
    if (options_.use_huge_pages) {
      huge_pages_ = std::make_unique<HugePages>(mapping_->data(), mapping_->length_bytes(),
                                                kHugePagesThreadsCount);
    }
    std::vector<std::thread> workers;
    {
      const std::lock_guard lock(mutex_);
      running_count_ = workers_count_;
    }
    for (std::uint32_t i = 0; i < workers_count_; ++i) {
      workers.push_back(start_thread("ftk-read", [this, i] { work(i); }));
    }
    adapt_depth();
    for (std::thread& worker : workers) worker.join();
  }
  const int huge_pages_error = huge_pages_ ? huge_pages_->refusal() : 0;
  huge_pages_.reset();
  const std::lock_guard lock(mutex_);
  outcome_.huge_pages_error = huge_pages_error;
  outcome_.io = uring_ ? "io_uring" : "threads";
  outcome_.io_note = std::move(refusal);
  outcome_.depth_count = depth_count_.load();
  outcome_.workers_count = workers_count_;
  outcome_.loaded_bytes = done_bytes();
  outcome_.buffered_files_count = static_cast<std::uint32_t>(std::count_if(
      files_.begin(), files_.end(), [](const auto& file) { return !file->use_direct.load(); }));
  outcome_.elapsed_s = seconds(Clock::now() - start);
  files_.clear();
  use_.reset();
  finished_ = true;
  changed_.notify_all();
}

}  // namespace freetoken::host
