#include "avx512_codes.h"
#include "avx512_products.h"
#include "isa_avx512.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* avx512_kernels() {
  static const Kernels kTable = make_kernels<Avx512Isa>(avx512_table<Avx512Isa, Avx512Codes>());
  return &kTable;
}

}  // namespace freetoken::exec
