#include "avx512_codes.h"
#include "avx512_products.h"
#include "isa_avx512.h"
#include "make_kernels.h"

namespace freetoken::exec {

// Products of integers are those of avx2: without VNNI wider registers bring little.
const Kernels* avx512_kernels() {
  static const Kernels kTable = [] {
    ProductTable products = avx512_table<Avx512Isa, Avx512Codes>();
    const ProductTable& avx2 = avx2_kernels()->products;
    for (std::size_t kind = 0; kind < kWeightKinds; ++kind) products.fast[kind] = avx2.fast[kind];
    return make_kernels<Avx512Isa>(products);
  }();
  return &kTable;
}

}  // namespace freetoken::exec
