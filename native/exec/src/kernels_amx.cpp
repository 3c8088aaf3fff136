#include "amx_bf16.h"

namespace freetoken::exec {

// As avx512_bf16, with bf16 weights on tiles.
const Kernels* amx_kernels() {
  static constexpr ProductKernels kBf16Products = AmxBf16::table();
  static const Kernels kTable = [] {
    Kernels kernels = *avx512_bf16_kernels();
    kernels.isa = "amx";
    kernels.products.exact[static_cast<std::size_t>(WeightKind::kBf16)] = &kBf16Products;
    return kernels;
  }();
  return &kTable;
}

}  // namespace freetoken::exec
