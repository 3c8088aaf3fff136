// Where the groups of a block of 16 rows lie, and their scales as sixteen lanes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "bf16.h"
#include "layout.h"
#include "weight_format.h"

namespace freetoken::exec {
namespace {

// One group of columns of 16 rows: w = scale * code - minimum.
template <class Isa>
struct RowScales {
  typename Isa::F scale;
  typename Isa::F minimum;
};

// Loads: sixteen numbers of a header as lanes of Isa.
template <WeightKind Kind, class Isa, class Loads>
class BlockGroups {
 public:
  using F = typename Isa::F;
  // Groups whose scales lie together.
  static constexpr std::size_t kTogether = Kind == WeightKind::kQ4K   ? 8
                                           : Kind == WeightKind::kQ6K ? 16
                                                                      : kSuperGroups;

  BlockGroups(const WeightFormat& format, const std::byte* block, std::size_t columns)
      : block_(block), columns_(columns), scale_(format.scale), zero_points_(format.zero_points) {
    if constexpr (Kind == WeightKind::kFp8Block) {
      group_columns_ = kFp8BlockColumns;
      count_ = ceil_div(columns, kFp8BlockColumns);
      header_bytes_ = round_up(count_ * sizeof(float), kWeightAlignment);
      group_bytes_ = kFp8BlockColumns * kRowsPerBlock;
    } else {
      group_columns_ = format.group;
      count_ = columns / format.group;
      header_bytes_ = format.header_bytes();
      group_bytes_ = format.group_bytes();
    }
    together_bytes_ = header_bytes_ + kTogether * group_bytes_;
  }

  std::size_t count() const { return count_; }
  std::size_t group_columns() const { return group_columns_; }

  // Of one group: all but the last of fp8_block have group_columns().
  std::size_t columns(std::size_t group) const {
    const std::size_t left = columns_ - group * group_columns_;
    return left < group_columns_ ? left : group_columns_;
  }

  bool has_minimum() const {
    if constexpr (Kind == WeightKind::kQ4K) return true;
    if constexpr (Kind == WeightKind::kInt4 || Kind == WeightKind::kInt8) return zero_points_;
    return false;
  }

  const std::byte* codes(std::size_t group) const {
    if constexpr (Kind == WeightKind::kFp8Block) {
      return block_ + header_bytes_ + group * group_bytes_;
    } else {
      return header(group) + header_bytes_ + group % kTogether * group_bytes_;
    }
  }

  // offset_bytes: to another block of the same matrix.
  inline __attribute__((always_inline)) RowScales<Isa> scales(std::size_t group,
                                                              std::size_t offset_bytes = 0) const {
    if constexpr (Kind == WeightKind::kFp8Block) {
      float scale = 0;
      std::memcpy(&scale, block_ + offset_bytes + group * sizeof scale, sizeof scale);
      return {Isa::set1(scale), Isa::zero()};
    } else {
      return scales_of_rows(header(group) + offset_bytes, group % kTogether * kRowsPerBlock);
    }
  }

 private:
  const std::byte* header(std::size_t group) const {
    return block_ + group / kTogether * together_bytes_;
  }

  inline __attribute__((always_inline)) RowScales<Isa> scales_of_rows(const std::byte* header,
                                                                      std::size_t entry) const {
    if constexpr (Kind == WeightKind::kMxfp4) {
      return {Loads::e8m0(header + entry), Isa::zero()};
    } else if constexpr (Kind == WeightKind::kNvfp4) {
      return {Loads::e4m3(header + entry), Isa::zero()};
    } else if constexpr (Kind == WeightKind::kQ4K) {
      return {Isa::mul(Loads::halves(header), Loads::bytes(header + 64 + entry)),
              Isa::mul(Loads::halves(header + 32), Loads::bytes(header + 192 + entry))};
    } else if constexpr (Kind == WeightKind::kQ6K) {
      return {Isa::mul(Loads::halves(header), Loads::signed_bytes(header + 64 + entry)),
              Isa::zero()};
    } else {
      const std::byte* at = header + 2 * entry;
      const F scale = scale_ == ScaleType::kF16 ? Loads::halves(at)
                                                : Isa::load_bf16(reinterpret_cast<const Bf16*>(at));
      if (!zero_points_) return {scale, Isa::zero()};
      // Codes are taken relative to the middle of their range: of 0..15, and of the stored bytes.
      constexpr float kMiddle = Kind == WeightKind::kInt4 ? 8.0F : 128.0F;
      const F zero = Loads::bytes(header + kSuperGroups * kRowsPerBlock * 2 + entry);
      return {scale, Isa::mul(scale, Isa::sub(zero, Isa::set1(kMiddle)))};
    }
  }

  const std::byte* block_;
  std::size_t columns_;
  ScaleType scale_;
  bool zero_points_;
  std::size_t group_columns_ = 0;
  std::size_t count_ = 0;
  std::size_t header_bytes_ = 0;
  std::size_t group_bytes_ = 0;
  std::size_t together_bytes_ = 0;
};

// call(std::integral_constant<WeightKind, kind>{}) for a kind with groups.
template <class Call>
inline __attribute__((always_inline)) void with_kind(WeightKind kind, const Call& call) {
  switch (kind) {
    case WeightKind::kFp8Block:
      return call(std::integral_constant<WeightKind, WeightKind::kFp8Block>{});
    case WeightKind::kMxfp4:
      return call(std::integral_constant<WeightKind, WeightKind::kMxfp4>{});
    case WeightKind::kNvfp4:
      return call(std::integral_constant<WeightKind, WeightKind::kNvfp4>{});
    case WeightKind::kInt4:
      return call(std::integral_constant<WeightKind, WeightKind::kInt4>{});
    case WeightKind::kInt8:
      return call(std::integral_constant<WeightKind, WeightKind::kInt8>{});
    case WeightKind::kQ4K:
      return call(std::integral_constant<WeightKind, WeightKind::kQ4K>{});
    case WeightKind::kQ6K:
      return call(std::integral_constant<WeightKind, WeightKind::kQ6K>{});
    case WeightKind::kBf16:
      return;  // has no groups, and kernels of its own
  }
}

}  // namespace
}  // namespace freetoken::exec
