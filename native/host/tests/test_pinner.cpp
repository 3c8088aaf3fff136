#include <chrono>
#include <stdexcept>
#include <thread>

#include "pinner.hpp"
#include "temporary_file.hpp"

namespace freetoken::host {
namespace {

using test::memory;

PinProgress ended(const Pinner& pinner) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!pinner.progress().done) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
  return pinner.progress();
}

// Small enough for the usual limit of an ordinary user (8 MiB).
constexpr std::uint64_t kStep = 65536;

void pins_in_steps() {
  const auto mapping = memory(16 * kStep, 16 * kStep);
  Pinner pinner(mapping, kStep, 15 * kStep, 4 * kStep);
  const PinProgress progress = ended(pinner);
  CHECK_EQUAL(progress.pinned_bytes, 15 * kStep);
  CHECK_EQUAL(progress.error_number, 0);
  CHECK_EQUAL(progress.note, "");
}

void a_failure_keeps_what_is_pinned() {
  // What lies beyond the end of the file cannot be locked.
  const auto mapping = memory(16 * kStep, 10 * kStep);
  Pinner pinner(mapping, 0, 16 * kStep, kStep);
  const PinProgress progress = ended(pinner);
  CHECK_EQUAL(progress.pinned_bytes, 10 * kStep);
  CHECK(progress.error_number != 0);
  CHECK(!progress.limited);
  CHECK(progress.note.find("LimitMEMLOCK") == std::string::npos);
  CHECK(progress.note.find("mlock failed") != std::string::npos);
}

void an_abort_can_come_at_any_time() {
  const auto mapping = memory(64 * kStep, 64 * kStep);
  {
    Pinner pinner(mapping, 0, 64 * kStep, 4096);
    pinner.abort();
    pinner.abort();
    const PinProgress progress = pinner.progress();
    CHECK(progress.done);
    CHECK(progress.note.empty() == (progress.pinned_bytes == 64 * kStep));
  }
  mapping->close();
}

void a_wrong_range_is_refused() {
  const auto mapping = memory(4096, 4096);
  bool refused = false;
  try {
    const Pinner pinner(mapping, 4096, 4096, 4096);
  } catch (const std::out_of_range&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace
}  // namespace freetoken::host

int main() {
  freetoken::host::pins_in_steps();
  freetoken::host::a_failure_keeps_what_is_pinned();
  freetoken::host::an_abort_can_come_at_any_time();
  freetoken::host::a_wrong_range_is_refused();
  return 0;
}
