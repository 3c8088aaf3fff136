// Fills a mapping from files: parallel direct reads straight to their final place.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "huge_pages.hpp"
#include "mapping.hpp"
#include "read_queue.hpp"

namespace freetoken::host {

// One whole file and where it goes in the mapping.
struct LoadFile {
  std::string path;
  std::uint64_t destination_bytes = 0;  // offset in the mapping
  std::uint64_t length_bytes = 0;       // the file must have exactly this length
};

enum class LoadFailure {
  kNone,
  kCancelled,
  kOpen,    // the file cannot be opened or is not a regular file
  kLength,  // the file has another length than expected, or shrank while it was read
  kRead,    // the disk or the file system reported an error
  kMemory,  // the pool's memory could not be allocated
  kQueue,   // io_uring stopped working; no file is to blame
};

struct LoadOptions {
  bool use_uring = true;
  bool use_direct = true;
  bool use_huge_pages = true;            // make them where the kernel would not by itself
  std::uint32_t chunk_bytes = 2U << 20;  // a multiple of 4096
  std::uint32_t start_depth_count = 8;
  std::uint32_t max_depth_count = 64;
  std::uint32_t workers_count = 0;  // 0: chosen here
  // Replaces the queues of the workers; for tests that inject faults.
  std::function<std::unique_ptr<ReadQueue>()> make_queue;
};

struct LoadOutcome {
  LoadFailure failure = LoadFailure::kNone;
  int error_number = 0;
  std::string path;                        // of the file that failed
  std::uint64_t offset_bytes = 0;          // in that file
  std::uint64_t actual_bytes = 0;          // kLength: the length that was found
  std::string io;                          // "io_uring" or "threads"
  std::string io_note;                     // why not io_uring; empty if it is used
  int huge_pages_error = 0;                // why huge pages could not be made everywhere
  std::uint32_t buffered_files_count = 0;  // files whose file system refused direct reads
  std::uint32_t depth_count = 0;           // reads kept in flight at the end
  std::uint32_t workers_count = 0;
  std::uint64_t loaded_bytes = 0;
  double elapsed_s = 0.0;
};

class Loader {
 public:
  // Throws std::invalid_argument or std::out_of_range for files that do not fit the mapping.
  Loader(std::shared_ptr<Mapping> mapping, std::vector<LoadFile> files, LoadOptions options);
  // Cancels, and waits for the reads in flight.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  void start();
  // True once the load has ended, one way or another.
  bool wait_for(double timeout_s);
  // No new read is started; reads in flight are awaited, because the kernel writes to the memory.
  void cancel();
  [[nodiscard]] std::uint64_t done_bytes() const {
    return done_bytes_.load(std::memory_order_relaxed);
  }
  // Valid after wait_for() returned true.
  [[nodiscard]] const LoadOutcome& outcome() const { return outcome_; }

 private:
  struct OpenFile;
  struct Piece;
  class Worker;

  bool open_files();
  void run();
  void work(std::uint32_t worker_index);
  void adapt_depth();
  [[nodiscard]] std::unique_ptr<ReadQueue> make_queue(std::uint32_t workers_count) const;
  bool next_piece(Piece* piece);
  void fail(LoadFailure failure, std::size_t file_index, std::uint64_t offset_bytes,
            int error_number, std::uint64_t actual_bytes = 0);
  [[nodiscard]] bool stopping() const { return stop_.load(std::memory_order_relaxed); }
  // How many reads worker `worker_index` may have in flight now.
  [[nodiscard]] std::uint32_t share(std::uint32_t worker_index) const;

  std::shared_ptr<Mapping> mapping_;
  std::unique_ptr<MappingUse> use_;  // until the last read has ended
  LoadOptions options_;
  std::unique_ptr<HugePages> huge_pages_;
  std::vector<std::unique_ptr<OpenFile>> files_;
  std::uint64_t pieces_count_ = 0;
  std::atomic<std::uint64_t> next_piece_{0};
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<bool> stop_{false};
  std::atomic<std::uint32_t> depth_count_{1};
  std::uint32_t workers_count_ = 1;
  bool uring_ = false;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::uint32_t running_count_ = 0;
  bool finished_ = false;
  LoadOutcome outcome_;
  std::thread thread_;
};

}  // namespace freetoken::host
