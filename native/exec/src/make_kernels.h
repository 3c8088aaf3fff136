// Instantiates every kernel for one instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "format_bf16.h"
#include "generic_products.h"
#include "glu.h"
#include "kernels.h"
#include "row_kernels.h"
#include "row_math.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

// The exclusive or of all words, read as the products read weights: in four streams.
template <class Isa>
std::uint64_t stream_read(const std::byte* data, std::size_t length_bytes) {
  constexpr std::size_t kStreams = 4;
  constexpr std::size_t kLine = 64;
  const std::size_t stride = length_bytes / (kStreams * kLine) * kLine;
  typename Isa::Line sum[kStreams] = {};
  for (std::size_t i = 0; i < stride; i += kLine) {
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kStreams; ++s) {
      sum[s] = Isa::mix(sum[s], data + s * stride + i);
    }
  }
  std::uint64_t all = 0;
  for (const auto& part : sum) all ^= Isa::fold(part);
  for (std::size_t i = kStreams * stride; i + 8 <= length_bytes; i += 8) {
    all ^= *reinterpret_cast<const std::uint64_t*>(data + i);
  }
  return all;
}

// Every kind of weights with bf16 activations: bf16 by itself, the others by the generic products.
template <class Isa>
const ProductTable& generic_table() {
  static constexpr ProductKernels kBf16Products = Bf16Format<Isa>::table();
  static constexpr ProductKernels kGenericProducts = GenericProducts<Isa>::table();
  static constexpr ProductTable kTable = [] {
    ProductTable table{};
    for (auto& entry : table.exact) entry = &kGenericProducts;
    table.exact[static_cast<std::size_t>(WeightKind::kBf16)] = &kBf16Products;
    return table;
  }();
  return kTable;
}

template <class Isa>
constexpr Kernels make_kernels(const ProductTable& products) {
  return {.isa = Isa::kName,
          .products = products,
          .glu = Glu<Isa>::run,
          .rms_norm = rms_norm<Isa>,
          .silu_product = silu_product<Isa>,
          .attend = Attention<Isa>::attend,
          .attend_merge = Attention<Isa>::merge,
          .attend_finish = Attention<Isa>::finish,
          .rows = RowOps<Isa>::table(),
          .stream_read = stream_read<Isa>};
}

}  // namespace
}  // namespace freetoken::exec
