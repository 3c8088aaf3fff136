// The meaning of every weight format in plain C++: what the vector kernels are checked against and
// what the portable kernels run.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "weight_format.h"

namespace freetoken::exec {
namespace {

inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7fffU;
  if (magnitude >= 0x7c00U) {  // infinite or not a number
    return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  }
  // As a single with the half's exponent, then times 2^112: right for subnormal halves too.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

// Four exponent bits (bias 7), three of mantissa, no infinities; S.1111.111 is not a number.
inline float e4m3_to_float(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
  const std::uint32_t magnitude = code & 0x7fU;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120F;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

// 2^(code - 127); the smallest is a subnormal single.
inline float e8m0_to_float(std::uint8_t code) {
  if (code == 0xffU) return std::bit_cast<float>(0x7fc00000U);
  return std::bit_cast<float>(code == 0 ? 0x00400000U : static_cast<std::uint32_t>(code) << 23);
}

inline float e2m1_to_float(std::uint8_t code) {
  constexpr float kValues[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const float value = kValues[code & 7U];
  return (code & 8U) != 0 ? -value : value;
}

// 4-bit code of row `row` and column `column` (0..7) of a step of eight columns.
inline std::uint8_t nibble(const std::uint8_t* step, std::size_t row, std::size_t column) {
  constexpr std::uint8_t kByte[8] = {0, 2, 0, 2, 1, 3, 1, 3};
  const std::uint8_t byte = step[4 * row + kByte[column]];
  return (column & 2U) != 0 ? byte >> 4 : byte & 15U;
}

// One group of columns of 16 rows: w = scale * code - minimum.
struct DecodedGroup {
  std::size_t columns;
  float codes[kFp8BlockColumns][kRowsPerBlock];
  float scale[kRowsPerBlock];
  float minimum[kRowsPerBlock];  // positive part to subtract; zeros but for q4_K
};

class BlockDecoder {
 public:
  BlockDecoder(const WeightFormat& format, const std::byte* block, std::size_t columns)
      : format_(format),
        block_(reinterpret_cast<const std::uint8_t*>(block)),
        columns_(columns),
        group_columns_(format.kind == WeightKind::kFp8Block ? kFp8BlockColumns
                       : format.kind == WeightKind::kBf16   ? kFp8BlockColumns
                                                            : format.group) {}

  std::size_t groups_count() const { return ceil_div(columns_, group_columns_); }

  void decode(std::size_t group, DecodedGroup& out) const {
    const std::size_t left = columns_ - group * group_columns_;
    out.columns = left < group_columns_ ? left : group_columns_;
    std::memset(out.minimum, 0, sizeof out.minimum);
    switch (format_.kind) {
      case WeightKind::kBf16:
        return bf16(group, out);
      case WeightKind::kFp8Block:
        return fp8_block(group, out);
      case WeightKind::kQ4K:
        return q4_k(group, out);
      case WeightKind::kQ6K:
        return q6_k(group, out);
      default:
        return grouped(group, out);
    }
  }

 private:
  static std::uint16_t word(const std::uint8_t* at) {
    std::uint16_t value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }

  void bf16(std::size_t group, DecodedGroup& out) const {
    for (std::size_t i = 0; i < out.columns; ++i) {
      const std::size_t column = group * group_columns_ + i;
      for (std::size_t r = 0; r < kRowsPerBlock; ++r) {
        out.codes[i][r] = bf16_to_float(
            word(block_ + (column / 2 * kRowsPerBlock + r) * 4 + column % 2 * sizeof(Bf16)));
      }
    }
    for (float& scale : out.scale) scale = 1.0F;
  }

  void fp8_block(std::size_t group, DecodedGroup& out) const {
    float scale = 0;
    std::memcpy(&scale, block_ + group * sizeof scale, sizeof scale);
    for (float& each : out.scale) each = scale;
    const std::uint8_t* data = block_ + round_up(groups_count() * sizeof(float), 64);
    for (std::size_t i = 0; i < out.columns; ++i) {
      const std::size_t column = group * group_columns_ + i;
      for (std::size_t r = 0; r < kRowsPerBlock; ++r) {
        out.codes[i][r] = e4m3_to_float(data[(column / 2 * kRowsPerBlock + r) * 2 + column % 2]);
      }
    }
  }

  // mxfp4, nvfp4, int4 and int8: scales of four groups, then their codes.
  void grouped(std::size_t group, DecodedGroup& out) const {
    const std::size_t super = group / kSuperGroups;
    const std::size_t within = group % kSuperGroups;
    const std::uint8_t* header =
        block_ + super * (format_.header_bytes() + kSuperGroups * format_.group_bytes());
    const std::uint8_t* codes = header + format_.header_bytes() + within * format_.group_bytes();
    for (std::size_t r = 0; r < kRowsPerBlock; ++r) {
      const std::size_t entry = within * kRowsPerBlock + r;
      out.scale[r] = scale(header, entry);
      const int zero = zero_point(header, entry);
      for (std::size_t c = 0; c < out.columns; ++c) out.codes[c][r] = code(codes, r, c, zero);
    }
  }

  float scale(const std::uint8_t* header, std::size_t entry) const {
    if (format_.kind == WeightKind::kMxfp4) return e8m0_to_float(header[entry]);
    if (format_.kind == WeightKind::kNvfp4) return e4m3_to_float(header[entry]);
    const std::uint16_t bits = word(header + 2 * entry);
    return format_.scale == ScaleType::kF16 ? half_to_float(bits) : bf16_to_float(bits);
  }

  int zero_point(const std::uint8_t* header, std::size_t entry) const {
    const bool four_bits = format_.kind == WeightKind::kInt4;
    if (!format_.zero_points) return four_bits ? 8 : 0;
    const int stored = header[kSuperGroups * kRowsPerBlock * 2 + entry];
    return four_bits ? stored : stored - 128;
  }

  float code(const std::uint8_t* codes, std::size_t row, std::size_t column, int zero) const {
    if (format_.kind == WeightKind::kInt8) {
      const std::uint8_t bits = codes[(column / 4 * kRowsPerBlock + row) * 4 + column % 4];
      return static_cast<float>(static_cast<std::int8_t>(bits) - zero);
    }
    const std::uint8_t bits = nibble(codes + column / 8 * 64, row, column % 8);
    return format_.kind == WeightKind::kInt4 ? static_cast<float>(bits - zero)
                                             : e2m1_to_float(bits);
  }

  const std::uint8_t* super_block(std::size_t group) const {
    const std::size_t groups = kSuperBlockColumns / format_.group;
    return block_ + group / groups * (format_.header_bytes() + groups * format_.group_bytes());
  }

  void q4_k(std::size_t group, DecodedGroup& out) const {
    const std::uint8_t* super = super_block(group);
    const std::size_t within = group % 8;
    const std::uint8_t* codes = super + format_.header_bytes() + within * format_.group_bytes();
    for (std::size_t r = 0; r < kRowsPerBlock; ++r) {
      const std::size_t entry = within * kRowsPerBlock + r;
      out.scale[r] = half_to_float(word(super + 2 * r)) * static_cast<float>(super[64 + entry]);
      out.minimum[r] =
          half_to_float(word(super + 32 + 2 * r)) * static_cast<float>(super[192 + entry]);
      for (std::size_t c = 0; c < out.columns; ++c) {
        out.codes[c][r] = static_cast<float>(nibble(codes + c / 8 * 64, r, c % 8));
      }
    }
  }

  void q6_k(std::size_t group, DecodedGroup& out) const {
    const std::uint8_t* super = super_block(group);
    const std::size_t within = group % 16;
    const std::uint8_t* high = super + format_.header_bytes() + within * format_.group_bytes();
    constexpr std::uint8_t kByte[8] = {0, 2, 0, 2, 1, 3, 1, 3};
    for (std::size_t r = 0; r < kRowsPerBlock; ++r) {
      const auto sub_scale = static_cast<std::int8_t>(super[64 + within * kRowsPerBlock + r]);
      out.scale[r] = half_to_float(word(super + 2 * r)) * static_cast<float>(sub_scale);
      for (std::size_t c = 0; c < out.columns; ++c) {
        const std::size_t step = c / 8;
        const unsigned low = nibble(high + 64 * (1 + step), r, c % 8);
        const unsigned shift = 4 * static_cast<unsigned>(step) + ((c & 2U) != 0 ? 2U : 0U);
        const unsigned top = (static_cast<unsigned>(high[4 * r + kByte[c % 8]]) >> shift) & 3U;
        out.codes[c][r] = static_cast<float>(static_cast<int>(low | top << 4) - 32);
      }
    }
  }

  const WeightFormat& format_;
  const std::uint8_t* block_;
  std::size_t columns_;
  std::size_t group_columns_;
};

}  // namespace
}  // namespace freetoken::exec
