#include "fill_link.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

namespace freetoken::exec {
namespace {

constexpr std::size_t kRecordBytes = 64 << 10;
constexpr std::size_t kExperts = 24;
constexpr std::size_t kSlots = 8;

struct Memory {
  std::vector<std::byte> bank = std::vector<std::byte>(kExperts * kRecordBytes);
  std::vector<std::byte> slots = std::vector<std::byte>(kSlots * kRecordBytes);

  Memory() {
    for (std::size_t at = 0; at < bank.size(); ++at) {
      bank[at] = static_cast<std::byte>(at * 31 + at / kRecordBytes);
    }
  }
  [[nodiscard]] FillLink::Layout layout() {
    return {bank.data(), kRecordBytes, kExperts, slots.data(), kSlots};
  }
  [[nodiscard]] bool holds(std::size_t slot, std::size_t expert) const {
    return std::memcmp(&slots[slot * kRecordBytes], &bank[expert * kRecordBytes], kRecordBytes) ==
           0;
  }
};

double seconds(const std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

TEST(FillLink, CopiesRecordsIntoTheirSlots) {
  Memory memory;
  FillLink link(memory.layout(), 0.0);
  const std::vector<Fill> first{{5, 0}, {23, 7}, {0, 3}};
  const std::vector<Fill> second{{6, 0}};
  link.submit(first.data(), first.size(), kSlots);
  const std::uint64_t ticket = link.submit(second.data(), second.size(), kSlots);
  link.wait(ticket);
  EXPECT_TRUE(memory.holds(0, 6));
  EXPECT_TRUE(memory.holds(7, 23));
  EXPECT_TRUE(memory.holds(3, 0));
  EXPECT_EQ(memory.slots[kRecordBytes], std::byte{0});
  const FillTotals totals = link.totals();
  EXPECT_EQ(totals.fills_count, 4U);
  EXPECT_EQ(totals.bytes, 4 * kRecordBytes);
  EXPECT_GT(totals.busy_s, 0.0);
}

TEST(FillLink, ReadsTheListBeforeSubmitReturns) {
  Memory memory;
  FillLink link(memory.layout(), 20e6);
  std::vector<Fill> fills{{1, 1}, {2, 2}};
  const std::uint64_t ticket = link.submit(fills.data(), fills.size(), kSlots);
  fills.assign(2, Fill{9, 4});
  link.wait(ticket);
  EXPECT_TRUE(memory.holds(1, 1));
  EXPECT_TRUE(memory.holds(2, 2));
}

TEST(FillLink, RefusesWhatLiesOutsideAndQueuesNothing) {
  Memory memory;
  FillLink link(memory.layout(), 0.0);
  for (const Fill wrong : {Fill{-1, 0}, Fill{kExperts, 0}, Fill{0, -1}, Fill{0, kSlots}}) {
    const std::vector<Fill> fills{{1, 1}, wrong};
    EXPECT_THROW(link.submit(fills.data(), fills.size(), kSlots), std::out_of_range);
  }
  const Fill last{0, kSlots - 1};
  EXPECT_THROW(link.submit(&last, 1, kSlots - 1), std::out_of_range);
  const Fill beyond{0, kSlots};
  EXPECT_THROW(link.submit(&beyond, 1, kSlots + 1), std::out_of_range);
  link.drain();
  EXPECT_EQ(link.totals().fills_count, 0U);
  EXPECT_THROW(link.wait(1), std::out_of_range);
  EXPECT_THROW(link.set_rate_bytes_per_s(-1.0), std::invalid_argument);
  EXPECT_THROW(FillLink(memory.layout(), 1.0 / 0.0), std::invalid_argument);
}

TEST(FillLink, AnEmptyListIsDoneAtOnce) {
  Memory memory;
  FillLink link(memory.layout(), 1000.0);
  link.wait(link.submit(nullptr, 0, kSlots));
  EXPECT_EQ(link.totals().bytes, 0U);
}

TEST(FillLink, KeepsTheRateAndSleepsMeanwhile) {
  Memory memory;
  constexpr double kRate = 20e6;  // 3.3 ms for each record
  FillLink link(memory.layout(), kRate);
  std::vector<Fill> fills;
  for (std::int32_t slot = 0; slot < 6; ++slot) fills.push_back({slot, slot});
  const double expected_s = 10 * 6 * static_cast<double>(kRecordBytes) / kRate;
  const auto started = std::chrono::steady_clock::now();
  const double cpu_before_s = cpu_seconds();
  std::uint64_t ticket = 0;
  for (int repeat = 0; repeat < 10; ++repeat)
    ticket = link.submit(fills.data(), fills.size(), kSlots);
  link.wait(ticket);
  const double elapsed_s = seconds(started);
  EXPECT_GE(elapsed_s, expected_s);
  EXPECT_LT(elapsed_s, expected_s * 1.5 + 0.05);  // a busy machine may stop us for a while
  EXPECT_LT(cpu_seconds() - cpu_before_s, 0.5 * elapsed_s);
  EXPECT_NEAR(link.totals().busy_s, elapsed_s, 0.02);
}

TEST(FillLink, WhatADecodeStepWaitsForOvertakesWhatIsStreamed) {
  Memory memory;
  FillLink link(memory.layout(), 5e6);  // 13 ms for each record
  const std::vector<Fill> bulk{{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4}, {5, 5}};
  const std::vector<Fill> urgent{{20, 6}, {21, 7}};
  const std::uint64_t streamed = link.submit(bulk.data(), bulk.size(), kSlots, FillLane::kBulk);
  const std::uint64_t wanted = link.submit(urgent.data(), urgent.size(), kSlots);
  link.wait(wanted);
  EXPECT_TRUE(memory.holds(6, 20));
  EXPECT_TRUE(memory.holds(7, 21));
  EXPECT_FALSE(link.is_done(streamed));
  link.drain();
  EXPECT_TRUE(link.is_done(streamed));
  for (std::size_t slot = 0; slot < bulk.size(); ++slot) EXPECT_TRUE(memory.holds(slot, slot));
  EXPECT_EQ(link.totals().fills_count, 8U);
}

TEST(FillLink, RestsAreNotCountedAsBusy) {
  Memory memory;
  FillLink link(memory.layout(), 100e6);
  const Fill fill{0, 0};
  link.wait(link.submit(&fill, 1, kSlots));
  const double busy_s = link.totals().busy_s;
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  link.wait(link.submit(&fill, 1, kSlots));
  EXPECT_LT(link.totals().busy_s - busy_s, 0.025);
}

TEST(FillLink, StopsInTheMiddleOfASlowList) {
  Memory memory;
  const auto started = std::chrono::steady_clock::now();
  FillLink link(memory.layout(), 1000.0);  // a minute for a record
  const Fill fill{0, 0};
  link.submit(&fill, 1, kSlots);
  const std::uint64_t ticket = link.submit(&fill, 1, kSlots);
  std::thread waiter([&] { EXPECT_THROW(link.wait(ticket), std::logic_error); });
  link.stop();
  link.stop();
  waiter.join();
  EXPECT_LT(seconds(started), 5.0);
  EXPECT_THROW(link.submit(&fill, 1, kSlots), std::logic_error);
  EXPECT_EQ(link.totals().fills_count, 0U);
}

}  // namespace
}  // namespace freetoken::exec
