#include "amx_bf16.h"
#include "amx_products.h"

namespace freetoken::exec {

// As avx512_bf16, with the products of bf16 activations on tiles.
const Kernels* amx_kernels() {
  static constexpr ProductKernels kBf16Products = AmxBf16::table();
  static constexpr ProductKernels kProducts = AmxProducts::table();
  static const Kernels kTable = [] {
    Kernels kernels = *avx512_bf16_kernels();
    kernels.isa = "amx";
    for (auto& entry : kernels.products.exact) entry = &kProducts;
    kernels.products.exact[static_cast<std::size_t>(WeightKind::kBf16)] = &kBf16Products;
    return kernels;
  }();
  return &kTable;
}

}  // namespace freetoken::exec
