#include "amx_bf16.h"
#include "amx_fp8.h"
#include "amx_int8.h"

namespace freetoken::exec {

// As avx512_bf16, with the exact products on tiles.
const Kernels* amx_kernels() {
  static constexpr ProductKernels kBf16Products = AmxBf16::table();
  static constexpr ProductKernels kFp8Products = AmxFp8::table();
  static const Kernels kTable = [] {
    Kernels kernels = *avx512_bf16_kernels();
    kernels.isa = "amx";
    kernels.products.exact[static_cast<std::size_t>(WeightKind::kBf16)] = &kBf16Products;
    kernels.products.exact[static_cast<std::size_t>(WeightKind::kFp8Block)] = &kFp8Products;
    add_amx_digits(kernels.products);
    return kernels;
  }();
  return &kTable;
}

}  // namespace freetoken::exec
