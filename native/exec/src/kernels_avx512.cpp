#include "isa_avx512.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* avx512_kernels() {
  static const Kernels kTable = make_kernels<Avx512Isa>(generic_table<Avx512Isa>());
  return &kTable;
}

}  // namespace freetoken::exec
