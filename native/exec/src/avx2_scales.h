// Scales of one group of 16 rows in AVX2 registers, and the walk over the groups of a block.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layout.h"
#include "weight_format.h"

namespace freetoken::exec {
namespace {

// Rows 0-7 and 8-15.
struct RowScales {
  __m256 scale[2];
  // What every weight is too large by: before the scale (zero points) or after it (q4_K). Zero
  // where the format has neither.
  __m256 offset[2];
};

inline __m256 bytes_to_singles(const std::uint8_t* at) {
  std::int64_t eight = 0;
  std::memcpy(&eight, at, sizeof eight);
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight)));
}

inline __m256 signed_bytes_to_singles(const std::uint8_t* at) {
  std::int64_t eight = 0;
  std::memcpy(&eight, at, sizeof eight);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(eight)));
}

inline __m256 halves_to_singles(const std::uint8_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

inline __m256 bf16_to_singles(const std::uint8_t* at) {
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

// 2^(code - 127); code 0 is a subnormal single.
inline __m256 e8m0_to_singles(const std::uint8_t* at) {
  std::int64_t eight = 0;
  std::memcpy(&eight, at, sizeof eight);
  const __m256i codes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
  const __m256i smallest = _mm256_set1_epi32(0x00400000);
  return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(codes, 23), smallest));
}

// As half precision with an exponent 8 too small: exact, subnormals too.
inline __m256 e4m3_to_singles(const std::uint8_t* at) {
  std::int64_t eight = 0;
  std::memcpy(&eight, at, sizeof eight);
  const __m128i on_top = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_cvtsi64_si128(eight));
  const __m128i halves = _mm_and_si128(_mm_srai_epi16(on_top, 1), _mm_set1_epi16(-0x4001));
  return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0F));
}

// The scales of rows 8 * half ... of group `within` of a header.
inline void load_scales(const WeightFormat& format, const std::uint8_t* header, std::size_t within,
                        std::size_t half, RowScales& out) {
  const std::uint8_t* entry = header + within * kRowsPerBlock + 8 * half;
  const std::uint8_t* words = header + 2 * (within * kRowsPerBlock + 8 * half);
  switch (format.kind) {
    case WeightKind::kMxfp4:
      out.scale[half] = e8m0_to_singles(entry);
      return;
    case WeightKind::kNvfp4:
      out.scale[half] = e4m3_to_singles(entry);
      return;
    case WeightKind::kFp8Block: {
      float scale = 0;
      std::memcpy(&scale, header + within * sizeof scale, sizeof scale);
      out.scale[half] = _mm256_set1_ps(scale);
      return;
    }
    case WeightKind::kQ4K:
      out.scale[half] =
          _mm256_mul_ps(halves_to_singles(header + 16 * half), bytes_to_singles(entry + 64));
      out.offset[half] =
          _mm256_mul_ps(halves_to_singles(header + 32 + 16 * half), bytes_to_singles(entry + 192));
      return;
    case WeightKind::kQ6K:
      out.scale[half] =
          _mm256_mul_ps(halves_to_singles(header + 16 * half), signed_bytes_to_singles(entry + 64));
      return;
    default:
      break;
  }
  out.scale[half] =
      format.scale == ScaleType::kF16 ? halves_to_singles(words) : bf16_to_singles(words);
  if (!format.zero_points) return;
  const __m256 zero = bytes_to_singles(entry + 2 * kSuperGroups * kRowsPerBlock);
  const float middle = format.kind == WeightKind::kInt8 ? 128.0F : 8.0F;
  out.offset[half] = _mm256_sub_ps(zero, _mm256_set1_ps(middle));
}

// Steps through the groups of one row block: where the header is and where the codes are.
class GroupWalk {
 public:
  GroupWalk(const WeightFormat& format, const std::byte* block, std::size_t columns)
      : format_(format), data_(reinterpret_cast<const std::uint8_t*>(block)), left_(columns) {
    if (format.kind == WeightKind::kFp8Block) {
      header_ = data_;
      data_ += round_up(ceil_div(columns, kFp8BlockColumns) * sizeof(float), 64);
      group_columns_ = kFp8BlockColumns;
    } else {
      group_columns_ = format.group;
    }
    open();
  }

  bool done() const { return left_ == 0; }
  // Columns of the group, rounded up to the four that fp8_block is padded to.
  std::size_t columns() const {
    return left_ < group_columns_ ? round_up(left_, 4) : group_columns_;
  }
  const std::uint8_t* codes() const { return data_; }

  void next() {
    data_ += format_.kind == WeightKind::kFp8Block ? columns() * kRowsPerBlock : group_bytes_;
    left_ -= left_ < group_columns_ ? left_ : group_columns_;
    ++within_;
    open();
  }

  const std::uint8_t* header() const { return header_; }
  // Of the group within its super-group or super block.
  std::size_t within() const { return within_; }

 private:
  // Super-groups and super blocks begin with their header.
  void open() {
    const std::size_t groups = format_.kind == WeightKind::kQ4K   ? 8
                               : format_.kind == WeightKind::kQ6K ? 16
                                                                  : kSuperGroups;
    if (format_.kind == WeightKind::kFp8Block || (within_ % groups != 0 && header_ != nullptr)) {
      return;
    }
    within_ = 0;
    header_ = data_;
    data_ += header_bytes_;
  }

  const WeightFormat& format_;
  std::size_t header_bytes_ = format_.header_bytes();
  std::size_t group_bytes_ = format_.group_bytes();
  std::size_t group_columns_ = 0;
  const std::uint8_t* header_ = nullptr;
  const std::uint8_t* data_;
  std::size_t left_;
  std::size_t within_ = 0;
};

}  // namespace
}  // namespace freetoken::exec
