#include "avx512_groups.h"
#include "avx512_vnni.h"
#include "isa_avx512.h"
#include "vnni_products.h"

namespace freetoken::exec {

// As avx512, with products of integers.
const Kernels* avx512_vnni_kernels() {
  static const Kernels kTable = [] {
    Kernels kernels = *avx512_kernels();
    kernels.isa = "avx512_vnni";
    add_vnni_products<Avx512Isa, Avx512Ints, Avx512Groups>(kernels.products);
    return kernels;
  }();
  return &kTable;
}

}  // namespace freetoken::exec
