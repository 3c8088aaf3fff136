// Matrices of random weights in every format, and linear layers of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "decode.h"
#include "executor.h"
#include "support.h"

namespace freetoken::exec::test {

inline const std::string kFormats[] = {"bf16",
                                       "fp8_block",
                                       "mxfp4",
                                       "nvfp4",
                                       "int4_g32_f16",
                                       "int4_g64_bf16",
                                       "int4_g128_f16",
                                       "int4_g32_bf16_zp",
                                       "int4_g128_f16_zp",
                                       "int8_g32_f16",
                                       "int8_g64_f16_zp",
                                       "int8_g128_bf16",
                                       "q4_K",
                                       "q6_K"};

inline void put_u16(std::uint8_t* at, std::uint16_t value) {
  std::memcpy(at, &value, sizeof value);
}

// Random bits with scales of ordinary size, so that sums neither overflow nor vanish.
class RandomMatrix {
 public:
  RandomMatrix(const WeightFormat& format, std::size_t rows, std::size_t columns, Random& random)
      : format_(format),
        columns_(columns),
        blocks_(ceil_div(rows, kRowsPerBlock)),
        bytes_(format.matrix_bytes(rows, columns)) {
    fill(format, columns, blocks_, reinterpret_cast<std::uint8_t*>(bytes_.data()), random);
    if (!format.has_global()) return;
    factor_ = 0.5F + std::abs(random.next());
    std::memcpy(bytes_.data() + format.blocks_bytes(rows, columns), &factor_, sizeof factor_);
  }

  static void fill(const WeightFormat& format, std::size_t columns, std::size_t blocks,
                   std::uint8_t* bytes, Random& random) {
    const std::size_t block_bytes = format.block_bytes(columns);
    for (std::size_t i = 0; i < blocks * block_bytes; ++i) {
      bytes[i] = static_cast<std::uint8_t>(random.bits());
    }
    for (std::size_t block = 0; block < blocks; ++block, bytes += block_bytes) {
      scales(format, columns, bytes, random);
    }
  }

  const std::byte* data() { return bytes_.data(); }

  // [rows of all blocks][columns]
  std::vector<double> values() {
    std::vector<double> values = values_of(format_, bytes_.data(), blocks_, columns_);
    for (double& value : values) value *= factor_;
    return values;
  }

  static std::vector<double> values_of(const WeightFormat& format, const std::byte* bytes,
                                       std::size_t blocks, std::size_t columns) {
    std::vector<double> out(blocks * kRowsPerBlock * columns);
    DecodedGroup group;
    for (std::size_t block = 0; block < blocks; ++block) {
      const BlockDecoder decoder(format, bytes + block * format.block_bytes(columns), columns);
      std::size_t column = 0;
      for (std::size_t g = 0; g < decoder.groups_count(); ++g, column += group.columns) {
        decoder.decode(g, group);
        for (std::size_t c = 0; c < group.columns; ++c) {
          for (std::size_t r = 0; r < kRowsPerBlock; ++r) {
            out[(block * kRowsPerBlock + r) * columns + column + c] =
                double{group.codes[c][r]} * group.scale[r] - group.minimum[r];
          }
        }
      }
    }
    return out;
  }

 private:
  static void scales(const WeightFormat& format, std::size_t columns, std::uint8_t* block,
                     Random& random) {
    const std::size_t super_bytes =
        format.header_bytes() + (format.kind == WeightKind::kQ4K || format.kind == WeightKind::kQ6K
                                     ? kSuperBlockColumns / format.group
                                     : kSuperGroups) *
                                    format.group_bytes();
    switch (format.kind) {
      case WeightKind::kBf16:
        for (std::size_t i = 0; i < format.block_bytes(columns) / 2; ++i) {
          put_u16(block + 2 * i, float_to_bf16(random.next()));
        }
        return;
      case WeightKind::kFp8Block:
        for (std::size_t i = 0; i < format.block_bytes(columns); ++i) {
          if ((block[i] & 0x7fU) == 0x7fU) block[i] = 0;  // not a number
        }
        for (std::size_t i = 0; i < ceil_div(columns, kFp8BlockColumns); ++i) {
          const float scale = 0.001F + 0.001F * std::abs(random.next());
          std::memcpy(block + i * sizeof scale, &scale, sizeof scale);
        }
        return;
      case WeightKind::kQ4K:
      case WeightKind::kQ6K:
        for (std::size_t c = 0; c < columns; c += kSuperBlockColumns, block += super_bytes) {
          for (std::size_t r = 0; r < 32; ++r) {
            put_u16(block + 2 * r, static_cast<std::uint16_t>(0x1000U + random.bits() % 0x400U));
          }
        }
        return;
      default:
        for (std::size_t c = 0; c < columns;
             c += kSuperGroups * format.group, block += super_bytes) {
          for (std::size_t i = 0; i < kSuperGroups * kRowsPerBlock; ++i) {
            group_scale(format, block, i, random);
          }
        }
    }
  }

  static void group_scale(const WeightFormat& format, std::uint8_t* header, std::size_t entry,
                          Random& random) {
    if (format.kind == WeightKind::kMxfp4) {
      header[entry] = static_cast<std::uint8_t>(119 + random.bits() % 5);
    } else if (format.kind == WeightKind::kNvfp4) {
      header[entry] = static_cast<std::uint8_t>(random.bits() % 0x48);  // subnormals among them
    } else if (format.scale == ScaleType::kF16) {
      put_u16(header + 2 * entry, static_cast<std::uint16_t>(0x1800U + random.bits() % 0x400U));
    } else {
      put_u16(header + 2 * entry, float_to_bf16(0.004F * random.next()));
    }
  }

  WeightFormat format_;
  std::size_t columns_;
  std::size_t blocks_;
  Guarded<std::byte> bytes_;
  float factor_ = 1;
};

struct Linear {
  std::size_t tokens, in, out;
};

inline std::vector<float> run_linear(Executor& executor, RandomMatrix& matrix,
                                     const WeightFormat& format, const Bf16* x, const Linear& sizes,
                                     bool fast) {
  Guarded<float> y(sizes.tokens * sizes.out);
  const LinearOutput output{.w = matrix.data(),
                            .format = format,
                            .bias = nullptr,
                            .y = y.data(),
                            .out_features = sizes.out};
  executor.linear({.x = x,
                   .tokens = sizes.tokens,
                   .in_features = sizes.in,
                   .outputs = {&output, 1},
                   .fast = fast});
  return {y.data(), y.data() + y.size()};
}

}  // namespace freetoken::exec::test
