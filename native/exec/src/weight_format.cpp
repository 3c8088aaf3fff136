#include "weight_format.h"

#include <array>
#include <stdexcept>
#include <utility>

namespace freetoken::exec {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kScaleBytes = 2;  // f16 or bf16

struct NamedKind {
  std::string_view name;
  WeightFormat format;
};

constexpr std::array<NamedKind, 6> kNamed = {{
    {"bf16", {.kind = WeightKind::kBf16}},
    {"fp8_block", {.kind = WeightKind::kFp8Block}},
    {"mxfp4", {.kind = WeightKind::kMxfp4, .group = 32}},
    {"nvfp4", {.kind = WeightKind::kNvfp4, .group = 16}},
    {"q4_K", {.kind = WeightKind::kQ4K, .group = 32}},
    {"q6_K", {.kind = WeightKind::kQ6K, .group = 16}},
}};

bool eat(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// "int4_g32_f16", "int8_g128_bf16_zp"
bool parse_integer_format(std::string_view text, WeightFormat& format) {
  if (eat(text, "int4_g")) {
    format.kind = WeightKind::kInt4;
  } else if (eat(text, "int8_g")) {
    format.kind = WeightKind::kInt8;
  } else {
    return false;
  }
  for (const auto& [name, group] :
       {std::pair<std::string_view, std::uint16_t>{"32_", 32}, {"64_", 64}, {"128_", 128}}) {
    if (!eat(text, name)) continue;
    format.group = group;
    if (eat(text, "f16")) {
      format.scale = ScaleType::kF16;
    } else if (eat(text, "bf16")) {
      format.scale = ScaleType::kBf16;
    } else {
      return false;
    }
    format.zero_points = eat(text, "_zp");
    return text.empty();
  }
  return false;
}

}  // namespace

std::size_t WeightFormat::column_multiple() const {
  switch (kind) {
    case WeightKind::kBf16:
    case WeightKind::kFp8Block:
      return 1;
    case WeightKind::kQ4K:
    case WeightKind::kQ6K:
      return kSuperBlockColumns;
    default:
      return group;
  }
}

std::size_t WeightFormat::header_bytes() const {
  switch (kind) {
    case WeightKind::kMxfp4:
    case WeightKind::kNvfp4:
      return kSuperGroups * kRowsPerBlock;
    case WeightKind::kInt4:
    case WeightKind::kInt8:
      return kSuperGroups * kRowsPerBlock * (kScaleBytes + (zero_points ? 1 : 0));
    case WeightKind::kQ4K:  // d, minimum's d, then 8 scales and 8 minima per row
      return (2 * kScaleBytes + 8 + 8) * kRowsPerBlock;
    case WeightKind::kQ6K:  // d (padded to a line), 16 scales per row
      return kLine + 16 * kRowsPerBlock;
    default:
      return 0;
  }
}

std::size_t WeightFormat::group_bytes() const {
  switch (kind) {
    case WeightKind::kMxfp4:
    case WeightKind::kNvfp4:
    case WeightKind::kInt4:
    case WeightKind::kQ4K:
      return kRowsPerBlock * group / 2;
    case WeightKind::kInt8:
      return kRowsPerBlock * group;
    case WeightKind::kQ6K:
      return kRowsPerBlock * group * 6 / 8;
    default:
      return 0;
  }
}

std::size_t WeightFormat::block_bytes(std::size_t columns) const {
  switch (kind) {
    case WeightKind::kBf16:
      return rows16_block_bytes(columns);
    case WeightKind::kFp8Block:
      return round_up(ceil_div(columns, kFp8BlockColumns) * sizeof(float), kLine) +
             round_up(columns, 4) * kRowsPerBlock;
    case WeightKind::kQ4K:
    case WeightKind::kQ6K:
      return ceil_div(columns, kSuperBlockColumns) *
             (header_bytes() + kSuperBlockColumns / group * group_bytes());
    default: {
      const std::size_t groups = ceil_div(columns, group);
      return ceil_div(groups, kSuperGroups) * header_bytes() + groups * group_bytes();
    }
  }
}

std::size_t WeightFormat::blocks_bytes(std::size_t rows, std::size_t columns) const {
  return ceil_div(rows, kRowsPerBlock) * block_bytes(columns);
}

std::size_t WeightFormat::matrix_bytes(std::size_t rows, std::size_t columns) const {
  return blocks_bytes(rows, columns) + (has_global() ? kLine : 0);
}

std::string WeightFormat::name() const {
  for (const auto& [name, format] : kNamed) {
    if (format.kind == kind) return std::string(name);
  }
  std::string text = kind == WeightKind::kInt4 ? "int4_g" : "int8_g";
  text += std::to_string(group);
  text += scale == ScaleType::kF16 ? "_f16" : "_bf16";
  if (zero_points) text += "_zp";
  return text;
}

WeightFormat parse_weight_format(std::string_view name) {
  for (const auto& named : kNamed) {
    if (named.name == name) return named.format;
  }
  WeightFormat format;
  if (parse_integer_format(name, format)) return format;
  throw std::invalid_argument("unknown weight format '" + std::string(name) + "'");
}

ExpertLayout expert_layout(const WeightFormat& format, std::size_t hidden, std::size_t intermediate,
                           bool has_bias) {
  ExpertLayout layout{};
  const std::size_t inner = round_up(intermediate, kRowsPerBlock);
  layout.gate_up_block_bytes = format.block_bytes(hidden);
  layout.down_block_bytes = format.block_bytes(inner);
  layout.down_offset = 2 * (inner / kRowsPerBlock) * layout.gate_up_block_bytes;
  std::size_t end = layout.down_offset + ceil_div(hidden, kRowsPerBlock) * layout.down_block_bytes;
  const auto place = [&end](std::size_t length_bytes) {
    const std::size_t offset = end;
    end += round_up(length_bytes, kLine);
    return offset;
  };
  if (format.has_global()) layout.globals_offset = place(3 * sizeof(float));
  if (has_bias) {
    layout.gate_bias_offset = place(inner * sizeof(float));
    layout.up_bias_offset = place(inner * sizeof(float));
    layout.down_bias_offset = place(round_up(hidden, kRowsPerBlock) * sizeof(float));
  }
  layout.bytes = end;
  return layout;
}

}  // namespace freetoken::exec
