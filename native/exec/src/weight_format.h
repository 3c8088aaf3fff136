// Weight formats and where the bytes of a packed matrix and of an expert record lie.
// The byte layouts are described in docs/ftw.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "layout.h"

namespace freetoken::exec {

enum class WeightKind : std::uint8_t { kBf16, kFp8Block, kMxfp4, kNvfp4, kInt4, kInt8, kQ4K, kQ6K };
inline constexpr std::size_t kWeightKinds = 8;

enum class ScaleType : std::uint8_t { kNone, kF16, kBf16 };

// Columns that share a scale of fp8_block, and columns of a super block of the k-quants.
inline constexpr std::size_t kFp8BlockColumns = 128;
inline constexpr std::size_t kSuperBlockColumns = 256;
// Groups of a super-group: their scales lie together so that everything stays at 64 bytes.
inline constexpr std::size_t kSuperGroups = 4;

struct WeightFormat {
  WeightKind kind = WeightKind::kBf16;
  std::uint16_t group = 1;  // columns that share a scale; 1 where the kind fixes it otherwise
  ScaleType scale = ScaleType::kNone;  // of int4 and int8
  bool zero_points = false;            // of int4 and int8

  friend bool operator==(const WeightFormat&, const WeightFormat&) = default;

  // Columns of a matrix must be a multiple of this.
  std::size_t column_multiple() const;
  // Bytes at the head of a super-group or super block: scales, zero points, minima.
  std::size_t header_bytes() const;
  // Bytes of the codes of one group of 16 rows (group formats only).
  std::size_t group_bytes() const;
  // Bytes of 16 rows; a multiple of 64.
  std::size_t block_bytes(std::size_t columns) const;
  // Whether a matrix has one fp32 factor over all.
  bool has_global() const { return kind == WeightKind::kNvfp4; }
  // Bytes of the row blocks of a matrix.
  std::size_t blocks_bytes(std::size_t rows, std::size_t columns) const;
  // Bytes of a matrix that stands alone: its blocks, then a line that begins with its factor, if it
  // has one.
  std::size_t matrix_bytes(std::size_t rows, std::size_t columns) const;
  std::string name() const;
};

// The canonical names of docs/ftw.md, such as "bf16", "nvfp4", "int4_g32_f16", "int8_g128_bf16_zp".
// Throws std::invalid_argument for anything else.
WeightFormat parse_weight_format(std::string_view name);

// Offsets within an expert record. Offsets of what a record does not have are 0.
struct ExpertLayout {
  std::size_t gate_up_block_bytes;  // one block of gate or of up; they alternate
  std::size_t down_block_bytes;
  std::size_t down_offset;
  std::size_t globals_offset;  // nvfp4: fp32 scale of gate, of up and of down
  std::size_t gate_bias_offset;
  std::size_t up_bias_offset;
  std::size_t down_bias_offset;
  std::size_t bytes;  // without the padding of the record
};

ExpertLayout expert_layout(const WeightFormat& format, std::size_t hidden, std::size_t intermediate,
                           bool has_bias);

}  // namespace freetoken::exec
