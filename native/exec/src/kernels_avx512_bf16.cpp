#include "avx512_bf16_codes.h"
#include "avx512_products.h"
#include "isa_avx512_bf16.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* avx512_bf16_kernels() {
  static const Kernels kTable = [] {
    ProductTable products = avx512_table<Avx512Bf16Isa, Avx512Bf16Codes>();
    const ProductTable& vnni = avx512_vnni_kernels()->products;
    for (std::size_t kind = 0; kind < kWeightKinds; ++kind) products.fast[kind] = vnni.fast[kind];
    return make_kernels<Avx512Bf16Isa>(products);
  }();
  return &kTable;
}

}  // namespace freetoken::exec
