#include "avx_vnni.h"
#include "isa_avx2.h"
#include "vnni_products.h"

namespace freetoken::exec {

// As avx2, with products of integers of its own.
const Kernels* avx_vnni_kernels() {
  static const Kernels kTable = [] {
    Kernels kernels = *avx2_kernels();
    kernels.isa = "avx_vnni";
    add_vnni_products<Avx2Isa, AvxVnniInts, AvxVnniGroups>(kernels.products);
    return kernels;
  }();
  return &kTable;
}

}  // namespace freetoken::exec
